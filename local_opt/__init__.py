"""When workers talk: local steps around any optax optimizer, synchronised by a plan."""

from local_opt.accumulate import AccumulateState, accumulated_rounds
from local_opt.forecast import (
    CommunicationTime,
    Forecast,
    communication_time,
    forecast,
    ring_bytes,
)
from local_opt.outer import nesterov, normalize_by_period, slow_momentum
from local_opt.parallel import parallel_rounds
from local_opt.plan import SyncPlan, read_sync_plan
from local_opt.rounds import LocalState, Rounds, local_rounds, relative_distance
from local_opt.rules import (
    bernoulli,
    constant,
    every_step,
    from_function,
    post_local,
    swap,
    sync_every_load,
)
from local_opt.schedule_rules import from_schedule, power_rule, qsr
from local_opt.synchronize import synchronize
from local_opt.transform import PlannedState, accumulate, local_steps
from local_opt.workers import check_same_plan, check_same_start, consolidate, reestimate

__all__ = [
    "AccumulateState",
    "CommunicationTime",
    "Forecast",
    "LocalState",
    "PlannedState",
    "Rounds",
    "SyncPlan",
    "accumulate",
    "accumulated_rounds",
    "bernoulli",
    "check_same_plan",
    "check_same_start",
    "communication_time",
    "consolidate",
    "constant",
    "every_step",
    "forecast",
    "from_function",
    "from_schedule",
    "local_rounds",
    "local_steps",
    "nesterov",
    "normalize_by_period",
    "parallel_rounds",
    "post_local",
    "power_rule",
    "qsr",
    "read_sync_plan",
    "reestimate",
    "relative_distance",
    "ring_bytes",
    "slow_momentum",
    "swap",
    "sync_every_load",
    "synchronize",
]
