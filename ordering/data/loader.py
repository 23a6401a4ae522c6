"""Batches that a thread loads ahead of the steps."""

import collections
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ordering.data import containers
from ordering.data.sources import Source
from syncopate import plans
from syncopate.unstable import Format

ADVICE = {
    "M": "pass times as numbers, such as the seconds since a first one",
    "m": "pass times as numbers, such as seconds",
    "V": "pass the fields of structured arrays as a dict, and bytes as x.view(np.uint8)",
}
PLACES = jax.Device | jax.sharding.Sharding | Format | jax.memory.Space


class LoadError(RuntimeError):
    """A load failed or came too late; a run can resume from its number, `load`."""

    def __init__(self, load: int, why: str):
        super().__init__(f"load {load} {why}")
        self.load = load


def describe_error(error: BaseException) -> str:
    """The type and the text of an error, also if its text cannot be read."""
    try:
        text = str(error)
    except Exception:
        text = "its text cannot be shown"
    return f"{type(error).__name__}: {text}".rstrip(".: ")


class Prefetch(Iterator, contextlib.AbstractContextManager):
    """What `prefetch_to_device` returns: an iterator of batches on the device, as a context.

    Attributes:
      close: a function without arguments that ends the thread.
    """

    def __init__(self, shared: "_Shared", thread: threading.Thread, first_load: int, timeout: Any):
        self._shared, self._load, self._timeout = shared, first_load, timeout
        # Also runs at exit, where a thread that still copies to a device would crash Python.
        self.close = weakref.finalize(self, _stop, shared, thread)

    @property
    def load(self) -> int:
        """Number of the next batch."""
        return self._load

    def ready(self) -> bool:
        """Whether `next` returns, ends or raises without waiting."""
        return bool(self._shared.items)

    def wait(self) -> None:
        """Waits until `next` returns at once; raises what it would raise."""
        # The batch stays in the queue, so that Ctrl-C during the wait loses none.
        while not self._shared.items:
            try:
                self._shared.arrivals.get(timeout=self._timeout)
            except queue.Empty:
                raise LoadError(
                    self._load,
                    f"did not come within {self._timeout:g} s: the input hangs. Call next again to "
                    "wait longer, or resume the run from this load.",
                ) from None
        item = self._shared.items[0]  # stays in the queue if it is the end
        if item is None:
            raise StopIteration
        if not isinstance(item, tuple):
            raise LoadError(
                self._load, f"failed: {describe_error(item)}. Resume the run from this load."
            ) from item

    def __next__(self) -> PyTree[jax.Array]:
        self.wait()
        (batch,) = self._shared.items.popleft()
        self._load += 1
        self._shared.slots.put(None)
        with contextlib.suppress(queue.Empty):
            self._shared.arrivals.get_nowait()
        return batch

    def __exit__(self, *_: object) -> None:
        self.close()


def prefetch_to_device(
    batches: Iterable,
    *,
    depth: int = 2,
    timeout: float | None = None,
    sharding: jax.sharding.Sharding | PyTree | None = None,
    first_load: int = 0,
) -> Prefetch:
    """Loads batches and copies them to the device on a thread, during the steps before them.

    The queue holds `depth` finished batches. The thread holds one more, which it is loading or
    which waits for a place in the queue. Loading starts at the call.

    Args:
      batches: an iterable of trees of arrays, such as a dataset of tf.data or a Grain loader;
        only the thread uses it.
      depth: >= 1, length of the queue.
      timeout: seconds > 0 after which waiting for a load is an error; None waits forever.
      sharding: a device, a `jax.sharding.Sharding`, or a tree of them; the default device if None.
      first_load: >= 0, the number of the first batch in messages, for a resumed run.

    Returns:
      A `Prefetch`: an iterator and context manager. `ready()` tells whether the next batch is on
      the device; `close()` ends the thread.

    Raises:
      ValueError: if batches is not iterable, or a depth, timeout or first_load is out of range.
      LoadError: from `next`, with the number of the load that failed or hangs.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> loader = ordering.data.prefetch_to_device(np.full(2, i) for i in range(3))
      >>> [int(batch.sum()) for batch in loader]
      [0, 2, 4]
    """
    check_batches("batches", batches)
    plans.check_whole("depth", depth, 1)
    plans.check_whole("first_load", first_load, 0)
    if timeout is not None:
        timeout = plans.check_number("timeout", timeout, f"(0, {threading.TIMEOUT_MAX}]")
    wrong = [s for s in jax.tree.leaves(sharding) if not isinstance(s, PLACES)]
    if wrong:
        raise ValueError(
            f"sharding is {wrong[0]!r}: pass a device, such as jax.devices()[0], a jax.sharding."
            "Sharding, or a tree of them."
        )
    arrivals, slots = queue.SimpleQueue(), queue.SimpleQueue()
    shared = _Shared(collections.deque(), arrivals, slots, threading.Event())
    for _ in range(depth + 1):
        shared.slots.put(None)
    args = iter(batches), sharding, shared, carried_settings()
    thread = threading.Thread(target=_work, args=args, daemon=True)
    thread.start()
    return Prefetch(shared, thread, first_load, timeout)


