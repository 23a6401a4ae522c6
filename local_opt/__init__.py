"""Local steps with any optax optimizer: workers synchronise where a plan says, not every step.

`local_opt.presets` has published methods and `local_opt.corrections` reduces drift.
`local_opt.streaming` synchronises fragments, and `local_opt.elastic` continues if a process ends.
`local_opt.costs` counts what syncs cost.
"""

from local_opt import corrections, costs, elastic, presets, streaming
from local_opt.formats import Compressor, quantize, top_k
from local_opt.mapping import map_workers
from local_opt.mean import pmean
from local_opt.plans import SyncPlan, from_function
from local_opt.replication import replicate
from local_opt.rounds import Rounds, accumulated_rounds, local_rounds, local_steps, parallel_rounds
from local_opt.rules import bernoulli, constant, qsr
from local_opt.workers import check_synced, mean_over_workers

__all__ = [
    "Compressor",
    "Rounds",
    "SyncPlan",
    "accumulated_rounds",
    "bernoulli",
    "check_synced",
    "constant",
    "corrections",
    "costs",
    "elastic",
    "from_function",
    "local_rounds",
    "local_steps",
    "map_workers",
    "mean_over_workers",
    "parallel_rounds",
    "pmean",
    "presets",
    "qsr",
    "quantize",
    "replicate",
    "streaming",
    "top_k",
]
