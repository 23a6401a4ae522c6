"""Data echoing: plans and policies of when to load a batch, and the batches of every step."""

from ordering.echo.input_simulator import echo_forecast
from ordering.echo.plans import EchoPlan, bernoulli, error_diffusion, fixed, measured
from ordering.echo.stream import echo_batches

__all__ = [
    "EchoPlan",
    "bernoulli",
    "echo_batches",
    "echo_forecast",
    "error_diffusion",
    "fixed",
    "measured",
]
