"""Example orders for JAX: which unit of the data a training loop visits next.

`ordering.echo` repeats batches when loading is slow, `ordering.data` reads batches ahead, and
`ordering.blocks` orders blocks of data that are too large to shuffle.
"""

from ordering import blocks, data, echo
from ordering.base import Ordering, start
from ordering.dealing import dealt, dealt_reshuffling
from ordering.grab import grab
from ordering.gradients import check_separable, grouped, microbatch, per_example
from ordering.herding import greedy_herding, herding_bound
from ordering.pairs import cd_grab, pair_balance
from ordering.resize import resize
from ordering.shuffles import block_reshuffling, random_reshuffling, shuffle_once, unzip
from ordering.signs import SignRule, kernel_halving, self_balancing_walk
from ordering.sketches.backward import sketched, sketched_parameters
from ordering.sketches.linear import sketch, sketch_rows
from ordering.sketches.scale import scale_of

__all__ = [
    "Ordering",
    "SignRule",
    "block_reshuffling",
    "blocks",
    "cd_grab",
    "check_separable",
    "dealt",
    "dealt_reshuffling",
    "echo",
    "grab",
    "greedy_herding",
    "grouped",
    "herding_bound",
    "data",
    "kernel_halving",
    "microbatch",
    "pair_balance",
    "per_example",
    "random_reshuffling",
    "resize",
    "scale_of",
    "self_balancing_walk",
    "shuffle_once",
    "sketch",
    "sketch_rows",
    "sketched",
    "sketched_parameters",
    "start",
    "unzip",
]
