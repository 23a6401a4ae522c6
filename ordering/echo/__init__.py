"""Data echoing: plans and policies of when to load a batch, and the batches of every step."""

from ordering.echo.plans import (
    EchoPlan,
    Factor,
    Measured,
    adaptive,
    bernoulli,
    error_diffusion,
    fixed,
)
from ordering.echo.stream import EchoState, Repeated, repeat

__all__ = [
    "EchoPlan",
    "EchoState",
    "Factor",
    "Measured",
    "Repeated",
    "adaptive",
    "bernoulli",
    "error_diffusion",
    "fixed",
    "repeat",
]
