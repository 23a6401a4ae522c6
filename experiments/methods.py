"""The table of orders that experiments compare: a new order is one row."""

from collections.abc import Callable
from typing import NamedTuple

import ordering


class Setting(NamedTuple):
    """What an order may need to know about a run."""

    num_units: int  # M, per worker
    units_per_step: int  # B, per worker
    workers: int
    epochs: int
    block_size: int | None = None  # for running sums that all workers share


class Method(NamedTuple):
    label: str
    make: Callable[[Setting], ordering.Ordering]
    observes: bool = True  # False: needs no gradient of single units
    coordinated: bool = False  # True: one running sum over all workers


def _coordinated(s: Setting, rule: ordering.SignRule | None = None) -> ordering.Ordering:
    return ordering.cd_grab(
        s.num_units, units_per_step=s.units_per_step, block_size=s.block_size, rule=rule
    )


def _halving(s: Setting) -> ordering.SignRule:
    num_pairs = max(1, s.num_units // 2 * s.workers)
    return ordering.kernel_halving(num_epochs=s.epochs, num_pairs=num_pairs)


METHODS = {
    "rr": Method("D-RR", lambda s: ordering.random_reshuffling(s.num_units), observes=False),
    "unzip": Method("unzip control", lambda s: ordering.unzip(s.num_units), observes=False),
    "id_mean": Method(
        "independent mean",
        lambda s: ordering.grab(s.num_units, units_per_step=s.units_per_step),
    ),
    "id_pair": Method(
        "independent pair",
        lambda s: ordering.pair_balance(s.num_units, units_per_step=s.units_per_step),
    ),
    "cd_grab": Method("CD-GraB", _coordinated, coordinated=True),
    "so": Method("shuffle once", lambda s: ordering.shuffle_once(s.num_units), observes=False),
    "flipflop": Method("flip-flop", lambda s: ordering.flip_flop(s.num_units), observes=False),
    "block": Method(
        "block reshuffling",
        lambda s: ordering.block_reshuffling(s.num_units, block_size=min(8, s.num_units)),
        observes=False,
    ),
    "herding": Method(
        "greedy herding",
        lambda s: ordering.greedy_herding(s.num_units, units_per_step=s.units_per_step),
    ),
    "cd_walk": Method(
        "CD-GraB, walk",
        lambda s: _coordinated(s, ordering.self_balancing_walk()),
        coordinated=True,
    ),
    "kh": Method("KH-SGD", lambda s: _coordinated(s, _halving(s)), coordinated=True),
}
