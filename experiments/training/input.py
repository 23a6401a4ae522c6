"""Where batches come from: orders of the host, data on the devices, or read ahead of the steps."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np

import ordering.input
from experiments.cluster import agree
from experiments.training import placement
from experiments.training.config import Sizes

LOOK_AHEAD = 3  # loads before an epoch's end at which the front of the next one is opened
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


def take_units(data, units):
    """A worker's batch [b, S, ...], out of its own units [M, S, ...] or those of all."""
    return jax.tree.map(lambda x: x[units], data)


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


class Known(NamedTuple):
    """What the input sees of the orders, of this process's own workers."""

    current: jax.Array  # int32[w, M]
    next: jax.Array  # int32[w, M]
    left: jax.Array  # int32[w]


def read_epochs(
    source: Source, orders: Callable, *, first_load: int, delay: float = 0.0, clock=None
) -> ordering.input.epochs.Epochs:
    """Batches [w, b, S, ...] on the devices, one per load, read ahead across the epochs of a run.

    Args:
      orders: gives the newest state of all workers' orders, of the epoch of the next batch.
      first_load: where the run goes on; delay: seconds of the clock that a load takes at least.
    """
    sizes, owned = source.sizes, source.owned
    at_epoch = getattr(source.train, "at_epoch", lambda epoch: source.train)

    def live():
        return Known(*(placement.own(getattr(orders(), field)) for field in Known._fields))

    def place(batch):
        shape = (len(owned), -1, sizes.unit_size)
        batch = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)
        return placement.place_rows(batch, source.sharding)

    def by_thread(data, indices, size):
        read = ordering.input.reader(data)[1]
        return (read(indices[start : start + size]) for start in range(0, len(indices), size))

    def by_tfdata(data, indices, size):
        return ordering.input.batches(data, indices, batch_size=size)

    reads = {"thread": by_thread, "tfdata": by_tfdata}[source.reads]
    throttled = Throttle(delay, clock or Clock())

    def read(orders, first_step, epoch):
        del first_step  # the slice of the orders begins there
        batches = map(place, reads(at_epoch(epoch), *examples_of(orders, source)))
        return throttled(batches) if delay else batches

    return ordering.input.read_epochs(
        read, live, units_per_step=sizes.units_per_step, first_load=first_load,
        # A load may wait for those of the next epoch's front, where all take their time.
        ahead=LOOK_AHEAD, depth=DEPTH, timeout=agree.patience + (DEPTH + 2) * delay,
    )  # fmt: skip


class Clock:
    """Seconds of training since the clock was made; input that is throttled by it stops with it.

    Otherwise an evaluation would be a gift to the arm whose input is slow: it would find its queue
    filled.
    """

    def __init__(self):
        self._start, self._runs = time.perf_counter(), threading.Lock()

    def now(self) -> float:
        with self._runs:
            return time.perf_counter() - self._start

    @contextlib.contextmanager
    def stopped(self):
        """While the body runs, the clock stands still, and who asks it or sleeps by it waits."""
        with self._runs:
            begun = time.perf_counter()
            try:
                yield
            finally:
                self._start += time.perf_counter() - begun

    def sleep_until(self, moment: float) -> None:
        """Returns when the clock shows `moment`, in seconds."""
        while (left := moment - self.now()) > 0:
            time.sleep(left)


class Throttle:
    """Batches of one input that take `delay` seconds of the clock each, whoever reads them."""

    def __init__(self, delay: float, clock: Clock):
        self._delay, self._clock, self._one = delay, clock, threading.Lock()

    def __call__(self, batches: Iterable) -> Iterator:
        batches, ended = iter(batches), object()
        while True:
            with self._one:
                begun = self._clock.now()
                batch = next(batches, ended)
                if batch is ended:
                    return
                self._clock.sleep_until(begun + self._delay)
            yield batch


def example_batch(source: Source, size: int):
    """A batch of the right shapes, on the devices: to compile with."""
    workers, unit_size = len(source.owned), source.sizes.unit_size
    few = ordering.input.reader(source.train)[1](np.zeros(1, int))

    def repeat(x):
        return np.broadcast_to(x, (workers, size, unit_size, *x.shape[1:]))

    batch = jax.tree.map(repeat, few)
    return placement.place_rows(batch, source.sharding)
