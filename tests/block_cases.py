"""Files of numbers, orders over their blocks, and what hosts read of them."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ordering
from ordering.blocks.reads import read_blocks
from ordering.blocks.sources import Part
from tests import reference_blocks
from tests.tables import vmap_workers, whole_numbers


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


def given_states(orders, known):
    """A state for each epoch from orders [epochs + 1, ..., M]."""
    left, pairs = np.broadcast_to(known, orders.shape[1:-1]), zip(orders, orders[1:], strict=False)
    return [
        Given(*map(np.asarray, pair), left, np.full_like(left, epoch))
        for epoch, pair in enumerate(pairs)
    ]


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
    known: int
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
        options, found = {"seed": 0, **self.settings}, []
        for epoch, orders in enumerate(self.orders[:-1]):
            lanes = np.atleast_2d(orders).tolist()
            found += reference_blocks.epoch_of(self.units(), lanes, epoch=epoch, **options)
        return found

    def kept_records(self):
        total = np.arange(sum(self.sizes))
        return (total if self.kept is None else total[self.kept]).tolist()

    def read(self, position=None, *, rows=slice(None), after=lambda reads: None, **options):
        """The batches from a position on, of the workers `rows` of a host."""
        states = given_states(self.orders, self.known)
        if self.orders.ndim == 3:
            states = [Given(*(x[rows] for x in state)) for state in states]
        last = len(states) - 1
        at = 0 if position is None else min(int(position["epoch"]), last)
        found = []
        options = {"num_epochs": len(states), "position": position} | self.settings | options
        with read_blocks(self.blocks(), lambda: states[at], **options) as reads:
            for batch in reads:
                found.append(as_lists(batch))
                if reads.epoch_ended:
                    at = min(at + 1, last)
                after(reads)
        return found


def on_hosts(case, hosts, position=None, **options):
    """The batches of all workers, of which each host reads its own."""
    workers = case.orders.shape[1]
    size = workers // hosts
    read = [
        case.read(position, rows=slice(h * size, (h + 1) * size), **options) for h in range(hosts)
    ]
    return [sum(lanes, []) for lanes in zip(*read, strict=True)]


def rows_of(state, first, count):
    """The states of some workers, as a host has them."""
    return jax.tree.map(lambda x: x[first : first + count], state)


ENTRIES = 3


def vectors_of(units):
    """Whole numbers in the place of the gradients of blocks."""
    return whole_numbers((units, ENTRIES), seed=units)


@functools.cache
def dealt_of(name, workers, units, window):
    """(the order, its first states, observe of a window's units, next_epoch) of all workers."""
    if name == "global_reshuffling":
        order = ordering.global_reshuffling(units)
    else:
        order = ordering.global_order(ordering.cd_grab(units, units_per_step=window), units)

    def observe(state, gradients):
        return order.observe(state, gradients)

    order = order._replace(next_epoch=jax.jit(order.next_epoch))  # `resize` calls it as it is
    keys = jax.random.split(jax.random.key(workers), workers)
    first = vmap_workers(lambda key: order.init(key, jnp.zeros(ENTRIES)))(keys)
    observing = vmap_workers(observe) if name != "global_reshuffling" else None
    return order, first, observing, vmap_workers(order.next_epoch)
