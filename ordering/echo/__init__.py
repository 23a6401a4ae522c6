"""When a batch is used again: echo plans, a policy that follows the input, and the stream."""

from ordering.echo.input_simulator import echo_forecast
from ordering.echo.plans import EchoPlan, bernoulli, error_diffusion, fixed, measured
from ordering.echo.stream import echo_batches, proximal_anchor

__all__ = [
    "EchoPlan",
    "bernoulli",
    "echo_batches",
    "echo_forecast",
    "error_diffusion",
    "fixed",
    "measured",
    "proximal_anchor",
]
