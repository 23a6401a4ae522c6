"""Batches that a thread loads ahead of the steps."""

import collections
import contextlib
import contextvars
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ordering.data import containers
from ordering.data.sources import Source
from syncopate import plans
from syncopate.unstable import Format

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
      load: number of the next batch.
      close: a function without arguments that ends the thread.
    """

    def __init__(self, items: "_Items", thread: threading.Thread, first_load: int, timeout: Any):
        self._items, self.load, self._timeout = items, first_load, timeout
        # Also runs at exit, where a thread that still copies to a device would crash Python.
        self.close = weakref.finalize(self, _close, items, thread)

    def ready(self) -> bool:
        """Whether `next` returns, ends or raises without waiting."""
        return bool(self._items)

    def wait(self) -> None:
        """Waits until `next` returns at once; raises what `next` would raise."""
        with self._items.changed:  # what was loaded stays there, so that Ctrl-C loses none
            if not self._items.changed.wait_for(self.ready, self._timeout):
                raise LoadError(
                    self.load,
                    f"did not come within {self._timeout:g} s: the input hangs. Call next again "
                    "to wait longer, or resume the run from this load.",
                )
        item = self._items[0]
        if isinstance(item, StopIteration):
            raise StopIteration
        if isinstance(item, BaseException):
            raise LoadError(
                self.load, f"failed: {describe_error(item)}. Resume the run from this load."
            ) from item

    def __next__(self) -> PyTree[jax.Array]:
        self.wait()
        with self._items.changed:
            self.load += 1
            self._items.changed.notify_all()
            return self._items.popleft()

    def __exit__(self, *_: object) -> None:
        self.close()


class _Items(collections.deque):
    """The batches that were loaded, and at last an error, which is a StopIteration at the end.

    The thread holds it in place of the `Prefetch`, which can be freed while the thread waits.
    """

    def __init__(self, depth: int):
        super().__init__()
        self.depth, self.changed, self.closed = depth, threading.Condition(), False

    def may_load(self) -> bool:
        return self.closed or len(self) <= self.depth


def _load_all(batches: Iterator, sharding: PyTree, items: _Items) -> None:
    while _load_one(batches, sharding, items):
        pass


def _load_one(batches: Iterator, sharding: PyTree, items: _Items) -> bool:
    """Whether there may be another batch. A function, so that no name keeps a batch."""
    with items.changed:
        items.changed.wait_for(items.may_load)
        if items.closed:
            return False
    try:
        item = jax.block_until_ready(on_device(next(batches), sharding))
    except BaseException as error:  # raised again by `next`
        item = error
    with items.changed:
        if not items.closed:
            items.append(item)
            items.changed.notify_all()
    return not isinstance(item, BaseException)


def _close(items: _Items, thread: threading.Thread) -> None:
    with items.changed:
        items.closed = True
        items.append(StopIteration())
        items.changed.notify_all()
    if thread is not threading.current_thread():  # garbage collection may run in the thread
        thread.join(timeout=1)


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
    which waits for a place in the queue. Loading starts at the call. NumPy arrays are copied, also
    on a CPU, so a loader may fill one buffer again and again; JAX arrays are passed on.

    The thread has the context variables of the call. It also has these settings of JAX: the mesh,
    the default device, x64, the kind of random keys, promotion, precision, and the search for NaNs.
    Transfer guards and what only logs stay with the caller.

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
            f"sharding is {wrong[0]!r}: pass a device, a jax.sharding.Sharding, or a tree of them."
        )
    items, run = _Items(int(depth)), in_this_context(_load_all)
    thread = threading.Thread(target=run, args=(iter(batches), sharding, items), daemon=True)
    thread.start()
    return Prefetch(items, thread, first_load, timeout)


# Settings of JAX that belong to a thread and change what is computed there.
SETTINGS: tuple[Any, ...] = (
    (jax.default_device, "jax_default_device"),
    (jax.default_matmul_precision, "jax_default_matmul_precision"),
    (jax.default_prng_impl, "jax_default_prng_impl"),
    (jax.enable_x64, "jax_enable_x64"),
    (jax.numpy_dtype_promotion, "jax_numpy_dtype_promotion"),
    (jax.numpy_rank_promotion, "jax_numpy_rank_promotion"),
    (jax.debug_nans, "jax_debug_nans"),
    (jax.debug_infs, "jax_debug_infs"),
    (jax.debug_key_reuse, "jax_debug_key_reuse"),
)


def in_this_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for another thread, with the context variables and settings of this one.

    JAX keeps its settings per thread and has no call that copies them.
    """
    values = [(setting, getattr(jax.config, name)) for setting, name in SETTINGS]
    mesh, context = jax.sharding.get_mesh(), contextvars.copy_context()

    @functools.wraps(function)
    def run(*args):
        with contextlib.ExitStack() as stack:
            for setting, value in values:
                stack.enter_context(setting(value))
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            return context.copy().run(function, *args)  # a context runs in one thread at a time

    return run


