"""Orders over the units of all workers, which every epoch assigns to the workers anew."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ordering import base, trees
from ordering.base import Ordering
from ordering.pairs import Pairs, fill_middle, signs_of
from ordering.shuffles import Shuffled, ShuffleState, permutation
from syncopate import mesh, plans
from syncopate.workers import AXIS, shared_key


class GlobalState(NamedTuple):
    """State of one worker; `everyone` and `waiting` are equal on all workers."""

    pairs: PyTree  # state of the pair order, whose units are numbers in [0, total)
    everyone: Int[Array, "W M"]  # the current orders of all workers
    waiting: PyTree  # int32[total - W M], the units that this epoch leaves out; () if none

    @property
    def current(self) -> Int[Array, "M"]:
        return self.pairs.current

    @property
    def next(self) -> Int[Array, "M"]:
        return _swapped(self.pairs.next, self)

    @property
    def left(self) -> Int[Array, ""]:
        return self.pairs.left

    @property
    def epoch(self) -> Int[Array, ""]:
        return self.pairs.epoch

    @property
    def position(self) -> Int[Array, ""]:
        return self.pairs.position


class GlobalShuffleState(ShuffleState):
    """State of one worker of `global_reshuffling`, whose units are numbers in [0, total)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalOrder(Ordering):
    """What `global_order` returns."""

    order: Ordering
    total: int | None = None
    axis_name: str = AXIS

    observes = True
    is_global = True

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.order, Pairs):
            raise ValueError(
                f"order is {self.order!r:.200}: pass one that signs pairs, cd_grab(num_units) or "
                "pair_balance(num_units)."
            )
        if self.order.num_units != self.num_units:
            raise ValueError(
                f"num_units is {self.num_units} and the order has {self.order.num_units} units: "
                "make both for the same number."
            )
        self._set(order=dataclasses.replace(self.order, units_per_step=self.units_per_step))

    def init(self, key, params=None):
        first = jax.random.fold_in(shared_key(key, self.axis_name), 0)
        everyone = _shuffled(first, self.num_units, self.axis_name)
        all_units = _all_units(self.num_units, self.total, self.axis_name)
        if all_units > 2 * everyone.size:
            raise ValueError(
                f"total is {self.total}: at most as many units can wait as are visited, "
                f"{everyone.size}. Raise num_units."
            )
        waiting = jnp.arange(everyone.size, all_units, dtype=jnp.int32)
        pairs = self.order.init(key, params)
        everyone = mesh.varying(everyone, key)  # typed as what the end of an epoch gathers
        waiting = mesh.varying(waiting, key) if waiting.size else ()
        pairs = base.with_order(pairs, everyone[jax.lax.axis_index(self.axis_name)])
        return GlobalState(pairs, everyone, waiting)

    def observe(self, state, gradients):
        state = base.check_state(self, state, GlobalState)
        return state._replace(pairs=self.order.observe(state.pairs, gradients))

    def sync(self, state):
        state = base.check_state(self, state, GlobalState)
        return state._replace(pairs=self.order.sync(state.pairs))

    def next_epoch(self, state):
        state = base.check_state(self, state, GlobalState)
        self._check_workers(state)
        before, after = state.pairs, self.order.next_epoch(state.pairs)
        count = self.num_units // 2
        plus = signs_of(before, after.current)
        bits = jax.lax.all_gather(jnp.packbits(plus), self.axis_name)
        signs = jax.vmap(lambda bits: jnp.unpackbits(bits, count=count) > 0)(bits)
        placed = jnp.minimum(before.position, self.num_units) // 2
        everyone = assigned(jax.vmap(_placed, (0, 0, None))(state.everyone, signs, placed))
        everyone = jax.vmap(_swapped, (0, None))(everyone, state)
        pairs = base.with_order(after, everyone[jax.lax.axis_index(self.axis_name)])
        return GlobalState(pairs, everyone, _following(state))

    def _check_workers(self, state):
        """Raises ValueError outside of the axis, and for the state of other workers or units."""
        given = len(state.everyone), state.everyone.size + trees.tree_size(state.waiting)
        here = (
            mesh.axis_size(self.axis_name),
            _all_units(self.num_units, self.total, self.axis_name),
        )
        if given != here:
            raise ValueError(
                f"next_epoch got a state in which {given[0]} workers share {given[1]} units; here "
                f"{here[0]} share {here[1]}. Pass a state of this order, or from ordering.resize."
            )

    def resize(self, state, fresh, current, visited):
        workers, paired = len(current), current.shape[1] // 2 * 2
        everywhere = lambda x: np.broadcast_to(x, (workers, *np.shape(x))).copy()  # noqa: E731
        front, back = current[:, :paired:2], current[:, 1:paired:2]
        # Every pair is assigned as if its sign were +, so that input can be read ahead.
        following = np.concatenate([front, current[:, paired:], back[:, ::-1]], axis=1)
        pairs = self.order.resize(state.pairs, fresh.pairs, current, visited)
        return fresh._replace(
            pairs=pairs._replace(next=following),
            everyone=everywhere(current),
            waiting=jax.tree.map(lambda x: everywhere(np.asarray(x)[0]), state.waiting),
        )


