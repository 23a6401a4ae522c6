"""A position in the data with the state of an order there, for checkpoints."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from ordering.base import State
from syncopate import mesh

Count = int | Int[np.ndarray, ""] | Int[jax.Array, ""]


class ReadState(NamedTuple):
    """A position in the data and the order's state there; see `Epochs.state`."""

    order: State  # the states of all workers
    epoch: Count = 0
    units: Count = 0  # units of this epoch that all workers together have read
    loads: Count = 0  # batches read since the run began


def check_place(
    place: ReadState, num_units: int, workers: int, window: int, *, aligned: bool = False
) -> None:
    """Raises ValueError for a position outside of the order, or one where no step begins.

    If it must be `aligned`, and for orders that observe, whole steps must be left of the epoch, and
    a shorter step only if the epoch always ends with one.
    """
    unit, rest = divmod(int(place.units), workers)
    if rest or not 0 <= unit <= num_units:
        raise ValueError(
            f"{int(place.units)} units of the epoch were read, and {workers} workers have "
            f"{num_units} units each: pass a state of this order, after another number of workers "
            "with the order that ordering.resize made."
        )
    is_aligned = (num_units - unit) % window in (0, num_units % window)
    if (aligned or hasattr(place.order, "position")) and not is_aligned:
        raise ValueError(
            f"{unit} of {num_units} units were read, which leaves no whole steps of {window} "
            "units: use another units_per_step or window until the epoch ends."
        )


def restored(like: Any, saved: PyTree) -> Any:
    """`saved` with the structure, types and devices of `like`; ValueError if arrays differ."""
    advice = "pass Epochs.state() of an order with the same arguments, units and workers."

    def pick(path, leaf):
        value = saved
        for part in path:
            name = getattr(part, "name", getattr(part, "key", getattr(part, "idx", None)))
            try:
                value = part_of(value, name)
            except (KeyError, IndexError, AttributeError, TypeError):
                where = jax.tree_util.keystr(path)
                raise ValueError(f"state has no {where}: {advice}") from None
        data, value = key_data(leaf), key_data(value)
        if np.shape(value) != np.shape(data):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"state{where} has the shape {np.shape(value)}, and the order's {np.shape(data)}: "
                f"{advice}"
            )
        return _placed(value, leaf)

    restored_state = jax.tree_util.tree_map_with_path(pick, like)
    if len(jax.tree.leaves(saved)) != len(jax.tree.leaves(like)):
        raise ValueError(f"state has arrays that this order does not have: {advice}")
    return restored_state


def unwrap(saved: Any) -> tuple[Any, Any]:
    """The reader's part of a state, and the state of `echo.repeat` around it, or None."""
    try:
        return part_of(saved, "reads"), saved
    except (KeyError, IndexError, AttributeError, TypeError):
        return saved, None


def part_of(tree, name):
    """An item or field, by name or index, of a tree or of the form a checkpoint gave it."""
    if isinstance(tree, Mapping):
        return tree[name] if name in tree else tree[str(name)]
    if isinstance(name, str) and hasattr(tree, name):
        return getattr(tree, name)
    return tree[name]


def key_data(x: Any) -> Any:
    """The uint32 data of typed keys; other arrays unchanged."""
    return jax.random.key_data(x) if isinstance(x, jax.Array) and mesh.is_key(x) else x


def _placed(x, like):
    """A copy of an array, with the type and the device of `like`."""
    if not isinstance(like, jax.Array):
        return np.asarray(x)
    if mesh.is_key(like):
        data = _placed(key_data(x), jax.random.key_data(like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    if not like.committed:
        return jnp.array(x, like.dtype)
    if isinstance(x, jax.Array) and x.is_fully_addressable == like.is_fully_addressable:
        return jnp.copy(jax.device_put(x.astype(like.dtype), like.sharding))
    x = np.asarray(x, like.dtype)
    return jax.make_array_from_callback(x.shape, like.sharding, lambda index: x[index])
