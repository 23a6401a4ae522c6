"""Local steps with any optax optimizer: workers synchronise where a plan says, not every step."""

from local_opt.corrections import Correction, control_variates, proximal
from local_opt.cost import count_collectives, sync_bytes
from local_opt.formats import Wire, rounded_wire, top_k_wire
from local_opt.lift import lift, owned
from local_opt.mean import synchronize
from local_opt.plans import SyncPlan, from_function
from local_opt.presets import diloco, normalize_by_period, slowmo
from local_opt.rounds import Rounds, accumulated_rounds, local_rounds, local_steps, parallel_rounds
from local_opt.rules import bernoulli, constant, qsr
from local_opt.streaming import stream_segments, streaming_rounds
from local_opt.survivors import Survivors
from local_opt.workers import check_synced, consolidate

__all__ = [
    "Correction",
    "Rounds",
    "Survivors",
    "SyncPlan",
    "Wire",
    "accumulated_rounds",
    "bernoulli",
    "check_synced",
    "consolidate",
    "constant",
    "control_variates",
    "count_collectives",
    "diloco",
    "from_function",
    "lift",
    "local_rounds",
    "local_steps",
    "normalize_by_period",
    "owned",
    "parallel_rounds",
    "proximal",
    "qsr",
    "rounded_wire",
    "slowmo",
    "stream_segments",
    "streaming_rounds",
    "sync_bytes",
    "synchronize",
    "top_k_wire",
]
