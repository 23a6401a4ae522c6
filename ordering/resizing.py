"""Converts the state of an order for another number of workers, also in the middle of an epoch.

Runs on the host, in NumPy, on states with leaves [W, ...].
"""

from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from ordering import base
from ordering.base import Ordering, State
from ordering.data.place import key_data, part_of
from syncopate import mesh, plans
from syncopate.unstable import multihost_utils


def resize(
    state: State,
    fresh: State,
    order: Ordering,
    units: Int[np.ndarray, "W M"] | None = None,
    *,
    units_per_step: int,
    visited: int,
) -> tuple[State, Int[np.ndarray, "W2 M2"] | None]:
    """The state of an order for W' workers, in which each unit is still visited once per epoch.

    Each step of all workers keeps its W B units: worker 0 of the W' gets the first B' = W B / W' of
    them, worker 1 the next B', and so on. Orders that use no gradients draw their next order for W'
    workers; the later epochs of `scored` have the steps that they had.

    Between epochs, other orders lose nothing, except that greedy herding loses its gradients, which
    it observes again in the next epoch. In the middle of an epoch they drop their observations and
    repeat the current order in the next epoch, which they observe from the start; pairs of a global
    order keep their order there. Greedy herding also observes the rest of this epoch.

    The mean of `grab` and the counters of a sign rule are always kept, from the workers whose units
    a new worker takes over. The keys are those of `fresh`, but that of `scored` is kept.

    Args:
      state: leaves [W, ...]; also of several processes, or the dicts that a checkpoint makes of it.
      fresh: a first state of `order` for W' workers with M' = W M / W' units each, which supplies
        keys and shapes.
      order: the order for W' workers.
      units: int[W, M] with increasing rows, the units that each worker owns, which `current`
        indexes; None if `current` holds units of all workers (`global_order`).
      units_per_step: B in [1, M], the units that each of the W workers visits in a step.
      visited: in 0 .. M', how many units of this epoch each of the W' workers has visited; 0
        between epochs.

    Returns:
      (state, units) for W' workers, where units is int32[W', M']. The state of a computed order,
      which belongs to any number of workers, is returned as it is.

    Raises:
      ValueError: if the arguments do not fit each other; in the middle of an epoch, for an order of
        one's own without a method `resize`.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> def first(workers):
      ...     order = ordering.global_reshuffling(8 // workers)
      ...     keys = jax.random.split(jax.random.key(0), workers)
      ...     return order, jax.vmap(order.init, (0, None), axis_name="worker")(keys, None)
      >>> (_, state), (order, fresh) = first(2), first(4)
      >>> state, _ = ordering.resize(state, fresh, order, units_per_step=2, visited=0)
      >>> state.current.shape, sorted(state.current.ravel().tolist()) == list(range(8))
      ((4, 2), True)
    """
    base.check_order(order)
    if order.computed:
        return state, None  # it is of any number of workers
    if order.is_global != (units is None):
        raise ValueError(
            f"units is {'None' if units is None else 'given'}: pass None for an order of all "
            f"workers' units, and each worker's units for others; this is {type(order).__name__}."
        )
    if np.ndim(getattr(fresh, "current", 0)) != 2:
        raise ValueError(
            f"fresh is a {type(fresh).__name__}: pass a state of the order, of all workers."
        )
    state, fresh = _like(fresh, state), jax.tree.map(_on_host, fresh)
    _check(state, fresh, units, units_per_step, visited)
    current, new_units = state.current, None
    if units is not None:
        current = np.take_along_axis(np.asarray(units), current, axis=1)
    if len(np.unique(current)) < current.size:
        raise ValueError(
            "some units belong to several workers: pass units= with each worker's, each once, or "
            "None for a global order."
        )
    current = redistribute(current, len(fresh.current), units_per_step)
    if units is not None:
        new_units = np.sort(current, axis=1).astype(np.int32)
        pairs = zip(new_units, current, strict=True)
        current = np.stack([np.searchsorted(*rows) for rows in pairs])
    return order.resize(state, fresh, current.astype(np.int32), visited), new_units


def _like(fresh: State, state: Any) -> State:
    """The state's arrays on the host; dicts, as checkpoints make them, in the form of `fresh`.

    A state of the same type may have other arrays, as pairs that two steps share do.
    """
    leaves = dict(jax.tree_util.tree_leaves_with_path(fresh))

    def pick(path, value):
        data = _on_host(value)
        if mesh.is_key(leaves.get(path)) and not mesh.is_key(data):  # as `Epochs.state` saves it
            impl = jax.random.key_impl(leaves[path])
            data = jax.random.wrap_key_data(jax.device_put(data), impl=impl)
        return data

    def part(path, _):
        value = state
        for key in path:
            name = getattr(key, "name", getattr(key, "key", getattr(key, "idx", None)))
            value = part_of(value, name)
        return value

    try:
        like = type(state) is type(fresh) or hasattr(state, "_fields")
        found = state if like else jax.tree_util.tree_map_with_path(part, fresh)
    except (KeyError, IndexError, AttributeError, TypeError):
        found = None
    if type(found) is not type(fresh):
        raise ValueError(
            f"state is a {type(state).__name__} and fresh a {type(fresh).__name__}: pass states of "
            "one order."
        )
    return jax.tree_util.tree_map_with_path(pick, found)


def _on_host(x: Any) -> Any:
    """An array of all processes as one of NumPy; keys as keys."""
    if mesh.is_key(x):
        if x.is_fully_addressable:
            return x
        data = jax.device_put(_on_host(key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if getattr(x, "is_fully_addressable", True):
        return np.asarray(jax.device_get(x))
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _check(state, fresh, units, units_per_step, visited):
    if np.ndim(state.current) != 2:
        raise ValueError(
            f"state.current has the shape {np.shape(state.current)}: pass the state of all workers."
        )
    (workers, size), (after, new_size) = (np.shape(x.current) for x in (state, fresh))
    units_per_step = plans.check_whole("units_per_step", units_per_step, 1, size)
    plans.check_whole("visited", visited, 0, new_size)
    if workers * size != after * new_size:
        raise ValueError(
            f"state has {workers} workers of {size} units and fresh {after} of {new_size}: pass a "
            "fresh state of as many units."
        )
    for step in (units_per_step, size % units_per_step):
        if workers * step % after:
            raise ValueError(
                f"fresh has {after} workers, which cannot share a step of {workers * step} units: "
                "resize to a number that divides it."
            )
    if units is not None and np.shape(units) != (workers, size):
        raise ValueError(
            f"units has the shape {np.shape(units)} and state.current {(workers, size)}: pass the "
            "units of each worker."
        )


def redistribute(rows: np.ndarray, workers: int, units_per_step: int) -> np.ndarray:
    """The orders of W' workers, [W', M'], from those of W, [W, M]: each step keeps its units."""
    whole = rows.shape[1] // units_per_step * units_per_step

    def cut(x, steps):
        x = x.reshape(len(x), steps, -1).swapaxes(0, 1)
        return x.reshape(steps, workers, -1).swapaxes(0, 1).reshape(workers, -1)

    parts = cut(rows[:, :whole], whole // units_per_step), cut(rows[:, whole:], 1)
    return np.concatenate(parts, axis=1)
