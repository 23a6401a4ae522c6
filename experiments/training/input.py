"""Where batches come from: orders of the host, data on the devices, or read ahead of the steps."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import ordering.input
from experiments.processes import distributed, waits
from experiments.training.clock import Clock
from experiments.training.config import Sizes

LOOK_AHEAD = 4  # loads before an epoch's end at which the front of the next one is opened
DEPTH = 2  # finished batches that wait


def partition(train: dict, sizes: Sizes, units: np.ndarray | None = None):
    """Arrays [W, M, S, ...]: worker w owns the w-th run of M S examples for the whole training.

    Args:
      units: int[W, M], those that it owns in place of a run.
    """
    shape = (sizes.workers, sizes.num_units, sizes.unit_size)
    if units is not None:
        return jax.tree.map(lambda x: x[units], pool(train, sizes))
    count = int(np.prod(shape))
    return jax.tree.map(lambda x: x[:count].reshape((*shape, *x.shape[1:])), train)


def pool(train: dict, sizes: Sizes):
    """Arrays [n, S, ...], the units that are dealt to all workers."""
    size = sizes.unit_size
    return jax.tree.map(lambda x: x[: len(x) // size * size].reshape(-1, size, *x.shape[1:]), train)


def rest_of(train, sizes: Sizes, *, shared: bool):
    """(examples [W, n, ...], weights [W, n]) of those that fill no unit of all workers, in turn.

    Args:
      shared: whether workers' gradients are averaged; the mean of their weighted sums is then that
        of all these examples, and otherwise each worker's sum the mean of its own.
    """
    workers, each = sizes.workers, -(-sizes.rest // sizes.workers)
    place = np.arange(workers)[:, None] + workers * np.arange(each)
    there = place < sizes.rest
    first = sizes.workers * sizes.num_units * sizes.unit_size
    read = ordering.input.reader(train)[1](first + np.where(there, place, 0).reshape(-1))
    examples = jax.tree.map(lambda x: x.reshape(workers, each, *x.shape[1:]), read)
    count = sizes.rest / workers if shared else np.maximum(1, there.sum(axis=1, keepdims=True))
    return examples, np.asarray(there / count, np.float32)


def take_units(data, units):
    """A worker's batch [b, S, ...], out of its own units [M, S, ...] or those of all."""
    return jax.tree.map(lambda x: x[units], data)


class OrderSnapshot(NamedTuple):
    """What the input sees of the orders: copies, for the steps donate their state."""

    current: jax.Array  # int32[W, M]
    next: jax.Array  # int32[W, M]
    left: jax.Array  # int32[W]


@jax.jit
def snapshot(orders) -> OrderSnapshot:
    return OrderSnapshot(*(jnp.copy(getattr(orders, f)) for f in OrderSnapshot._fields))


class Source(NamedTuple):
    """What is read, by whom, and how.

    Fields:
      train: arrays, or a random-access source; one with `at_epoch` is asked for every epoch's own
        view of its examples.
      sizes: of the run; total: units of the whole set, where orders name these; None: own units.
      owned: neighbouring workers, of this process; sharding: of arrays with a worker axis.
      reads: "thread", a loader thread, or "tfdata".
      units: int[W, M], own units by their numbers in the whole set; None: neighbours.
    """

    train: object
    sizes: Sizes
    total: int | None
    owned: list[int]
    sharding: object = None
    reads: str = "thread"
    units: np.ndarray | None = None


def examples_of(orders: np.ndarray, source: Source) -> tuple[np.ndarray, int]:
    """(the examples that a slice of own workers' orders names, step by step, W B S of one step)."""
    sizes, total = source.sizes, source.total
    if source.units is not None:
        orders, total = np.take_along_axis(source.units[source.owned], orders, 1), source.units.size
    indices, size = ordering.input.step_indices(
        orders,
        units_per_step=sizes.units_per_step,
        unit_size=sizes.unit_size,
        num_units=sizes.num_units,
        total=total,
    )
    first = 0 if total else source.owned[0] * sizes.num_units * sizes.unit_size
    return first + indices, size


