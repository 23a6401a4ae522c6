"""Converts the state of an order for another number of workers, also in the middle of an epoch.

Runs on the host, in NumPy, on states with leaves [W, ...].
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from ordering.base import Ordering, State
from ordering.baselines.herding import GreedyHerdingState
from ordering.centred import GrabState
from ordering.gathered import GatheredState
from ordering.global_orders import GlobalState
from ordering.pairs import PairBalanceState
from ordering.scored_orders import ScoredState
from ordering.shuffles import ShuffleState
from syncopate import mesh, plans


def resize(
    state: State,
    fresh: State,
    order: Ordering,
    units: Int[np.ndarray, "W M"] | None = None,
    *,
    units_per_step: int,
    visited: int,
    axis_name: str = "worker",
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
      state: leaves [W, ...].
      fresh: a first state of `order` for W' workers with M' = W M / W' units each, which supplies
        keys and shapes.
      order: the order for W' workers.
      units: int[W, M] with increasing rows, the units that each worker owns, which `current`
        indexes; None if `current` holds units of all workers (`global_order`).
      units_per_step: B in [1, M], the units that each of the W workers visits in a step.
      visited: in 0 .. M', how many units of this epoch each of the W' workers has visited; 0
        between epochs.
      axis_name: the workers' axis with which `order` was made.

    Returns:
      (state, units) for W' workers, where units is int32[W', M']. The state of a computed order,
      which belongs to any number of workers, is returned as it is.

    Raises:
      ValueError: if the arguments do not fit each other; in the middle of an epoch, for the state
        of an order that `begun` does not know.

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
    if isinstance(order, Ordering) and order.indices is not None:
        return state, None  # it is of any number of workers
    for name, value in (("state", state), ("fresh", fresh)):
        if np.ndim(getattr(value, "current", 0)) != 2:
            raise ValueError(
                f"{name} is a {type(value).__name__}: pass a state of an order, of all workers."
            )
    current, new_units = np.asarray(state.current), None
    _check(state, fresh, units, units_per_step, visited)
    if units is not None:
        current = np.take_along_axis(units, current, axis=1)
    if len(np.unique(current)) < current.size:
        raise ValueError(
            "some units belong to several workers: pass units= with the units of each worker, each "
            "once, or None for the state of a global order."
        )
    current = redistributed(current, len(fresh.current), units_per_step)
    if units is not None:
        new_units = np.sort(current, axis=1).astype(np.int32)
        pairs = zip(new_units, current, strict=True)
        current = np.stack([np.searchsorted(*rows) for rows in pairs])
    new = begun(fresh, state, current.astype(np.int32), visited)
    if isinstance(new, ShuffleState | ScoredState):  # its next order is drawn an epoch ahead
        if not isinstance(order, Ordering):
            raise ValueError(f"order is {order!r}: pass the Ordering of which fresh is a state.")
        new = jax.vmap(order.next_epoch, axis_name=axis_name)(new)
    return new, new_units


def _check(state, fresh, units, units_per_step, visited):
    (workers, size), (after, new_size) = ((0, *x.current.shape)[-2:] for x in (state, fresh))
    whole = plans.is_whole(units_per_step) and 1 <= units_per_step <= size
    if not (
        whole
        and type(state) is type(fresh)
        and workers * size == after * new_size > 0
        and workers * units_per_step % after == workers * (size % units_per_step) % after == 0
        and plans.is_whole(visited)
        and 0 <= visited <= new_size
        and (units is None or np.shape(units) == (workers, size))
    ):
        raise ValueError(
            f"a {type(state).__name__} of {workers} workers with {size} units, {units_per_step!r} "
            f"per step, cannot go on as a {type(fresh).__name__} of {after} workers with "
            f"{new_size} units, {visited!r} of them visited, for units of shape {np.shape(units)}: "
            "pass states of one order, and steps that all new workers can share."
        )


def redistributed(rows: np.ndarray, workers: int, units_per_step: int) -> np.ndarray:
    """The orders of W' workers, [W', M'], from those of W, [W, M]: each step keeps its units."""
    whole = rows.shape[1] // units_per_step * units_per_step

    def cut(x, steps):
        x = x.reshape(len(x), steps, -1).swapaxes(0, 1)
        return x.reshape(steps, workers, -1).swapaxes(0, 1).reshape(workers, -1)

    parts = cut(rows[:, :whole], whole // units_per_step), cut(rows[:, whole:], 1)
    return np.concatenate(parts, axis=1)


@functools.singledispatch
def begun(fresh: State, state: State, current: Int[np.ndarray, "W2 M2"], visited: int) -> State:
    """A first state with this `current` order; register one function per type of state.

    In the middle of an epoch most states count all units as observed, so that the rest is ignored.
    """
    if visited:
        raise ValueError(
            f"{type(state).__name__} is not registered with begun of ordering.resize: register it "
            "(from ordering.resizing import begun), or save at the end of an epoch."
        )
    counts = hasattr(type(state), "epoch")
    epoch = {"epoch": _kept(state.epoch, len(current))} if counts else {}
    return fresh._replace(current=current, next=current.copy(), **epoch)


def _kept(leaf, workers: int, fresh=None):
    """A leaf [W, ...] for W' workers: each takes it from the worker whose units it takes first.

    Keys are those of `fresh`, since workers without a common sum draw different numbers.
    """
    if fresh is not None and mesh.is_key(fresh):
        return fresh
    old = np.asarray(leaf)
    return old[np.arange(workers) * len(old) // workers]


def _shared(leaf: np.ndarray, workers: int) -> np.ndarray:
    """Means [W, ...] over equally many units, for W' workers by the units that each takes over."""
    old = np.asarray(leaf)
    ends = lambda count: np.arange(count + 1) * (len(old) * workers // count)  # noqa: E731
    (low, high), (first, last) = ((ends(n)[:-1], ends(n)[1:]) for n in (workers, len(old)))
    both = np.minimum(high[:, None], last) - np.maximum(low[:, None], first)
    weights = np.maximum(both, 0).astype(old.dtype) / len(old)
    return np.tensordot(weights, old, axes=1)


@begun.register
def _(fresh: ShuffleState, state, current, visited):
    """The caller's `next_epoch` makes these orders the current ones and draws the next."""
    epoch = _kept(state.epoch, len(current)) - 1
    return fresh._replace(current=current, next=current.copy(), epoch=epoch)


@begun.register
def _(fresh: ScoredState, state, current, visited):
    """The key and the ranking are equal on all workers, and stay; the rest is as in a shuffle."""
    key, workers = state.key, len(current)
    if not mesh.is_key(key):  # as `Epochs.state` saves it
        key = jax.random.wrap_key_data(jnp.asarray(key), impl=jax.random.key_impl(fresh.key))
    first = np.zeros(workers, int)
    return fresh._replace(
        current=current,
        next=current.copy(),
        epoch=_kept(state.epoch, workers) - 1,
        key=key[first],
        places=np.asarray(state.places)[first],
    )


@begun.register(PairBalanceState)
@begun.register(GatheredState)
@begun.register(GrabState)
def _(fresh, state, current, visited):
    following, half = current.copy(), current.shape[1] // 2
    if not isinstance(fresh, GrabState):  # the unit without a partner goes to the middle
        following[:, half:] = np.roll(current[:, half:], current.shape[1] % 2, axis=1)
    workers = len(current)
    position = np.full(workers, current.shape[1] if visited else 0, np.int32)
    if jax.tree.structure(state.rule) != jax.tree.structure(fresh.rule):
        raise ValueError(
            "state and fresh are of orders with different sign rules: pass states of one order, "
            "with the same rule."
        )
    rule = jax.tree.map(lambda x, new: _kept(x, workers, new), state.rule, fresh.rule)
    fresh = fresh._replace(
        current=current,
        next=following,
        position=position,
        epoch=_kept(state.epoch, workers),
        rule=rule,
    )
    if isinstance(fresh, GatheredState):
        fresh = fresh._replace(left=position // 2)
    if isinstance(fresh, GrabState):
        fresh = fresh._replace(mean=jax.tree.map(lambda x: _shared(x, workers), state.mean))
    return fresh


@begun.register
def _(fresh: GreedyHerdingState, state, current, visited):
    position, epoch = np.full(len(current), visited, np.int32), _kept(state.epoch, len(current))
    return fresh._replace(current=current, next=current.copy(), position=position, epoch=epoch)


@begun.register
def _(fresh: GlobalState, state, current, visited):
    everywhere = lambda x: np.broadcast_to(x, (len(current), *np.shape(x))).copy()  # noqa: E731
    paired = current.shape[1] // 2 * 2
    front, back = current[:, :paired:2], current[:, 1:paired:2]
    # Every pair is assigned as if its sign were +, so that input can be read ahead.
    following = np.concatenate([front, current[:, paired:], back[:, ::-1]], axis=1)
    return fresh._replace(
        pairs=begun(fresh.pairs, state.pairs, current, visited)._replace(next=following),
        everyone=everywhere(current),
        waiting=jax.tree.map(lambda x: everywhere(x[0]), state.waiting),
    )
