"""Batches loaded ahead by a thread, which can say whether the next one is ready."""

import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax

from ordering.input.sources import check_at_least
from syncopate import plans


class LoadError(RuntimeError):
    """A load that failed or did not come in time; `load` is its number, to go on from there."""

    def __init__(self, load: int, why: str):
        super().__init__(f"load {load} {why}")
        self.load = load


class Loader(Iterator):
    """What `load_ahead` returns: an iterator of batches on the device."""

    def __init__(self, shared: "_Shared", thread: threading.Thread, first_load: int, timeout):
        self._shared, self._load, self._timeout = shared, first_load, timeout
        # Also at exit: a thread that copies to a device while Python ends would crash it.
        self.close = weakref.finalize(self, _stop, shared, thread)

    def ready(self) -> bool:
        """Whether `next` returns at once: with a batch, the end, or the error of a failed load."""
        return not self._shared.items.empty()

    def __next__(self):
        try:
            item = self._shared.items.get(timeout=self._timeout)
        except queue.Empty:
            raise LoadError(
                self._load,
                f"did not come within {self._timeout:g} s: the input hangs. Call next again to "
                "wait longer, or resume the run from this load.",
            ) from None
        if isinstance(item, _Batch):
            self._load += 1
            self._shared.slots.release()
            return item.value
        self._shared.items.put(item)  # the end stays the end
        if item is None:
            raise StopIteration
        raise LoadError(
            self._load, f"failed: {type(item).__name__}: {item}. Resume the run from this load."
        ) from item

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def load_ahead(
    batches: Iterable,
    *,
    depth: int = 2,
    timeout: float | None = None,
    sharding=None,
    first_load: int = 0,
) -> Loader:
    """Reads batches and copies them to the device on a thread, while those before are worked on.

    The queue holds `depth` finished batches, and the thread one more: finished and waiting for a
    place, or being loaded. Loading starts at the call. A batch is ready when its transfer is over.

    Args:
      batches: any iterable of trees of arrays, as `ordering.input.batches` or a Grain loader; used
        on the thread alone.
      depth: >= 1, of the queue.
      timeout: seconds > 0 after which a load that does not come is an error; None waits for ever.
      sharding: a device or `jax.sharding.Sharding`, or a tree of them; the default device if None.
      first_load: number of the first batch, for a resumed run's messages.

    Returns:
      A `Loader`: an iterator with `ready()` and `close()`, also a context manager.

    Raises:
      ValueError: for batches that are no iterable, or a depth, timeout or first_load out of range.
      LoadError: from `next`, with the number of the load that failed or hangs.

    Example:
      >>> import numpy as np, ordering
      >>> loader = ordering.input.load_ahead(np.full(2, i) for i in range(3))
      >>> [int(batch.sum()) for batch in loader]
      [0, 2, 4]
    """
    check_batches("batches", batches)
    check_at_least(1, depth=depth)
    check_at_least(0, first_load=first_load)
    if timeout is not None and not (plans.is_number(timeout) and timeout > 0):
        raise ValueError(f"timeout is {timeout!r}: pass seconds > 0, or None to wait for ever.")
    shared = _Shared(queue.SimpleQueue(), threading.Semaphore(depth + 1), threading.Event())
    thread = threading.Thread(target=_work, args=(iter(batches), sharding, shared), daemon=True)
    thread.start()
    return Loader(shared, thread, first_load, timeout)


def check_batches(name: str, batches) -> None:
    """Raises ValueError for what is no iterable of batches, one batch among others."""
    if not isinstance(batches, Iterable) or isinstance(batches, dict | str | type):
        raise ValueError(
            f"{name} is a {type(batches).__name__}: pass an iterable of batches, as a list, a "
            "loader, or what a generator function returns."
        )


def on_device(batch, sharding=None):
    """The batch as JAX arrays; without a sharding, what is one stays where it is."""
    if sharding is not None:
        return jax.device_put(batch, sharding)
    # Arrays that span several processes could not be placed anew by one of them.
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), batch)


class _Shared(NamedTuple):
    """Between the loader and its thread, which must not keep the loader alive."""

    items: queue.SimpleQueue  # batches, then None (the end) or an exception
    slots: threading.Semaphore
    closed: threading.Event


class _Batch(NamedTuple):
    value: Any


def _work(batches, sharding, shared):
    while True:
        shared.slots.acquire()
        if shared.closed.is_set():
            return
        try:
            item = _Batch(jax.block_until_ready(on_device(next(batches), sharding)))
        except StopIteration:
            item = None
        except BaseException as error:  # raised where the batch is asked for
            item = error
        if shared.closed.is_set():
            return  # the consumer has been told that there is no more
        shared.items.put(item)
        if not isinstance(item, _Batch):
            return


def _stop(shared, thread):
    shared.closed.set()
    shared.slots.release()
    thread.join(timeout=1)
    shared.items.put(None)  # who still asks is told that there is no more
