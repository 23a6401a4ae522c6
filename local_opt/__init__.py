"""Local steps with any optax optimizer: workers synchronise where a plan says, not every step."""

from local_opt.corrections import Correction, fedprox, scaffold
from local_opt.cost import count_collectives, sync_bytes
from local_opt.elastic import ElasticSync, Members
from local_opt.formats import Compressor, quantize, top_k
from local_opt.mapping import map_workers
from local_opt.mean import pmean
from local_opt.plans import SyncPlan, from_function
from local_opt.presets import diloco, normalize_by_period, slowmo
from local_opt.replication import replicate
from local_opt.rounds import Rounds, accumulated_rounds, local_rounds, local_steps, parallel_rounds
from local_opt.rules import bernoulli, constant, qsr
from local_opt.streaming import stream_segments, streaming_rounds
from local_opt.workers import check_synced, mean_over_workers

__all__ = [
    "Correction",
    "ElasticSync",
    "Members",
    "Rounds",
    "SyncPlan",
    "Compressor",
    "accumulated_rounds",
    "bernoulli",
    "check_synced",
    "constant",
    "count_collectives",
    "diloco",
    "fedprox",
    "from_function",
    "local_rounds",
    "local_steps",
    "map_workers",
    "mean_over_workers",
    "normalize_by_period",
    "parallel_rounds",
    "pmean",
    "qsr",
    "quantize",
    "replicate",
    "scaffold",
    "slowmo",
    "stream_segments",
    "streaming_rounds",
    "sync_bytes",
    "top_k",
]
