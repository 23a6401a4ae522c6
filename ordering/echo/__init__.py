"""When a batch is used again: stochastic data echoing for input that is slower than a step."""

from ordering.echo.echo_batches import EchoStep, echo_batches, observe_fresh
from ordering.echo.input_simulator import EchoForecast, echo_forecast
from ordering.echo.online import measured
from ordering.echo.plan import EchoPlan, bernoulli, error_diffusion, fixed, read_echo_plan
from ordering.echo.proximal import proximal_anchor

__all__ = [
    "EchoForecast",
    "EchoPlan",
    "EchoStep",
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
