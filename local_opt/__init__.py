"""When workers talk: local steps around any optax optimizer, synchronised by a plan."""

from local_opt.accumulate import AccumulateState, accumulated_rounds
from local_opt.forecast import (
    CommunicationTime,
    Forecast,
    communication_time,
    forecast,
    ring_bytes,
)
from local_opt.outer import nesterov, per_step, slow_momentum
from local_opt.plan import SyncPlan, load_plan
from local_opt.rounds import (
    LocalState,
    Rounds,
    local_rounds,
    parallel_rounds,
    relative_distance,
)
from local_opt.rules import (
    bernoulli,
    by_step,
    constant,
    every_step,
    from_function,
    per_load,
    post_local,
    power_rule,
    qsr,
    swap,
)
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
    "by_step",
    "check_same_plan",
    "check_same_start",
    "communication_time",
    "consolidate",
    "constant",
    "every_step",
    "forecast",
    "from_function",
    "load_plan",
    "local_rounds",
    "local_steps",
    "nesterov",
    "parallel_rounds",
    "per_load",
    "per_step",
    "post_local",
    "power_rule",
    "qsr",
    "reestimate",
    "relative_distance",
    "ring_bytes",
    "slow_momentum",
    "swap",
    "synchronize",
]
