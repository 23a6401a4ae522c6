"""Random reshuffling, and the common part of all orders that use no gradients."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, UInt32

from ordering import base
from ordering.base import Ordering
from syncopate import mesh, plans
from syncopate.workers import AXIS, ONE, Workers

COUNTERS = ("position", "left", "epoch")  # fields of a first state that are int32[] at zero


class ShuffleState(NamedTuple):
    """State of one worker. The next order is always known whole, so `left` is M."""

    current: Int[Array, "M"]
    next: Int[Array, "M"]
    left: Int[Array, ""]
    epoch: Int[Array, ""]  # epochs finished
    key: Key[Array, ""]


class Shuffled(Ordering):
    """An order whose next one is `draw(key, epoch, current)`; a subclass has this one method."""

    axis_name = AXIS
    kind = ShuffleState

    def draw(self, key: Key[Array, ""], epoch: Any, current: Any) -> Int[Array, "M"]:
        """The order of this epoch, the first or a later one, after `current`."""
        raise NotImplementedError

    def first(self, key: Key[Array, ""]) -> Int[Array, "M"]:
        """The order of the first epoch."""
        return first_order(key, self.num_units)

    def init(self, key, params=None):
        key = plans.check_key(key, ONE)
        current = self.first(key)
        following = self.draw(key, jnp.ones((), jnp.int32), current)
        left, epoch = jnp.full((), self.num_units, jnp.int32), jnp.zeros((), jnp.int32)
        # A copy of the key, which the caller keeps when the state is donated.
        return self.kind(current, following, left, epoch, jax.random.clone(key))

    def observe(self, state, gradients):
        base.check_state(self, state, self.kind)
        return super().observe(state, gradients)

    def next_epoch(self, state):
        state = base.check_state(self, state, self.kind)
        epoch = state.epoch + 1
        following = self.draw(state.key, epoch + 1, state.next)
        return state._replace(current=state.next, next=following, epoch=epoch)

    def resize(self, state, fresh, current, visited):
        # `next_epoch` makes these orders the current ones, and draws the next for W' workers.
        workers = Workers(len(current), self.axis_name)
        epoch = base.kept(state.epoch, len(current)) - 1
        drawn = fresh._replace(current=current, next=current.copy(), epoch=epoch)
        return workers.map(self.next_epoch)(drawn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomReshuffling(Shuffled):
    """What `random_reshuffling` returns."""

    def draw(self, key, epoch, current):
        return self.epoch_units(key, epoch)

    def epoch_units(self, key, epoch):
        return epoch_permutation(key, epoch, self.num_units)


def random_reshuffling(num_units: int, *, units_per_step: int = 1) -> Ordering:
    """Random reshuffling (RR; D-RR over several workers): a new random permutation every epoch.

    Args:
      num_units: M >= 1.
      units_per_step: B in [1, M], the units of a step.

    Returns:
      An `Ordering`; `observe` ignores the gradients.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> state = ordering.random_reshuffling(8).init(jax.random.key(0), params=None)
      >>> sorted(state.current.tolist())
      [0, 1, 2, 3, 4, 5, 6, 7]

    References:
      Mishchenko, Khaled, Richtárik, Random Reshuffling: Simple Analysis with Vast Improvements,
      2020, https://arxiv.org/abs/2006.05988
    """
    return RandomReshuffling(num_units=num_units, units_per_step=units_per_step)


def first_order(key: Key[Array, ""], num_units: int) -> Int[Array, "M"]:
    """The random order that every ordering starts from under `key`."""
    return epoch_permutation(plans.check_key(key, ONE), 0, num_units)


def first_fields(key: Key[Array, ""], num_units: int, kind: type) -> dict[str, Array]:
    """The fields of a first state of this type: a random order, and its `COUNTERS` at zero."""
    current = first_order(key, num_units)
    # A copy, because a donated state must not hold a buffer twice.
    fields = {"current": current, "next": jnp.copy(current)}
    counters = [name for name in COUNTERS if name in kind._fields]
    return fields | {name: jnp.zeros((), jnp.int32) for name in counters}


def epoch_permutation(key, epoch, size):
    """The random permutation of this epoch."""
    return permutation(jax.random.fold_in(key, epoch), size)


def permutation(key: Key[Array, ""], size: int) -> Int[Array, "M"]:
    """`jax.random.permutation(key, size)` with a faster sort; varies over the axes of `key`.

    Random numbers are sorted, in as many rounds as make ties between them negligible.
    """
    order = jnp.arange(size, dtype=jnp.int32)
    for _ in range(math.ceil(3 * math.log(size) / math.log(2**32 - 1))):
        key, draw = jax.random.split(key)
        order = order[_argsort(jax.random.bits(draw, (size,), jnp.uint32))]
    return mesh.varying(order, key)


def _argsort(numbers: UInt32[Array, "M"]) -> Int[Array, "M"]:
    """The stable argsort; a CPU sorts single numbers several times faster than pairs."""

    def packed(numbers):  # the number in the upper 32 bits, the index in the lower ones
        with jax.enable_x64(True):
            place = jnp.arange(numbers.shape[0], dtype=jnp.uint64)
            both = jax.lax.sort((numbers.astype(jnp.uint64) << jnp.uint64(32)) | place)
            return (both & jnp.uint64(2**32 - 1)).astype(jnp.int32)

    def pairs(numbers):
        return mesh.varying(jnp.argsort(numbers).astype(jnp.int32), numbers)

    return jax.lax.platform_dependent(numbers, cpu=packed, default=pairs)
