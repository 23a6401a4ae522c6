"""Data echoing: plans and policies of when to load a batch, and the batches of every step."""

from ordering.echo.plans import EchoPlan, adaptive, bernoulli, error_diffusion, fixed
from ordering.echo.stream import echo_batches

__all__ = [
    "EchoPlan",
    "adaptive",
    "bernoulli",
    "echo_batches",
    "error_diffusion",
    "fixed",
]
