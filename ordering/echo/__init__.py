"""When a batch is used again: echo plans, a policy that follows the input, and the stream."""

from ordering.echo.input_simulator import echo_forecast
from ordering.echo.online import measured
from ordering.echo.plans import EchoPlan, bernoulli, error_diffusion, fixed
from ordering.echo.proximal import proximal_anchor
from ordering.echo.stream import echo_batches, observe_fresh

__all__ = [
    "EchoPlan",
    "bernoulli",
    "echo_batches",
    "echo_forecast",
    "error_diffusion",
    "fixed",
    "measured",
    "observe_fresh",
    "proximal_anchor",
]
