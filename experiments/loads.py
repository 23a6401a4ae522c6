"""The loads of an epoch: batches of all workers, in the sequence of their orders."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ordering
from experiments.processes import own, place_rows
from experiments.streaming import LOOK_AHEAD


class Sizes(NamedTuple):
    workers: int  # W
    num_units: int  # M, per worker
    units_per_step: int  # B, per worker and load
    unit_size: int  # S, examples

    @property
    def loads_per_epoch(self) -> int:
        return -(-self.num_units // self.units_per_step)


class Sight(NamedTuple):
    """What the input sees of the orders: copies, for the steps donate their state."""

    current: jax.Array  # int32[W, M]
    next: jax.Array  # int32[W, M]
    left: jax.Array  # int32[W]


class Input(NamedTuple):
    """Where the batches come from; an epoch's are opened from the sight of its orders.

    Fields:
      open: `(sight, first load, epoch, front) -> context manager of an iterator` of batches,
        leaves [W, b, S, ...].
      front: `(sight of a late step, following epoch) -> front` of the next epoch; None where
        nothing is read ahead.
    """

    open: Callable
    front: Callable | None


see = jax.jit(lambda orders: Sight(*map(jnp.copy, (orders.current, orders.next, orders.left))))


def resident(data, sizes: Sizes, run: Callable) -> Input:
    """Batches gathered on the devices, from units [W, M, S, ...] that lie there."""

    def take(data, current, start, size):
        units = jax.lax.dynamic_slice_in_dim(current, start, size)
        return (jax.tree.map(lambda x: x[units], data),)

    def taking(size):
        mapped = run(
            lambda data, current, start: take(data, current, start, size),
            owned_in=(True, True, False),
            owned_out=(True,),
        )
        return jax.jit(mapped)

    whole, tail = taking(sizes.units_per_step), sizes.num_units % sizes.units_per_step
    last = taking(tail) if tail else whole

    def open_epoch(sight, first, epoch, front):
        del epoch, front

        def batches():
            for load in range(first, sizes.loads_per_epoch):
                get = last if load + 1 == sizes.loads_per_epoch else whole
                yield get(data, sight.current, np.int32(load * sizes.units_per_step))[0]

        return contextlib.nullcontext(batches())

    return Input(open_epoch, None)


def streamed(source, sizes: Sizes, *, owned: list[int], sharding=None, depth: int = 2) -> Input:
    """Batches read by a thread while the workers work, each process those of its own workers.

    The front of the next epoch is read before this one ends. A source with `at_epoch` is asked
    for every epoch's own view of its examples.

    Args:
      source: arrays or a random-access source of W M S examples, worker by worker.
      owned: neighbouring workers, of this process; sharding: of arrays with a worker axis.
      depth: finished batches that wait.
    """
    at_epoch = getattr(source, "at_epoch", lambda epoch: source)
    offset = owned[0] * sizes.num_units * sizes.unit_size

    def by_worker(leaf):
        return leaf.reshape(len(owned), -1, sizes.unit_size, *leaf.shape[1:])

    def reading(epoch):
        def read(orders, first_load):
            del first_load  # the slice of the orders begins there
            return ordering.input.load_ahead(
                batches(ordering.input.reader(at_epoch(epoch))[1], orders)
            )

        return read

    def batches(read, orders) -> Iterator:
        indices, size = ordering.input.step_indices(
            np.asarray(orders),
            units_per_step=sizes.units_per_step,
            unit_size=sizes.unit_size,
            num_units=sizes.num_units,
        )
        for start in range(0, len(indices), size):
            batch = read(offset + indices[start : start + size])
            yield place_rows(jax.tree.map(by_worker, batch), sharding, sizes.workers)

    def open_epoch(sight, first, epoch, front):
        if first == sizes.loads_per_epoch:
            return contextlib.nullcontext(())
        sight = jax.tree.map(own, sight)
        if first:
            opened = reading(epoch)(sight.current[:, first * sizes.units_per_step :], first)
        else:
            opened = ordering.input.read_epoch(reading(epoch), sight, front)
        return ordering.input.load_ahead(opened, depth=depth)

    def front(sight, epoch):
        sight = jax.tree.map(own, sight)
        return ordering.input.prefetch_next_epoch(
            reading(epoch), sight, units_per_step=sizes.units_per_step
        )

    return Input(open_epoch, front)


def front_load(sizes: Sizes) -> int:
    """The load of an epoch at which the front of the next one is looked at."""
    return max(0, sizes.loads_per_epoch - LOOK_AHEAD)
