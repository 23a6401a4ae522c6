"""Example orders for JAX: which unit of the data a training loop visits next.

`ordering.echo` repeats batches when loading is slow, `ordering.data` reads batches ahead, and
`ordering.blocks` orders blocks of data that are too large to shuffle.
"""

from ordering import blocks, data, echo
from ordering.base import Ordering, init_workers
from ordering.global_order import global_order, global_reshuffling
from ordering.grab import grab
from ordering.gradients import check_separable, group_loss, microbatch_grads, per_example_grads
from ordering.herding import greedy_herding, herding_bound
from ordering.pairs import cd_grab, pair_balance
from ordering.resize import resize
from ordering.shuffles import block_reshuffling, random_reshuffling, shuffle_once, unzip
from ordering.signs import SignRule, kernel_halving, self_balancing_walk
from ordering.sketches.backward import sketch_plan, sketched_grads
from ordering.sketches.linear import make_sketch, sketch_rows
from ordering.sketches.scale import second_moment_scale

__all__ = [
    "Ordering",
    "SignRule",
    "block_reshuffling",
    "blocks",
    "cd_grab",
    "check_separable",
    "data",
    "echo",
    "global_order",
    "global_reshuffling",
    "grab",
    "greedy_herding",
    "group_loss",
    "herding_bound",
    "init_workers",
    "kernel_halving",
    "make_sketch",
    "microbatch_grads",
    "pair_balance",
    "per_example_grads",
    "random_reshuffling",
    "resize",
    "second_moment_scale",
    "self_balancing_walk",
    "shuffle_once",
    "sketch_plan",
    "sketch_rows",
    "sketched_grads",
    "unzip",
]