def global_order(
    order: Ordering,
    num_units: int,
    *,
    total: int | None = None,
    axis_name: str = AXIS,
) -> Ordering:
    """A balanced order over the units of all workers, assigned to them anew in every epoch.

    All pairs are placed in one common order, from both ends, in the sequence in which they were
    signed: the k-th pair (a, b) of worker w takes the places p = k W + w and W M - 1 - p, with a at
    the front if its sign is +. Worker q mod W gets the unit in place q, as its unit q // W.

    If workers average gradients in every step, each step visits the next W B units of the common
    order, as with fixed shards. With local steps, all workers draw from the same distribution,
    which removes the error that fixed shards cause.

    If there are more than W M units, each epoch leaves out other ones: first the last units, then
    the first ones, and so on.

    Every worker keeps the orders of all workers, 4 bytes per unit. At the end of an epoch the
    workers only exchange their signs, one bit per pair. All workers must be able to read all data.

    Args:
      order: `cd_grab` or `pair_balance` for `num_units`; with `pair_balance` each worker balances
        its own pairs.
      num_units: M >= 1, units per worker and epoch.
      total: number of units of the data, from W M to 2 W M; W M by default.
      axis_name: as in `cd_grab`.

    Returns:
      An `Ordering` with `GlobalState`, whose `current` holds units in [0, total). The first is
      a random order of the first W M units, from worker 0's key.

    Raises:
      ValueError: at construction for another num_units than the order's, or an order that does not
        sign pairs. From `init`, outside of the axis, or if total is out of range.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import ordering
      >>> order = ordering.global_order(ordering.cd_grab(4, units_per_step=2), 4)
      >>> keys = jax.random.split(jax.random.key(0), 8)  # 8 workers on one device
      >>> state = jax.vmap(lambda key: order.init(key, jnp.zeros(3)), axis_name="worker")(keys)
      >>> sorted(state.current.ravel().tolist()) == list(range(32))
      True

    References:
      Cooper et al., Coordinating Distributed Example Orders for Provably Accelerated Training,
      2023, https://arxiv.org/abs/2302.00845, where units stay with their workers.
    """
    base.check_order(order)
    return GlobalOrder(
        order=order,
        num_units=num_units,
        units_per_step=order.units_per_step,
        total=total,
        axis_name=axis_name,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GlobalReshuffling(Shuffled):
    """What `global_reshuffling` returns."""

    total: int | None = None
    axis_name: str = AXIS

    is_global = True
    kind = GlobalShuffleState

    def draw(self, key, epoch, current):
        shared = shared_key(jax.random.fold_in(key, epoch), self.axis_name)
        everyone = _shuffled(shared, self.num_units, self.axis_name, self.total)
        return everyone[jax.lax.axis_index(self.axis_name)]

    def first(self, key):
        return self.draw(key, 0, None)


def global_reshuffling(
    num_units: int,
    *,
    units_per_step: int = 1,
    total: int | None = None,
    axis_name: str = AXIS,
) -> Ordering:
    """Random reshuffling over the units of all workers, assigned to them anew in every epoch.

    Args:
      num_units: M >= 1, units per worker and epoch.
      units_per_step: B in [1, M], the units of a worker's step.
      total: number of units of the data, at least W M, which is the default; each epoch leaves out
        random ones.
      axis_name: as in `cd_grab`.

    Returns:
      An `Ordering` whose `current` holds units in [0, total); `observe` ignores the gradients. All
      workers draw the same permutation, from worker 0's key, which is sent once per epoch.

    Raises:
      ValueError: if num_units is below 1; from `init`, outside of the axis or if total is below
        W M.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> order = ordering.global_reshuffling(4)
      >>> keys = jax.random.split(jax.random.key(0), 2)
      >>> state = jax.vmap(lambda key: order.init(key, None), axis_name="worker")(keys)
      >>> sorted(jax.vmap(order.next_epoch, axis_name="worker")(state).current.ravel().tolist())
      [0, 1, 2, 3, 4, 5, 6, 7]

    References:
      Mishchenko, Khaled, Richtárik, Random Reshuffling: Simple Analysis with Vast Improvements,
      2020, https://arxiv.org/abs/2006.05988
    """
    return GlobalReshuffling(
        num_units=num_units, units_per_step=units_per_step, total=total, axis_name=axis_name
    )


def assigned(placed: Int[Array, "W M"]) -> Int[Array, "W M"]:
    """The units assigned to every worker, from the orders in which each worker placed its pairs.

    Place m of row w of `placed` is place m W + w of the common order in the first half of the row,
    and m W + (W - 1 - w) in the second.
    """
    half = (placed.shape[1] + 1) // 2
    return jnp.concatenate([placed[:, :half], placed[::-1, half:]], axis=1)


def _following(state: GlobalState) -> PyTree:
    """The units that the next epoch leaves out: those after the ones that wait now, cyclically."""
    if isinstance(state.waiting, tuple):
        return state.waiting
    count = state.waiting.shape[-1]
    visited = math.prod(state.everyone.shape[-2:])
    # The total is visited + count, which int32 holds; the sum of a unit and count may overflow.
    return jnp.where(state.waiting >= visited, state.waiting - visited, state.waiting + count)


@functools.partial(jax.jit, inline=True)
def _swapped(units, state: GlobalState):
    """`units`, where units that wait now replace those that the next epoch leaves out."""
    if isinstance(state.waiting, tuple):
        return units
    count = state.waiting.shape[-1]
    total = math.prod(state.everyone.shape[-2:]) + count
    left_out = (units - _following(state)[..., :1]) % total < count
    return jnp.where(left_out, (units - count) % total, units)


def _placed(current, plus, count):
    """A worker's next order, from the signs of its first `count` pairs."""
    paired = 2 * plus.shape[0]
    first, second = current[:paired:2], current[1:paired:2]
    front, back = jnp.where(plus, first, second), jnp.where(plus, second, first)
    following = jnp.concatenate([front, current[paired:], back[::-1]])
    return fill_middle(following, current, count, 2 * count)


def _all_units(num_units, total, axis_name) -> int:
    workers = mesh.axis_size(axis_name)
    least = workers * num_units
    total = least if total is None else total
    if not plans.is_whole(total) or not least <= int(total) <= base.MOST_UNITS:
        raise ValueError(
            f"total is {total!r}, and {workers} workers with {num_units} units each take {least}: "
            f"lower num_units, or pass the number of units of the data, up to {base.MOST_UNITS}."
        )
    return int(total)


def _shuffled(key, num_units, axis_name, total=None):
    """int32[W, M], a random order of all units, from a key that is equal on all workers."""
    workers, total = mesh.axis_size(axis_name), _all_units(num_units, total, axis_name)
    drawn = permutation(key, total)[: workers * num_units]
    return drawn.reshape(workers, num_units)
