"""Which unit comes next, and when a batch is used again: small pure functions for JAX."""

from ordering.balance import balance, balance_blocks, default_block_size
from ordering.base import Ordering, check_units_per_step
from ordering.echo import EchoPlan, bernoulli, error_diffusion, fixed, read_echo_plan
from ordering.echo_batches import EchoStep, echo_batches, observe_fresh
from ordering.exchange import all_reduce_mean, all_to_all_mean, exchange
from ordering.front import Prefetched, prefetch_next_epoch, read_epoch
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
from ordering.input_simulator import EchoForecast, echo_forecast
from ordering.loader import Loader, LoadError, load_ahead
from ordering.measured import Measured, decide, measured, ready_everywhere
from ordering.pair_balance import PairBalanceState, cd_grab, pair_balance
from ordering.pipeline import batches, prefetch_to_device, step_indices
from ordering.proximal import ProximalState, proximal_anchor
from ordering.rows import Rows, centre, concatenate, differences, finite_units
from ordering.shuffles import (
    ShuffleState,
    block_reshuffling,
    flip_flop,
    random_reshuffling,
    shuffle_once,
    unzip,
)
from ordering.signs import SignRule, greedy, kernel_halving, self_balancing_walk
from ordering.sources import reader

__all__ = [
    "EchoForecast",
    "EchoPlan",
    "Prefetched",
    "GrabState",
    "GreedyHerdingState",
    "LoadError",
    "Loader",
    "Measured",
    "Ordering",
    "PairBalanceState",
    "ProximalState",
    "Rows",
    "ShuffleState",
    "SignRule",
    "EchoStep",
    "all_reduce_mean",
    "balance",
    "balance_blocks",
    "batches",
    "bernoulli",
    "block_reshuffling",
    "cd_grab",
    "centre",
    "check_separable",
    "check_units_per_step",
    "decide",
    "default_block_size",
    "differences",
    "echo_forecast",
    "echo_batches",
    "error_diffusion",
    "exchange",
    "all_to_all_mean",
    "finite_units",
    "fixed",
    "flip_flop",
    "grab",
    "greedy",
    "greedy_herding",
    "herding_bound",
    "concatenate",
    "kernel_halving",
    "load_ahead",
    "read_echo_plan",
    "measured",
    "microbatch",
    "observe_fresh",
    "observe_in_chunks",
    "read_epoch",
    "prefetch_next_epoch",
    "pair_balance",
    "parallel_herding_bound",
    "per_example",
    "prefetch_to_device",
    "proximal_anchor",
    "random_reshuffling",
    "reader",
    "ready_everywhere",
    "self_balancing_walk",
    "shuffle_once",
    "step_indices",
    "unzip",
]
