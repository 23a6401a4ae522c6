"""A position in the data with the state of an order there, for checkpoints."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree, UInt32

from ordering.base import Ordering, State
from ordering.data.batches import Sizes
from syncopate import mesh

ADVICE = "pass the state of the same order, with as many units and workers."
SAVED = "pass what state() of the reader gave, or no state."
LOST = KeyError, IndexError, AttributeError, TypeError  # of a part that a saved tree does not have

Count = int | Int[np.ndarray, ""] | Int[jax.Array, ""]


class ReadState(NamedTuple):
    """A position in the data and the order's state there; see `Epochs.state`."""

    order: State  # the states of all workers
    epoch: Count = 0
    units: Count = 0  # units of this epoch that all workers together have read
    loads: Count = 0  # batches read since the run began
    digest: UInt32[np.ndarray, ""] | None = None  # of order and unit_size; None is not checked


def digest_of(order: Ordering, unit_size: int, units: int) -> UInt32[np.ndarray, ""]:
    """A hash of what a place after so many units of an epoch is a place in."""
    digest = f"{int(order.digest(units))} {unit_size}".encode()
    return np.asarray(zlib.crc32(digest), np.uint32)


def check_digest(saved: Any, order: Ordering, unit_size: int, units: int) -> None:
    """Raises ValueError unless the digest in a saved state is that of this order and unit_size."""
    try:
        digest = part_of(saved, "digest")
    except LOST:
        raise ValueError(f"state has no digest: {SAVED}") from None
    expected = digest_of(order, unit_size, units)
    if digest is not None and not np.array_equal(jax.device_get(digest), expected):
        raise ValueError(
            "state is of another order or unit_size: pass those it was saved with, or no state; "
            "after ordering.resize, with digest=None."
        )


def counts_of(saved: Any, names: tuple[str, ...]) -> dict[str, int]:
    """Whole numbers of a saved state; raises ValueError for others."""
    counts = {}
    for name in names:
        try:
            value = np.asarray(jax.device_get(part_of(saved, name)))
        except LOST:
            raise ValueError(f"state has no {name}: {SAVED}") from None
        if value.shape or value.dtype.kind not in "iu" or value < 0:
            raise ValueError(f"state.{name} is {value!r:.60}: {SAVED}")
        counts[name] = int(value)
    return counts


def check_place(units: int, order: Ordering, sizes: Sizes, *, aligned: bool = False) -> None:
    """Raises ValueError for a position outside of the order, or one where no step begins.

    If it must be `aligned`, and for orders that observe, whole steps must be left of the epoch, and
    a shorter step only if the epoch always ends with one.
    """
    if units > sizes.num_units or not order.computed and units % sizes.least:
        raise ValueError(
            f"state has read {units} units of {sizes.num_units}, which {sizes.least} workers share:"
            " pass its order and workers, or what ordering.resize made of both."
        )
    left = sizes.num_units - units
    if aligned or order.observes:
        if left % sizes.window not in (0, sizes.num_units % sizes.window):
            each = (x // sizes.least for x in (units, sizes.num_units, sizes.window))
            raise ValueError(
                "{} of {} units were read, which leaves no whole steps of {} units: use another "
                "units_per_step or window until the epoch ends.".format(*each)
            )


def restore(like: Any, saved: PyTree, where: str = "") -> Any:
    """`saved` with the structure, types and devices of `like`; ValueError if arrays differ.

    It may have the forms that checkpoints make: dicts and lists, and lists of numbers for arrays.
    """
    parts, structure = jax.tree_util.tree_flatten_with_path(like, is_leaf=lambda x: x is not like)
    if parts and not parts[0][0]:  # no path: an array
        return _restore_array(like, saved, where)
    if isinstance(saved, Mapping):
        known = {name for (path, _) in parts for name in _names(path[0])}
        more = [value for name, value in saved.items() if name not in known]
    else:
        is_list = isinstance(saved, list | tuple)
        more = list(saved)[len(parts) :] if is_list else [saved][: not parts]
    if jax.tree.leaves(more):
        raise ValueError(f"state{where} has arrays that this order does not have: {ADVICE}")
    values = []
    for number, (path, part) in enumerate(parts):
        name = where + jax.tree_util.keystr(path)
        try:
            value = _part_of(saved, number, *_names(path[0]))
        except LOST:
            if jax.tree.leaves(part):
                raise ValueError(f"state has no {name}: {ADVICE}") from None
            value = part
        values.append(restore(part, value, name))
    return structure.unflatten(values)


def _restore_array(like, saved, where):
    """The array, with the type and the device of `like`, in memory of its own."""
    value = key_data(saved)
    try:
        value = value if isinstance(value, jax.Array) else np.asarray(value)
    except ValueError:  # a list of several lengths
        value = np.asarray(None)
    if np.shape(value) != np.shape(key_data(like)) or value.dtype.kind in "OSU":
        raise ValueError(
            f"state{where} is {value.dtype}{list(value.shape)}, and the order's "
            f"{list(np.shape(key_data(like)))}: {ADVICE}"
        )
    return _place(value, like)


def _place(x: Any, like: Any) -> Any:
    if not isinstance(like, jax.Array):
        return np.array(jax.device_get(x), np.asarray(like).dtype)
    if mesh.is_key(like):
        data = _place(x, jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    if isinstance(x, jax.Array) and x.is_fully_addressable == like.is_fully_addressable:
        x = jnp.copy(x.astype(like.dtype))
        return jax.device_put(x, like.sharding) if like.committed else x
    x = np.array(jax.device_get(x), like.dtype)  # a copy, whose memory a CPU may take
    if not like.committed:
        return jax.device_put(x)
    places = like.sharding.addressable_devices_indices_map(x.shape).items()
    parts = [jax.device_put(x[index], device) for device, index in places]
    return jax.make_array_from_single_device_arrays(x.shape, like.sharding, parts)


def unwrap(saved: Any) -> tuple[Any, Any]:
    """The reader's part of a state, and the state of `echo.repeat` around it, or None."""
    try:
        return part_of(saved, "reads"), saved
    except LOST:
        return saved, None


def part_of(tree: Any, name: Any) -> Any:
    """A field or an item of a tree, or of the form that a checkpoint gave it."""
    number = ReadState._fields.index(name) if name in ReadState._fields else name
    return _part_of(tree, number, name)


def _part_of(tree, number, *names):
    """An item by one of its names, or in a list by its number."""
    if isinstance(tree, Mapping):
        return tree[next((name for name in names if name in tree), names[0])]
    for name in names:
        if isinstance(name, str) and hasattr(tree, name):
            return getattr(tree, name)
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return tree[number]
    raise TypeError(f"{type(tree).__name__} has no {names}")


def _names(key: Any) -> tuple:
    """What a checkpoint may call an item."""
    name = getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))
    return name, str(name)


def key_data(x: Any) -> Any:
    """The uint32 data of typed keys; other arrays unchanged."""
    return jax.random.key_data(x) if isinstance(x, jax.Array) and mesh.is_key(x) else x


def copied(tree: PyTree) -> PyTree:
    """New arrays, which the next step cannot donate; keys become their data."""
    return jax.tree.map(lambda x: jnp.copy(key_data(x)), tree)
