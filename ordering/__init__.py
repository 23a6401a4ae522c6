"""Which unit comes next: example orders as small pure functions for JAX."""

from ordering.balance import balance, balance_blocks, default_block_size
from ordering.base import Ordering, check_units_per_step
from ordering.exchange import averaged, exchange, exchanged
from ordering.front import Front, open_epoch, open_front
from ordering.grab import GrabState, grab
from ordering.gradients import (
    check_separable,
    microbatch,
    observe_in_chunks,
    per_example,
)
from ordering.herding import (
    GreedyHerdingState,
    greedy_herding,
    herding_bound,
    parallel_herding_bound,
)
from ordering.pair_balance import PairBalanceState, cd_grab, pair_balance
from ordering.pipeline import batches, prefetch_to_device, step_indices
from ordering.rows import Rows, centred, differences, finite_units, joined, stacked
from ordering.shuffles import (
    ShuffleState,
    block_reshuffling,
    flip_flop,
    random_reshuffling,
    shuffle_once,
    unzip,
)
from ordering.signs import SignRule, greedy, kernel_halving, self_balancing_walk

__all__ = [
    "Front",
    "GrabState",
    "GreedyHerdingState",
    "Ordering",
    "PairBalanceState",
    "Rows",
    "ShuffleState",
    "SignRule",
    "averaged",
    "balance",
    "balance_blocks",
    "batches",
    "block_reshuffling",
    "cd_grab",
    "centred",
    "check_separable",
    "check_units_per_step",
    "default_block_size",
    "differences",
    "exchange",
    "exchanged",
    "finite_units",
    "flip_flop",
    "grab",
    "greedy",
    "greedy_herding",
    "herding_bound",
    "joined",
    "kernel_halving",
    "microbatch",
    "observe_in_chunks",
    "open_epoch",
    "open_front",
    "pair_balance",
    "parallel_herding_bound",
    "per_example",
    "prefetch_to_device",
    "random_reshuffling",
    "self_balancing_walk",
    "shuffle_once",
    "stacked",
    "step_indices",
    "unzip",
]