def carried_settings() -> Callable[[], contextlib.AbstractContextManager]:
    """The settings of JAX that belong to this thread, as a context that another one enters.

    They are the x64 mode, the default device and the precision of products.
    """
    config: Any = jax.config
    x64, device = config.jax_enable_x64, config.jax_default_device
    precision = config.jax_default_matmul_precision

    @contextlib.contextmanager
    def entered():
        with (
            jax.enable_x64(x64),
            jax.default_device(device),
            jax.default_matmul_precision(precision),
        ):
            yield

    return entered


def check_batches(name: str, batches: object) -> None:
    """Raises ValueError unless it is an iterable of batches; a dict is one batch."""
    if not isinstance(batches, Iterable) or isinstance(batches, dict | str | type):
        raise ValueError(
            f"{name} is a {type(batches).__name__}: pass an iterable of batches, such as a list, a "
            "loader, or a generator (call the generator function)."
        )


def on_device(batch: PyTree, sharding: PyTree = None) -> PyTree[jax.Array]:
    """The batch as JAX arrays; without a sharding, JAX arrays stay where they are."""
    if not jax.tree.leaves(batch):
        raise ValueError(f"a batch is {batch!r}, without arrays: give arrays, or end the iterable.")
    batch = representable(batch)
    check_sharding(batch, sharding)
    try:
        if sharding is not None:
            return jax.device_put(batch, sharding)
        # One process could not move arrays that span several.
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), batch)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{error} Give arrays of numbers that JAX has.") from error


def check_steps(source: Source, shapes: Iterable[tuple[int, ...]], sharding: PyTree) -> None:
    """Raises ValueError if a sharding cannot hold batches of a source.

    `shapes` are the leading axes, such as (W, n), of a whole step and of an epoch's last step.
    """
    if sharding is not None:
        first = source[:1]
        for axes in shapes:
            sizes = lambda x: np.broadcast_to(x, (*axes, *x.shape[1:]))  # noqa: B023, E731
            check_sharding(jax.tree.map(sizes, first), sharding)


def check_sharding(batch: PyTree, sharding: PyTree) -> None:
    """Raises ValueError, which names the leaf, for arrays that a sharding cannot hold.

    The leaves of the batch only need a shape. JAX checks the rest, such as the structure.
    """
    is_none = lambda x: x is None  # noqa: E731
    try:
        # None is a leaf here. Otherwise structures differ, and JAX writes the batch into an error,
        # for which it copies all of it from the device.
        places = jax.tree.broadcast(sharding, batch, is_leaf=is_none)
    except ValueError:
        return
    places = jax.tree.leaves(places, is_leaf=is_none)
    leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_none)
    for (path, leaf), place in zip(leaves, places, strict=True):
        place, name = getattr(place, "sharding", place), f"batch{jax.tree_util.keystr(path)}"
        if not isinstance(place, jax.sharding.NamedSharding):
            continue
        shape, spec = np.shape(leaf), f"P{tuple(place.spec)}"
        if len(place.spec) > len(shape):
            kind = f"has the shape {shape}" if shape else "is a scalar"
            raise ValueError(
                f"{name} {kind}, and sharding={spec} names {len(place.spec)} axes: pass a tree of "
                "shardings, with jax.sharding.NamedSharding(mesh, jax.P()) for this leaf."
            )
        try:
            place.shard_shape(shape)
        except ValueError:
            raise ValueError(
                f"{name} has the shape {shape}, which sharding={spec} cannot split over "
                f"{dict(place.mesh.shape)}: let all batches, also the last of an epoch, hold a "
                "multiple of the devices. Leave out examples, or pad the source and give the "
                "padding no weight in the loss (docs/use/input.md)."
            ) from None


