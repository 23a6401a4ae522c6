"""What all plans share: schedules evaluated on the host, shared coins, and a file that is whole."""

from plans.record import Plan, read, write
from plans.schedule import chances, check_total_steps, coins, is_whole, shown, values_of

__all__ = [
    "Plan",
    "chances",
    "check_total_steps",
    "coins",
    "is_whole",
    "read",
    "shown",
    "values_of",
    "write",
]
