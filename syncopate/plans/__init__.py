"""What all plans share: schedules evaluated on the host, shared coins, and a file that is whole."""

from syncopate.plans.record import Plan
from syncopate.plans.schedule import (
    bernoulli_draws,
    check_key,
    check_total_steps,
    describe_schedule,
    evaluate_schedule,
    is_whole,
    probabilities,
)

__all__ = [
    "Plan",
    "bernoulli_draws",
    "check_key",
    "check_total_steps",
    "describe_schedule",
    "evaluate_schedule",
    "is_whole",
    "probabilities",
]
