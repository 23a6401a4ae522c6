"""Random reshuffling, and the common part of all orders that use no gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from ordering import base
from ordering.base import Ordering


class ShuffleState(NamedTuple):
    """State of one worker. The next order is always known whole, so `left` is M."""

    current: Int[Array, "M"]
    next: Int[Array, "M"]
    left: Int[Array, ""]
    epoch: Int[Array, ""]  # epochs finished
    key: Key[Array, ""]


@base.made_once
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
    num_units, units_per_step = base.check_units(num_units, units_per_step)
    draw = lambda key, epoch, _: epoch_permutation(key, epoch, num_units)  # noqa: E731
    return shuffled(num_units, draw, units_per_step=units_per_step)


def epoch_permutation(key, epoch, size):
    """The random permutation of this epoch."""
    return base.permutation(jax.random.fold_in(key, epoch), size)


def shuffled(
    num_units: int,
    draw: Callable,
    first: Callable | None = None,
    kind: type = ShuffleState,
    **fields: Any,
) -> Ordering:
    """The ordering whose next order is `draw(key, epoch, current)`, from `first(key)` if given.

    `fields` are further fields of the `Ordering`.
    """
    num_units, fields["units_per_step"] = base.check_units(num_units, fields["units_per_step"])

    def init(key, params):
        key = base.check_key(key)
        current = first(key) if first else base.first_order(key, num_units)
        following = draw(key, jnp.ones((), jnp.int32), current)
        left, epoch = jnp.full((), num_units, jnp.int32), jnp.zeros((), jnp.int32)
        # A copy of the key, which the caller keeps when the state is donated.
        return kind(current, following, left, epoch, jax.random.clone(key))

    def next_epoch(state):
        epoch = state.epoch + 1
        following = draw(state.key, epoch + 1, state.next)
        return state._replace(current=state.next, next=following, epoch=epoch)

    order = Ordering(init, base.observe_nothing, next_epoch, **fields)
    return base.checked(order, num_units, kind, observes=False)