def check_batches(name: str, batches: object) -> None:
    """Raises ValueError unless it is an iterable of batches; a dict is one batch."""
    if not isinstance(batches, Iterable) or isinstance(batches, dict | str | type):
        raise ValueError(
            f"{name} is a {type(batches).__name__}: pass an iterable of batches, such as a list, "
            "or call the generator function."
        )


def on_device(batch: PyTree, sharding: PyTree = None) -> PyTree[jax.Array]:
    """The batch as JAX arrays; without a sharding, JAX arrays stay where they are.

    A CPU takes NumPy's memory as it is if it is aligned, and a device may still read it when
    `device_put` returns: what is returned here is a copy that has arrived.
    """
    if not jax.tree.leaves(batch):
        raise ValueError(f"a batch is {batch!r}, without arrays: give arrays, or end the iterable.")
    batch = representable(batch)
    paths, leaves, places = _placed(batch, sharding)
    for path, x, place in zip(paths, leaves, places, strict=True):
        _check_shape(path, np.shape(x), place)
    # One process could not move JAX arrays that span several.
    kept = [isinstance(x, jax.Array) and places[i] is None for i, x in enumerate(leaves)]
    moved = [i for i, keep in enumerate(kept) if not keep]
    arrays = jax.device_put([leaves[i] for i in moved], [places[i] for i in moved])
    for i, array in zip(moved, arrays, strict=True):
        if _is_shared(leaves[i], array):
            array = jax.device_put(leaves[i].copy(), places[i])
        leaves[i] = array if isinstance(leaves[i], jax.Array) else array.block_until_ready()
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def _placed(batch: PyTree, sharding: PyTree) -> tuple[list, list, list]:
    """The paths of the leaves, the leaves, and the place of each, None for the default."""
    is_none = lambda x: x is None  # noqa: E731
    try:  # where both have None, JAX would write the batch into an error
        places = jax.tree.broadcast(sharding, batch, is_leaf=is_none)
    except ValueError as error:
        raise ValueError(f"sharding is a tree that does not fit the batch: {error}") from error
    places = jax.tree.leaves(places, is_leaf=is_none)
    leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_none)
    rows = [
        (*leaf, place) for leaf, place in zip(leaves, places, strict=True) if leaf[1] is not None
    ]
    paths, leaves, places = map(list, zip(*rows, strict=True))
    return paths, leaves, places


def _is_shared(value: Any, array: jax.Array) -> bool:
    """Whether a NumPy array and an array on a CPU have memory in common."""
    if not isinstance(value, np.ndarray):
        return False
    start, stop = np.lib.array_utils.byte_bounds(value)
    here = [x.data for x in array.addressable_shards if x.device.platform == "cpu"]
    return any(start <= data.unsafe_buffer_pointer() < stop for data in here)


def check_steps(source: Source, shapes: Iterable[tuple[int, ...]], sharding: PyTree) -> None:
    """Raises ValueError if a sharding cannot hold batches of a source.

    `shapes` are the leading axes, such as (W, n), of a whole step and of an epoch's last step.
    """
    if sharding is not None:
        paths, leaves, places = _placed(source[:1], sharding)
        for axes in shapes:
            for path, x, place in zip(paths, leaves, places, strict=True):
                _check_shape(path, (*axes, *x.shape[1:]), place)


def _check_shape(path, shape, place):
    """Raises ValueError, which names the leaf, for a shape that a sharding cannot hold."""
    place = getattr(place, "sharding", place)
    if isinstance(place, jax.sharding.Sharding):
        try:
            place.shard_shape(shape)
        except (ValueError, IndexError) as error:
            raise ValueError(
                f"{_name(path)} has the shape {shape}, which {getattr(place, 'spec', place)} "
                "cannot split: pad it or leave examples out, or pass jax.P() for it."
            ) from error


def _name(path) -> str:
    return f"batch{jax.tree_util.keystr(path)}"


def representable(batch: PyTree) -> PyTree:
    """The batch in the types that it has on the device; ValueError if these cannot represent it.

    Without its x64 mode JAX would truncate integers to 32 bits, and make large floats infinite.
    """
    return jax.tree_util.tree_map_with_path(_representable, batch)


def _representable(path, value):
    if isinstance(value, jax.Array):
        return value
    array = containers.as_numpy(_name(path), value)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    is_number = jnp.issubdtype(dtype, np.number) and dtype.kind != "m"
    if not is_number and dtype.kind != "b":
        raise ValueError(
            f"{_name(path)} is of {dtype}, which JAX lacks: pass numbers, or leave it out."
        )
    if dtype != array.dtype:
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        changed = cast != array if dtype.kind in "iu" else np.isinf(cast) & ~np.isinf(array)
        if changed.any():
            raise ValueError(
                f"{_name(path)} has {array[changed][0]}, which {dtype} cannot hold: scale it, "
                "leave it out, or set JAX_ENABLE_X64=1."
            )
        array = cast
    # Python's numbers keep their weak types.
    return value if isinstance(value, bool | int | float | complex) else array
