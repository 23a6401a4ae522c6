"""Files of numbers, orders over their blocks, and what hosts read of them."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ordering
from ordering.blocks.reads import read_blocks
from ordering.blocks.sources import Part
from tests import reference_blocks
from tests.tables import whole_numbers


class Numbers:
    """Reads the records of a file, which are their numbers among those of all files."""

    def __init__(self, first):
        self.first, self.asked = first, []

    def __call__(self, start, stop):
        self.asked.append((start, stop))
        return np.arange(self.first + start, self.first + stop, dtype=np.int32)


def parts_of(sizes):
    firsts = np.cumsum([0, *sizes])
    return tuple(
        Part(f"file {i}", size, (i, size), Numbers(int(first)))
        for i, (size, first) in enumerate(zip(sizes, firsts, strict=False))
    )


def as_lists(batch):
    """A batch (records, places) as the reference has it: [W][b] of (record, place)."""
    records, places = (np.atleast_2d(np.asarray(x)).tolist() for x in batch)
    return [
        [(record if place >= 0 else None, place) for record, place in zip(*lane, strict=True)]
        for lane in zip(records, places, strict=True)
    ]


def records_of(batches):
    """All records of batches [T][W][b], in increasing sequence, without those that only fill."""
    return sorted(r for batch in batches for lane in batch for r, place in lane if place >= 0)


class Given(NamedTuple):
    """The state of orders that are given for all epochs; a part of the next one is known."""

    current: np.ndarray
    next: np.ndarray
    left: np.ndarray
    epoch: np.ndarray


def given_order(orders, ready, window):
    """An order that is given for all epochs, [epochs + 1, W, M] or [epochs + 1, M], of which a
    part of the next one is known."""
    orders = np.asarray(orders, np.int32)
    return _given_order(orders.tobytes(), orders.shape, ready, window)


@functools.lru_cache(64)  # for what is compiled
def _given_order(numbers, shape, ready, window):
    fields = {"num_units": shape[-1], "units_per_step": window, "total": math.prod(shape[1:])}
    return GivenOrder(numbers=numbers, shape=shape, ready=ready, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenOrder(ordering.Ordering):
    numbers: bytes
    shape: tuple
    ready: int
    total: int
    is_global = True

    def init(self, key, params=None):
        del key, params
        return self.at(jnp.int32(0))

    def next_epoch(self, state):
        return self.at(state.epoch + 1)

    def at(self, epoch):
        orders = jnp.asarray(np.frombuffer(self.numbers, np.int32).reshape(self.shape))
        rows, following = orders[epoch], orders[jnp.minimum(epoch + 1, len(orders) - 1)]
        if orders.ndim == 3:
            worker = jax.lax.axis_index("worker")
            rows, following = rows[worker], following[worker]
        return Given(rows, following, jnp.int32(self.ready), epoch)


class Case(NamedTuple):
    """Files of numbers and orders for their blocks.

    Attributes:
      sizes: the files'.
      kept: bool[N], or None.
      orders: [epochs + 1, W, M], or [epochs + 1, M].
      settings: of `read_blocks`.
    """

    sizes: list
    unit_size: int
    kept: np.ndarray | None
    orders: np.ndarray
    ready: int
    settings: dict

    def blocks(self):
        workers = self.orders.shape[1] if self.orders.ndim == 3 else 1
        return ordering.blocks.split(
            parts_of(self.sizes), unit_size=self.unit_size, multiple_of=workers, keep=self.kept
        )

    def units(self):
        workers = self.orders.shape[1] if self.orders.ndim == 3 else 1
        return reference_blocks.blocks_of(self.sizes, self.unit_size, workers, self.kept)

    def expected(self):
        """The batches of all epochs but the last, of which nothing is read."""
        options, results = {"seed": 0, **self.settings}, []
        for epoch, orders in enumerate(self.orders[:-1]):
            lanes = np.atleast_2d(orders).tolist()
            results += reference_blocks.epoch_of(self.units(), lanes, epoch=epoch, **options)
        return results

    def kept_records(self):
        total = np.arange(sum(self.sizes))
        return (total if self.kept is None else total[self.kept]).tolist()

    def read(self, state=None, *, after=lambda reads: None, **options):
        """The batches from a state on."""
        result, given = [], dict(self.settings)
        order = given_order(self.orders, self.ready, given.pop("window"))
        workers = self.orders.shape[1] if self.orders.ndim == 3 else None
        options = {"num_epochs": len(self.orders) - 1, "workers": workers} | given | options
        with read_blocks(self.blocks(), order, KEY, state=state, **options) as reads:
            for batch in reads:
                result.append(as_lists(batch))
                after(reads)
        return result


KEY, ENTRIES = jax.random.key(0), 3
RNG = np.random.default_rng(0)
FIXED = Case(  # 16 units, of which one is empty; a worker's second window has only one unit
    [13, 20, 7],
    3,
    np.arange(40) % 5 != 2,
    np.stack([RNG.permutation(16) for _ in range(3)]).reshape(3, 4, 4),
    2,
    {"window": 3, "batch_size": 2, "seed": 1},
)


def vectors_of(units):
    """Whole numbers in the place of the gradients of blocks."""
    return whole_numbers((units, ENTRIES), seed=units)


@functools.cache
def global_order_of(name, units, window, axis_name="worker"):
    """An order that assigns blocks to all workers anew in every epoch."""
    if name == "global_reshuffling":
        return ordering.global_reshuffling(units, units_per_step=window, axis_name=axis_name)
    return ordering.global_order(ordering.cd_grab(units, units_per_step=window), units)


def short_run(name, state=None, parts=(20, 11), unit_size=2, *, window=3, **options):
    """An epoch of two workers with 8 units each."""
    order = global_order_of(name, 8, window)
    given = {"batch_size": 4, "seed": 9, "workers": 2, "num_epochs": 1} | options
    blocks = ordering.blocks.split(parts_of(parts), unit_size=unit_size)
    like = np.zeros(2, np.float32)
    return read_blocks(blocks, order, KEY, like=like, state=state, **given)
