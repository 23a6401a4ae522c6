"""When workers talk: local steps around any optax optimizer, synchronised by a plan."""

from local_opt.accumulate import AccumulateState, accumulated_rounds
from local_opt.aligned import aligned
from local_opt.checks import check_same_plan, check_same_start, check_synced
from local_opt.drift import ControlState, Correction, control_variates, proximal
from local_opt.forecast import (
    CommunicationTime,
    Forecast,
    communication_time,
    forecast,
    sync_bytes,
)
from local_opt.forecast_parts import PartsForecast, describe_parts, forecast_parts
from local_opt.lift import lift, owned
from local_opt.outer import nesterov, normalize_by_period, slow_momentum
from local_opt.parallel import parallel_rounds
from local_opt.part_plans import PartEvent, PartPlans, read_part_plans
from local_opt.plan import SyncPlan, read_sync_plan
from local_opt.presets import diloco, slowmo
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
from local_opt.streaming import (
    Streaming,
    StreamingState,
    fragment_labels,
    fragment_sizes,
    streaming_rounds,
)
from local_opt.synchronize import nothing_lost, synchronize, synchronize_changes
from local_opt.transform import PlannedState, accumulate, local_steps
from local_opt.wires import WIRES, Wire, float_wire, integer_wire, top_k_wire
from local_opt.workers import consolidate, reestimate

__all__ = [
    "WIRES",
    "AccumulateState",
    "CommunicationTime",
    "ControlState",
    "Correction",
    "Forecast",
    "LocalState",
    "PartEvent",
    "PartPlans",
    "PartsForecast",
    "PlannedState",
    "Rounds",
    "Streaming",
    "StreamingState",
    "SyncPlan",
    "Wire",
    "accumulate",
    "accumulated_rounds",
    "aligned",
    "bernoulli",
    "check_same_plan",
    "check_same_start",
    "check_synced",
    "communication_time",
    "consolidate",
    "constant",
    "control_variates",
    "describe_parts",
    "diloco",
    "every_step",
    "float_wire",
    "forecast",
    "forecast_parts",
    "fragment_labels",
    "fragment_sizes",
    "from_function",
    "from_schedule",
    "integer_wire",
    "lift",
    "local_rounds",
    "local_steps",
    "nesterov",
    "normalize_by_period",
    "nothing_lost",
    "owned",
    "parallel_rounds",
    "post_local",
    "power_rule",
    "proximal",
    "qsr",
    "read_part_plans",
    "read_sync_plan",
    "reestimate",
    "relative_distance",
    "slow_momentum",
    "slowmo",
    "streaming_rounds",
    "swap",
    "sync_bytes",
    "sync_every_load",
    "synchronize",
    "synchronize_changes",
    "top_k_wire",
]
