"""Batches, from data on the devices or read ahead of the steps, and arrays of all workers.

A process places only its own workers' rows.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

import ordering.data
from experiments.data import shards
from experiments.distributed import deadlines
from experiments.trainer.config import Sizes
from ordering.data import batches, reading
from syncopate.mesh import is_key
from syncopate.unstable import multihost_utils
from syncopate.workers import AXIS

LOOK_AHEAD = 3  # loads before an epoch's end, when the first loads of the next one begin
DEPTH = 2  # batches waiting in the queue


def partition(train: dict, sizes: Sizes):
    """Arrays [W, M, S, ...]: the M units of each worker."""
    if (numbers := examples_of_workers(train, sizes)) is not None:
        return jax.tree.map(lambda x: x[numbers], train)
    shape = (sizes.workers, sizes.num_units, sizes.unit_size)
    count = int(np.prod(shape))
    return jax.tree.map(lambda x: x[:count].reshape((*shape, *x.shape[1:])), train)


def examples_of_workers(train, sizes: Sizes) -> np.ndarray | None:
    """int[W, M, S], by their numbers in the set; None for neighbouring units in their order."""
    return shards.examples_of(train, sizes.shards, sizes.workers, sizes.num_units, sizes.unit_size)


def pool(train: dict, sizes: Sizes):
    """Arrays [n, S, ...], the units that are dealt to all workers."""
    size = sizes.unit_size
    return jax.tree.map(lambda x: x[: len(x) // size * size].reshape(-1, size, *x.shape[1:]), train)


def take_units(data, units):
    """A worker's batch [b, S, ...] from its own units [M, S, ...] or from all units."""
    return jax.tree.map(lambda x: x[units], data)


class Source(NamedTuple):
    """Data that are read, which of them, and how.

    They are arrays, or a random-access source. If it has `of_seed` and `at_epoch`, these give the
    views of its examples for every run and every epoch.
    """

    train: object
    sizes: Sizes
    workers: list[int]  # neighbouring workers, of this process
    sharding: object = None  # of arrays with a worker axis
    reads: str = "thread"  # a loader thread, or "tfdata"
    examples: np.ndarray | None = None  # int[W, M, S] of all workers; None: neighbours in order

    def of_seed(self, seed: int) -> "Source":
        """The data of the run with this seed."""
        of_seed = getattr(self.train, "of_seed", lambda seed: self.train)
        return self._replace(train=of_seed(seed))


def sizes_of_epoch(sizes: Sizes) -> batches.Sizes:
    """The units of all workers, and those that their steps read at once."""
    workers = sizes.workers
    return batches.Sizes(workers * sizes.num_units, workers * sizes.units_per_step, workers)


class Reads(batches.Reader):
    """Batches of all epochs, of orders that the state of the training keeps."""

    def __init__(self, order, load: Callable, orders: Callable, sizes: Sizes, first_load: int):
        self._orders, of_epoch = orders, sizes_of_epoch(sizes)
        epoch, step = divmod(first_load, sizes.loads_per_epoch)
        start = batches.Position(epoch, step * of_epoch.window, loads=first_load)
        super().__init__(order, load, of_epoch, start, ahead=LOOK_AHEAD)

    def newest_state(self):
        return self._orders()


def read_epochs(
    source: Source, order, orders: Callable, delay: float, clock: "Clock", first_load: int
) -> Reads:
    """Batches [w, b, S, ...] on the devices, one per load, read ahead across the epochs of a run.

    Args:
      order: of a worker's units.
      orders: returns the newest state of all workers' orders, in the epoch of the next batch.
      delay: least seconds of the clock per load; first_load: where the run continues.
    """
    sizes, workers = source.sizes, source.workers
    size = len(workers) * sizes.units_per_step * sizes.unit_size
    at_epoch = getattr(source.train, "at_epoch", lambda epoch: source.train)

    def place(batch):
        shape = (len(workers), -1, sizes.unit_size)
        batch = jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)
        return place_rows(batch, source.sharding)

    def by_thread(data, indices):
        examples = ordering.data.as_source(data)
        return (examples[indices[start : start + size]] for start in range(0, len(indices), size))

    def by_tfdata(data, indices):
        examples = ordering.data.tf_dataset(data, indices).batch(size)
        return examples.prefetch(DEPTH).as_numpy_iterator()

    reads = {"thread": by_thread, "tfdata": by_tfdata}[source.reads]
    throttled = Throttle(delay, clock)

    def load(units, first_step, epoch, number):
        del first_step  # the units begin there
        units = reading.units_of(units, workers, sizes_of_epoch(sizes), order)
        examples = np.asarray(reading.examples_of(units, sizes.unit_size))
        if source.examples is not None:
            examples = source.examples.reshape(-1)[examples]
        placed = map(place, reads(at_epoch(epoch), examples))
        return ordering.data.prefetch_to_device(
            throttled(placed) if delay else placed,
            depth=DEPTH,
            first_load=number,
            # A load may wait for the first of the next epoch, each of which may be delayed.
            timeout=deadlines.timeout + (DEPTH + 2) * delay,
        )

    return Reads(order, load, orders, sizes, first_load)