def representable(batch: PyTree) -> PyTree:
    """The batch in the types that it has on the device; ValueError if these cannot represent it.

    Without its x64 mode JAX would truncate integers to 32 bits, and make large floats infinite.
    """
    return jax.tree_util.tree_map_with_path(_representable, batch)


def _representable(path, value):
    if isinstance(value, jax.Array):
        return value
    name = f"batch{jax.tree_util.keystr(path)}"
    if type(value) is not np.ndarray:
        containers.check_container(name, value)
    plain = np.ndarray | np.generic | bool | int | float | complex | str | bytes
    if not isinstance(value, plain) and not containers.is_tensor(value):
        is_source = hasattr(value, "__len__") and hasattr(value, "__getitem__")
        line = f"ordering.data.as_source({name})[:]" if is_source else f"np.asarray({name})"
        containers.refuse(name, f"a {type(value).__name__}", line)
    array = np.asarray(value)
    if array.dtype.kind == "T":
        array = array.astype(object)
    dtype = array.dtype.newbyteorder("=")
    numbers = any(jnp.issubdtype(dtype, kind) for kind in (np.number, np.bool_))
    if dtype.kind == "m" or not numbers:  # for NumPy a time span is a number, too
        example = f", as {array.flat[0]!r:.60}" if array.size else ""
        advice = ADVICE.get(dtype.kind, "leave texts and other objects out of the batches")
        raise ValueError(f"{name} is of {dtype}{example}, which JAX does not have: {advice}.")
    target = jax.dtypes.canonicalize_dtype(dtype)
    if target != array.dtype:
        with np.errstate(over="ignore"):
            cast = array.astype(target)
        changed = cast != array if target.kind in "iu" else np.isinf(cast) & ~np.isinf(array)
        if changed.any():
            raise ValueError(
                f"{name} has {array[changed][0]}, and JAX converts {dtype} to {target}, which "
                "cannot hold it: leave it out of the batches, scale or split it, or set "
                "JAX_ENABLE_X64=1."
            )
        array = cast
    # Python's numbers keep their weak types.
    return value if isinstance(value, bool | int | float | complex) else array


class _Shared(NamedTuple):
    """State that the loader shares with its thread, which must not keep the loader alive."""

    items: collections.deque  # (batch,) of each batch, then None (the end) or an exception
    arrivals: queue.SimpleQueue  # wakes the consumer, for each item
    slots: queue.SimpleQueue  # one for each batch that may be loaded
    closed: threading.Event

    def put(self, item: Any) -> None:
        self.items.append(item)
        self.arrivals.put(None)


def _work(batches, sharding, shared, settings):
    with settings():
        while _load_one(batches, sharding, shared):
            pass


def _load_one(batches, sharding, shared) -> bool:
    """Whether there may be another batch. A function, so that no name keeps a batch."""
    shared.slots.get()
    if shared.closed.is_set():
        return False
    try:
        item = (jax.block_until_ready(on_device(next(batches), sharding)),)
    except StopIteration:
        item = None
    except BaseException as error:  # raised again by `next`
        item = error
    if shared.closed.is_set():
        return False  # the consumer has been given the end
    shared.put(item)
    return isinstance(item, tuple)


def _stop(shared, thread):
    shared.closed.set()
    shared.slots.put(None)
    if thread is not threading.current_thread():  # garbage collection may run in the thread
        thread.join(timeout=1)
    shared.put(None)  # the end, for a consumer that still waits