def read_orders(source: Source, epoch: int) -> Callable:
    """`(orders int[w, m], first step) -> batches [w, b, S, ...]` on the devices, read ahead."""
    at_epoch = getattr(source.train, "at_epoch", lambda epoch: source.train)

    def place(batch):
        shape = (len(source.owned), -1, source.sizes.unit_size)
        batch = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)
        return distributed.place_rows(batch, source.sharding, source.sizes.workers)

    def by_thread(indices, size):
        read = ordering.input.reader(at_epoch(epoch))[1]
        for start in range(0, len(indices), size):
            yield read(indices[start : start + size])

    def by_tfdata(indices, size):
        return ordering.input.batches(at_epoch(epoch), indices, batch_size=size)

    reads = {"thread": by_thread, "tfdata": by_tfdata}[source.reads]

    def read(orders, first_step):
        del first_step  # the slice of the orders begins there
        batches = reads(*examples_of(np.asarray(orders), source))
        return ordering.input.load_ahead(map(place, batches), depth=DEPTH)

    return read


def example_batch(source: Source, size: int):
    """A batch of the right shapes, on the devices: to compile with."""
    workers, unit_size = len(source.owned), source.sizes.unit_size
    few = ordering.input.reader(source.train)[1](np.zeros(1, int))

    def repeat(x):
        return np.broadcast_to(x, (workers, size, unit_size, *x.shape[1:]))

    batch = jax.tree.map(repeat, few)
    return distributed.place_rows(batch, source.sharding, source.sizes.workers)


class Feed:
    """The batches of a run, one per load, across its epochs: a reader that is open.

    Orders of the host are known for ever, so that their batches are one stream; the first of them
    is the state's own, for workers may have been others when it was drawn. Of orders that are
    made while the epoch runs, the front of the next epoch is read before this one ends.
    """

    def __init__(self, source: Source, *, order_of=None, delay: float = 0.0, clock=None):
        self._source, self._order_of = source, order_of
        self._delay, self._clock = delay, clock or Clock()
        self._loader, self._epoch = None, None
        self._seen = self._front = None

    def ready(self) -> bool:
        """Whether the next batch is there."""
        return self._loader is None or self._loader.ready()

    def next(self, state, load: int):
        """The batch of a load; the orders of `state` are those of its epoch."""
        sizes = self._source.sizes
        per_epoch = sizes.unit_loads
        epoch, place = divmod(load, sizes.loads_per_epoch)
        if self._loader is None or (self._order_of is None and epoch != self._epoch):
            self._open(state, epoch, place)
        batch = next(self._loader)
        if self._order_of is None:
            if self._seen is not None:  # orders of an earlier step, which is done by now
                self._front = self._open_front(self._seen, epoch + 1)
                self._seen = None
            elif place == max(0, per_epoch - LOOK_AHEAD):
                self._seen = snapshot(state.orders)
        return batch

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _open(self, state, epoch, place):
        self.close()
        self._epoch = epoch
        if self._order_of is not None:
            current = np.array(distributed.own(state.orders.current))  # a copy: steps donate it
            batches = self._whole_run(epoch, place, current)
        else:
            seen = jax.tree.map(distributed.own, snapshot(state.orders))
            read = read_orders(self._source, epoch)
            if place:
                first = place * self._source.sizes.units_per_step
                batches = read(seen.current[:, first:], place)
            else:
                batches = ordering.input.read_epoch(read, seen, self._front)
            self._front = None
        if self._delay:
            batches = throttle(batches, self._delay, self._clock)
        self._loader = ordering.input.load_ahead(
            batches, depth=DEPTH, timeout=waits.patience() + self._delay
        )

    def _whole_run(self, epoch, place, current) -> Iterator:
        first = place * self._source.sizes.units_per_step
        yield from read_orders(self._source, epoch)(current[:, first:], place)
        for number in itertools.count(epoch + 1):
            orders = self._order_of(number)[self._source.owned]
            yield from read_orders(self._source, number)(orders, 0)

    def _open_front(self, seen, epoch):
        seen = jax.tree.map(distributed.own, seen)
        read = read_orders(self._source, epoch)
        units_per_step = self._source.sizes.units_per_step
        return ordering.input.prefetch_next_epoch(read, seen, units_per_step=units_per_step)


def throttle(batches: Iterator, delay: float, clock: Clock) -> Iterator:
    """The same batches, each `delay` seconds of the clock after it was begun, if not later."""
    batches = iter(batches)
    while True:
        begun = clock.now()
        try:
            batch = next(batches)
        except StopIteration:
            return
        clock.sleep_until(begun + delay)
        yield batch