class Slow(NamedTuple):
    """Seconds of the clock: the least of a load, for programs that read, and those of a sync."""

    load: float = 0.0
    sync: float = 0.0


FAST = Slow()


class Clock:
    """Seconds of training since the clock was made. It stops during evaluations.

    Throttled input stops with it: otherwise slow input would fill its queue during an evaluation.
    """

    def __init__(self):
        self._start, self._runs = time.perf_counter(), threading.Lock()
        self.stood: dict[str, float] = {}  # seconds for which it was stopped, by what for

    def now(self) -> float:
        with self._runs:
            return time.perf_counter() - self._start

    @contextlib.contextmanager
    def stopped(self, what: str):
        """Stops the clock while the body runs; threads that read it or sleep by it wait."""
        with self._runs:
            begun = time.perf_counter()
            try:
                yield
            finally:
                took = time.perf_counter() - begun
                self._start += took
                self.stood[what] = self.stood.get(what, 0.0) + took

    def sleep(self, seconds: float, *, after) -> None:
        """Sleeps once these arrays are there."""
        jax.block_until_ready(after)
        self.sleep_until(self.now() + seconds)

    def sleep_until(self, moment: float) -> None:
        """Sleeps until the clock shows `moment`, in seconds."""
        while (left := moment - self.now()) > 0:
            time.sleep(left)


class Throttle:
    """Delays batches so that each takes `delay` seconds of the clock, in whichever thread."""

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
    """A batch of the right shapes on the devices, for compilation."""
    workers, unit_size = len(source.workers), source.sizes.unit_size
    few = ordering.data.as_source(source.train)[:1]

    def repeat(x):
        return np.broadcast_to(x, (workers, size, unit_size, *x.shape[1:]))

    batch = jax.tree.map(repeat, few)
    return place_rows(batch, source.sharding)


def place(tree, sharding: Sharding | None):
    """Places arrays [W, ...], equal on all processes, on the devices, without a collective.

    Args:
      tree: on the host; typed PRNG keys too.
      sharding: as of `distributed.devices.worker_sharding`; None is the default device.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put(x):
        if is_key(x):
            wrap = jax.jit(jax.random.wrap_key_data, static_argnames="impl")
            return wrap(put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        x = np.asarray(x, jax.dtypes.canonicalize_dtype(np.result_type(x)))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def place_as(tree, like):
    """`place`, each array with the sharding of the one in `like`, of arrays or their shapes."""

    def put(x, y):
        there = isinstance(x, jax.Array) and x.sharding == y.sharding  # as a process may not copy
        return x if there else place(x, y.sharding)

    return jax.tree.map(put, tree, like)


def place_rows(tree, sharding: Sharding | None):
    """Places arrays [W, ...] of which each process has the rows [w, ...] of its own workers."""
    if sharding is None:
        return jax.device_put(tree)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def workers_here(mesh: Mesh | None, workers: int) -> list[int]:
    """The workers of this process's devices: their positions on the mesh's axis "worker"."""
    if mesh is None:
        return list(range(workers))
    axis, process = mesh.axis_names.index(AXIS), jax.process_index()
    devices = np.ndenumerate(mesh.devices)
    return sorted({at[axis] for at, device in devices if device.process_index == process})


def on_host(tree):
    """NumPy copies of all values, on every process; of typed PRNG keys their uint32 data.

    If values are spread over processes this is a collective, which all processes must call.
    """

    def spread(x):
        return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)

    leaves, structure = jax.tree.flatten(key_data(tree))
    parts = [x for x in leaves if spread(x)]
    with deadlines.for_others("values that all of them hold"):
        parts = iter([multihost_utils.process_allgather(x, tiled=True) for x in parts])
    return structure.unflatten(next(parts) if spread(x) else np.asarray(x) for x in leaves)


def key_data(tree):
    """The tree with the uint32 data of its typed PRNG keys."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)
