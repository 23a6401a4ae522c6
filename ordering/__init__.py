"""Example orders for JAX: which unit of the data a training loop visits next.

`ordering.echo` repeats batches when loading is slow, `ordering.data` reads batches ahead,
`ordering.blocks` orders blocks of data that are too large to shuffle, and `ordering.baselines` has
the controls and sign rules of the papers.
"""

from ordering import baselines, blocks, data, echo
from ordering.base import Ordering, init_workers
from ordering.centred import grab
from ordering.gathered import cd_grab
from ordering.global_orders import global_order, global_reshuffling
from ordering.gradients.backward import sketch_plan, sketched_grads
from ordering.gradients.examples import (
    check_separable,
    group_loss,
    microbatch_grads,
    per_example_grads,
)
from ordering.gradients.linear import SketchLeaf, make_sketch
from ordering.gradients.scale import second_moment_scale
from ordering.indices import Indices
from ordering.mixtures import MixturePlan, mixture
from ordering.pairs import pair_balance
from ordering.permutations import counted, index_shuffle
from ordering.resizing import resize
from ordering.scored_orders import scored
from ordering.shuffles import random_reshuffling

__all__ = [
    "Indices",
    "MixturePlan",
    "Ordering",
    "SketchLeaf",
    "baselines",
    "blocks",
    "cd_grab",
    "check_separable",
    "counted",
    "data",
    "echo",
    "global_order",
    "global_reshuffling",
    "grab",
    "group_loss",
    "index_shuffle",
    "init_workers",
    "make_sketch",
    "microbatch_grads",
    "mixture",
    "pair_balance",
    "per_example_grads",
    "random_reshuffling",
    "resize",
    "scored",
    "second_moment_scale",
    "sketch_plan",
    "sketched_grads",
]
