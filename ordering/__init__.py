"""Which unit comes next: example orders as small pure functions for JAX."""

from ordering.balance import balance, balance_blocks, default_block_size
from ordering.base import Ordering
from ordering.exchange import averaged, exchange, exchanged
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
from ordering.rows import Rows, centred, differences, finite_units, stacked
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
    "block_reshuffling",
    "cd_grab",
    "centred",
    "check_separable",
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
    "kernel_halving",
    "microbatch",
    "observe_in_chunks",
    "pair_balance",
    "parallel_herding_bound",
    "per_example",
    "random_reshuffling",
    "self_balancing_walk",
    "shuffle_once",
    "stacked",
    "unzip",
]
