"""When a batch is used again: echo plans, a policy that follows the input, and the stream."""

from ordering.echo.input_simulator import EchoForecast, echo_forecast
from ordering.echo.online import Measured, measured
from ordering.echo.plans import EchoPlan, bernoulli, error_diffusion, fixed, read_echo_plan
from ordering.echo.proximal import proximal_anchor
from ordering.echo.stream import EchoStep, echo_batches, observe_fresh

__all__ = [
    "EchoForecast",
    "EchoPlan",
    "EchoStep",
    "Measured",
    "bernoulli",
    "echo_batches",
    "echo_forecast",
    "error_diffusion",
    "fixed",
    "measured",
    "observe_fresh",
    "proximal_anchor",
    "read_echo_plan",
]
