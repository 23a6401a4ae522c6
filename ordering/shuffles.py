"""Orders that use no gradients: random reshuffling, its variants, and a control for balancing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from ordering import base, trees
from ordering.base import Ordering
from syncopate import plans


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
    draw = lambda key, epoch, _: _permutation(key, epoch, num_units)  # noqa: E731
    return shuffled(num_units, draw, units_per_step=units_per_step)


@base.made_once
def shuffle_once(num_units: int, *, units_per_step: int = 1) -> Ordering:
    """Shuffle once: one random permutation, used in every epoch.

    Args:
      num_units: M >= 1.
      units_per_step: B in [1, M], the units of a step.

    Returns:
      An `Ordering`; `observe` ignores the gradients.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> from syncopate import ordering
      >>> order = ordering.shuffle_once(8)

    References:
      Safran, Shamir, How Good is SGD with Random Shuffling?, 2020,
      https://arxiv.org/abs/1908.00045
    """
    # A copy, because a donated state must not hold a buffer twice.
    draw = lambda key, epoch, current: jnp.copy(current)  # noqa: E731
    return shuffled(num_units, draw, units_per_step=units_per_step)


@base.made_once
def block_reshuffling(num_units: int, *, block_size: int, units_per_step: int = 1) -> Ordering:
    """Block reshuffling: shuffles blocks of units, and reverses the order in odd epochs.

    The first order is a random one, cut into blocks of `block_size` units (the last may be
    shorter). Even epochs draw a new order of the blocks and keep the order inside each block. That
    they keep it is our reading of the paper's abstract; the full text was not available.

    Args:
      num_units: M >= 1.
      block_size: units per block, in [1, M]; 1 is FlipFlop.
      units_per_step: B in [1, M], the units of a step.

    Returns:
      An `Ordering`; `observe` ignores the gradients.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> from syncopate import ordering
      >>> order = ordering.block_reshuffling(100, block_size=10)

    References:
      Nguyen, Phan, Kalagnanam, Learning to Shuffle: Block Reshuffling and Reversal Schemes for
      Stochastic Optimization, 2026, https://arxiv.org/abs/2604.00260; FlipFlop: Rajput, Lee,
      Papailiopoulos, Permutation-Based SGD: Is Random Optimal?, 2021,
      https://arxiv.org/abs/2102.09718
    """
    num_units, _ = base.check_units(num_units)
    block_size = plans.check_whole("block_size", block_size, 1, num_units)
    num_blocks = -(-num_units // block_size)

    def draw(key, epoch, current):
        blocks, unit = _permutation(key, epoch, num_blocks), jnp.arange(num_units)
        sizes = jnp.minimum(block_size, num_units - blocks * block_size)
        start = blocks.at[blocks].set(jnp.cumsum(sizes) - sizes, unique_indices=True)
        place = start[unit // block_size] + unit % block_size
        first = base.first_order(key, num_units)
        fresh = first.at[place].set(first, unique_indices=True)
        return jnp.where(epoch % 2 == 1, current[::-1], fresh)

    return shuffled(num_units, draw, units_per_step=units_per_step)


@base.made_once
def unzip(num_units: int, *, units_per_step: int = 1) -> Ordering:
    """A control for pair balancing: odd places first, then even places backwards.

    From pi_1 .. pi_M the next order is pi_1, pi_3, ..., pi_4, pi_2: what `pair_balance` gives when
    all gradients are equal. A balanced order that does no better has gained nothing from them.

    Args:
      num_units: M >= 1. With M odd the last unit lands in the middle, as in `pair_balance`.
      units_per_step: B in [1, M], the units of a step.

    Returns:
      An `Ordering`; `observe` ignores the gradients.

    Raises:
      ValueError: if a size is out of range.

    Examples:
      >>> import jax
      >>> from syncopate import ordering
      >>> order = ordering.unzip(5)
      >>> state = order.init(jax.random.key(0), params=None)
      >>> p = state.current.tolist()
      >>> order.next_epoch(state).current.tolist() == [p[0], p[2], p[4], p[3], p[1]]
      True
    """
    draw = lambda key, epoch, p: jnp.concatenate([p[0::2], p[1::2][::-1]])  # noqa: E731
    return shuffled(num_units, draw, units_per_step=units_per_step)


def _permutation(key, epoch, size):
    return base.permutation(jax.random.fold_in(key, epoch), size)


def shuffled(
    num_units: int, draw: Callable, first: Callable | None = None, kind: type = ShuffleState,
    **fields: Any,
) -> Ordering:  # fmt: skip
    """The ordering whose next order is `draw(key, epoch, current)`, from `first(key)` if given.

    `fields` are others of the `Ordering`.
    """
    num_units, fields["units_per_step"] = base.check_units(num_units, fields["units_per_step"])

    def init(key, params):
        key = base.check_key(key)
        current = first(key) if first else base.first_order(key, num_units)
        following = draw(key, jnp.ones((), jnp.int32), current)
        left, epoch = jnp.full((), num_units, jnp.int32), jnp.zeros((), jnp.int32)
        # A copy of the key, which the caller keeps when the state is donated.
        return kind(current, following, left, epoch, jax.random.clone(key))

    def observe(state, gradients):
        if gradients is not None:
            trees.check_gradients(gradients)
        return state

    def next_epoch(state):
        epoch = state.epoch + 1
        following = draw(state.key, epoch + 1, state.next)
        return state._replace(current=state.next, next=following, epoch=epoch)

    order = Ordering(init, observe, next_epoch, **fields)
    return base.checked(order, num_units, kind, observes=False)
