"""Windows over several blocks, whose records are shuffled and cut into batches."""

import functools
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, PyTree

from ordering.blocks.units import Blocks
from ordering.data.loader import check_batches, in_this_context
from ordering.indices import Indices
from syncopate import plans

TOGETHER = 256  # records; a thread reads small blocks together up to this number,
TASKS = 16  # but a window is cut into at least so many tasks


class Windows(Sequence):
    """One epoch of windows `(records, places)`, leaves [T, W, b, ...] or [T, b, ...].

    A window is K blocks that follow each other in a worker's order. It is read by K requests, and
    its records are shuffled and cut into T = ceil(K S / b) batches. The shuffle depends only on the
    seed, the epoch and the window, so any number of readers gives the same batches. `places` holds
    for each record the place of its unit in the window, 0 .. K - 1. If a window has fewer than K S
    records, the records that fill up a batch have place -1.
    """

    def __init__(self, blocks: Blocks, units: Indices, workers: Any, sizes: tuple, seeds: tuple):
        """`units` are those of these workers, K of each in a window; None for one without axis."""
        self._blocks, self._units, self._seeds = blocks, units, seeds
        self.window, self.batch_size = sizes
        self._axes = (self.batch_size,) if workers is None else (workers, self.batch_size)
        self._step = self.window * (workers or 1)  # units of a window

    def __len__(self) -> int:
        return -(-len(self._units) // self._step)

    def __getitem__(self, number: int) -> tuple[PyTree[np.ndarray], Int[np.ndarray, "T ..."]]:
        tasks, finish = self.begin(int(number))
        for task in tasks:
            task()
        return finish()

    def begin(self, number: int) -> tuple[list[Callable], Callable]:
        """`(tasks, finish)`: after a call of each task, on any threads, `finish()` returns the
        window."""
        if not 0 <= number < len(self):
            raise IndexError(f"there is no window {number} in an epoch of {len(self)}.")
        units = np.asarray(self._units[number * self._step : (number + 1) * self._step])
        units = units.reshape(self._step // self.window, -1)
        batches = num_batches(self._blocks, units.shape[1], self.batch_size)
        # Row l has the places of worker l's records in all batches, one batch after the other.
        ranks = np.arange(batches * len(units) * self.batch_size)
        ranks = ranks.reshape(batches, len(units), -1).swapaxes(0, 1).reshape(len(units), -1)
        places, jobs, rest = np.full(ranks.size, -1, np.int32), [], []
        for of_worker, to in zip(units, ranks, strict=True):
            sizes = self._blocks.sizes[of_worker]
            count = int(sizes.sum())
            if count:
                first = self._shuffled(to[:count], int(of_worker[0]))
                places[first] = np.repeat(np.arange(len(of_worker), dtype=np.int32), sizes)
                jobs += self._jobs(of_worker, sizes, first)
            else:  # units without records still need batches
                first = to[:1]
                jobs.append(([int(np.argmax(self._blocks.sizes))], first))
            rest.append((to[max(count, 1) :], first[0]))
        jobs.sort(key=lambda job: job[0][0])  # in the order of the files: neighbours share groups
        records = _Records(ranks.size)

        def put(of_units, to):
            records.put(self._blocks.read(of_units), to)

        def finish():
            self._blocks.check(units.ravel().tolist())
            cut = lambda x: x.reshape(batches, *self._axes, *x.shape[1:])  # noqa: E731
            return jax.tree.map(cut, (records.filled(rest), places))

        return [functools.partial(put, *job) for job in jobs], finish

    def _jobs(self, units: np.ndarray, sizes: np.ndarray, to: np.ndarray) -> list[tuple]:
        """Jobs of (units for one thread, the places of their records); small units share a job."""
        full, ends = np.flatnonzero(sizes), np.cumsum(sizes)
        full = full[np.argsort(units[full])]
        count = max(1, min(TOGETHER // self._blocks.unit_size, len(full) // TASKS))
        places = [to[ends[i] - sizes[i] : ends[i]] for i in full]
        return [
            (units[full[i : i + count]].tolist(), np.concatenate(places[i : i + count]))
            for i in range(0, len(full), count)
        ]

    def _shuffled(self, to: np.ndarray, unit: int) -> np.ndarray:
        """The places for the records of blocks that are read one after the other."""
        shuffled = np.empty_like(to)
        shuffled[permutation((*self._seeds, unit), len(to))] = to
        return shuffled


class _Records:
    """The records of a window; threads copy them directly to their places as they read them."""

    def __init__(self, size: int):
        self._size, self._lock = size, threading.Lock()
        self._structure: Any = None
        self._arrays: list[np.ndarray] = []

    def put(self, records: PyTree[np.ndarray], to: np.ndarray) -> None:
        """Puts the first records at these places."""
        leaves, structure = jax.tree.flatten(records)
        with self._lock:
            if self._structure is None:
                self._structure = structure
                self._arrays = [np.empty((self._size, *x.shape[1:]), x.dtype) for x in leaves]
        for array, x in zip(self._arrays, leaves, strict=True):
            array[to] = x[: len(to)]

    def filled(self, rest: list[tuple[np.ndarray, int]]) -> PyTree[np.ndarray]:
        """All records; at the remaining places, records from other places are repeated."""
        for array in self._arrays:
            for to, place in rest:
                array[to] = array[place]
        return jax.tree.unflatten(self._structure, self._arrays)


def reading_by(readers: int | Callable) -> Callable[[Windows], Iterable]:
    """A function that reads the windows of an epoch, each while the one before is used."""
    if callable(readers):
        return readers
    threads = Threads(plans.check_whole("readers", readers, 1))  # for all epochs

    def read(epoch):
        begin = lambda number: _begin(threads, *epoch.begin(number))  # noqa: E731
        window = begin(0)
        for number in range(1, len(epoch) + 1):
            records = window()
            if number < len(epoch):
                window = begin(number)
            yield records

    return read


def _begin(threads, tasks, finish):
    """Starts the tasks of a window; returns a function that waits for it and returns it."""
    futures = [threads.submit(task) for task in tasks]

    def window():
        for future in futures:
            future.result()
        return finish()

    return window


class Threads:
    """Threads that call functions until this is deleted; Python does not wait for them at exit."""

    def __init__(self, number: int):
        self._calls = queue.SimpleQueue()
        for _ in range(number):
            target = functools.partial(_work, self._calls)
            threading.Thread(target=in_this_context(target), daemon=True).start()
        weakref.finalize(self, lambda calls: [calls.put(None) for _ in range(number)], self._calls)

    def submit(self, function: Callable[[], Any]) -> Future:
        self._calls.put(call := (function, Future()))
        return call[1]


def _work(calls):
    while _call_one(calls.get()):
        pass


def _call_one(call) -> bool:
    """Whether there may be another call. A function, so that no name keeps a call."""
    if call is None:
        return False
    function, future = call
    try:
        future.set_result(function())
    except BaseException as error:  # raised again by the future
        future.set_exception(error)
    return True


def num_batches(blocks: Blocks, units: int, batch_size: int) -> int:
    """T, batches per window: the same on all workers, whichever units they read."""
    return -(-units * blocks.unit_size // batch_size)


def permutation(seeds: tuple[int, ...], size: int) -> Int[np.ndarray, "n"]:
    """A permutation that depends on the seeds alone, in every version of NumPy."""
    return np.argsort(
        np.random.Philox(np.random.SeedSequence(seeds)).random_raw(size), kind="stable"
    )


def batches_of(loaded: Iterable, first_batch: int) -> Iterator[tuple[PyTree, Any]]:
    """The batches of windows from a loader, starting at a batch of the first window."""
    check_batches("readers", loaded)
    for records, places in loaded:
        for t in range(first_batch, len(places)):
            yield jax.tree.map(lambda x: x[t], (records, places))  # noqa: B023
        first_batch = 0
