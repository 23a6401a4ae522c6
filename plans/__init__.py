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
    "bernoulli_draws",
    "check_total_steps",
    "describe",
    "evaluate_schedule",
    "is_whole",
    "probabilities",
    "read",
    "write",
]
