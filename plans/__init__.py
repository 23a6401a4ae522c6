"""What all plans share: schedules on the host, draws of one shared key, a file that is whole."""

from plans.record import Plan, read, write
from plans.schedule import (
    bernoulli_draws,
    check_total_steps,
    describe,
    evaluate_schedule,
    is_whole,
    probabilities,
)

__all__ = [
    "Plan",
    "probabilities",
    "check_total_steps",
    "bernoulli_draws",
    "is_whole",
    "read",
    "describe",
    "evaluate_schedule",
    "write",
]
