"""Orders that look at no gradient: random reshuffling, its relatives, and the unzip control."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ordering import base
from ordering.base import Ordering
from syncopate import plans


class ShuffleState(NamedTuple):
    """State of an order that is known an epoch ahead, so that `left` is always M."""

    current: jax.Array  # int32[M]
    next: jax.Array  # int32[M]
    left: jax.Array  # int32[]
    epoch: jax.Array  # int32[], epochs finished
    key: jax.Array


def random_reshuffling(num_units: int) -> Ordering:
    """A fresh random permutation every epoch (RR; with one key per worker, D-RR).

    Args:
      num_units: M >= 1.

    Returns:
      An `Ordering`; `observe` ignores the rows.

    Raises:
      ValueError: if num_units is below 1.

    Example:
      >>> import jax, ordering
      >>> state = ordering.random_reshuffling(8).init(jax.random.key(0), params=None)
      >>> sorted(state.current.tolist())
      [0, 1, 2, 3, 4, 5, 6, 7]

    References:
      Mishchenko, Khaled, Richtárik, Random Reshuffling: Simple Analysis with Vast Improvements,
      2020, https://arxiv.org/abs/2006.05988
    """
    return shuffled(num_units, lambda key, epoch, _: _permutation(key, epoch, num_units))


def shuffle_once(num_units: int) -> Ordering:
    """One random permutation, used in every epoch.

    Args:
      num_units: M >= 1.

    Returns:
      An `Ordering`; `observe` ignores the rows.

    Raises:
      ValueError: if num_units is below 1.

    Example:
      >>> import ordering
      >>> order = ordering.shuffle_once(8)

    References:
      Safran, Shamir, How Good is SGD with Random Shuffling?, 2020,
      https://arxiv.org/abs/1908.00045
    """
    # A copy: a state may be donated, and then no buffer is in it twice.
    return shuffled(num_units, lambda key, epoch, current: jnp.copy(current))


def flip_flop(num_units: int) -> Ordering:
    """Epochs 0, 2, 4, ... are reshuffled, epochs 1, 3, 5, ... replay the one before in reverse.

    Args:
      num_units: M >= 1.

    Returns:
      An `Ordering`; `observe` ignores the rows.

    Raises:
      ValueError: if num_units is below 1.

    Example:
      >>> import ordering
      >>> order = ordering.flip_flop(8)

    References:
      Rajput, Lee, Papailiopoulos, Permutation-Based SGD: Is Random Optimal?, 2021,
      https://arxiv.org/abs/2102.09718
    """
    return block_reshuffling(num_units, block_size=1, paired_reversal=True)


def block_reshuffling(num_units: int, *, block_size: int, paired_reversal: bool = True) -> Ordering:
    """Blocks of neighbours in the first order are reshuffled as wholes, and replayed reversed.

    The first order is cut into blocks of `block_size` units (the last may be shorter). Even
    epochs draw a new order of the blocks; units stay in place inside their block. With
    `paired_reversal`, odd epochs replay the epoch before in reverse. Only the abstract of the
    paper could be read: that blocks keep their inner order is a reading of it.

    Args:
      num_units: M >= 1.
      block_size: units per block, in [1, M]; 1 with paired_reversal is flip-flop.
      paired_reversal: whether odd epochs are reversed replays.

    Returns:
      An `Ordering`; `observe` ignores the rows.

    Raises:
      ValueError: if a size is out of range.

    Example:
      >>> import ordering
      >>> order = ordering.block_reshuffling(100, block_size=10)

    References:
      Nguyen, Phan, Kalagnanam, Learning to Shuffle: Block Reshuffling and Reversal Schemes for
      Stochastic Optimization, 2026, https://arxiv.org/abs/2604.00260
    """
    base.check_num_units(num_units)
    if not plans.is_whole(block_size) or not 1 <= block_size <= num_units:
        raise ValueError(
            f"block_size is {block_size!r} with {num_units} units: it must lie in "
            f"[1, {num_units}], a whole number."
        )
    num_blocks = -(-num_units // block_size)

    def draw(key, epoch, current):
        place = jnp.argsort(_permutation(key, epoch, num_blocks))
        shuffled = jnp.argsort(place[jnp.arange(num_units) // block_size], stable=True)
        fresh = base.first_order(key, num_units)[shuffled]
        replay = (epoch % 2 == 1) & paired_reversal
        return jnp.where(replay, current[::-1], fresh)

    return shuffled(num_units, draw)


def unzip(num_units: int) -> Ordering:
    """Odd places first, then even places backwards: pi_1, pi_3, ..., pi_4, pi_2.

    This is what pair balancing gives when every difference is zero. A balanced order that does no
    better than this control has not used the gradients.

    Args:
      num_units: M >= 1. With M odd the last unit lands in the middle, as in `pair_balance`.

    Returns:
      An `Ordering`; `observe` ignores the rows.

    Raises:
      ValueError: if num_units is below 1.

    Example:
      >>> import jax, ordering
      >>> order = ordering.unzip(5)
      >>> state = order.init(jax.random.key(0), params=None)
      >>> p = state.current.tolist()
      >>> order.next_epoch(state).current.tolist() == [p[0], p[2], p[4], p[3], p[1]]
      True
    """
    return shuffled(
        num_units,
        lambda key, epoch, current: jnp.concatenate([current[0::2], current[1::2][::-1]]),
    )


def _permutation(key, epoch, size):
    return base.permutation(jax.random.fold_in(key, epoch), size)


def shuffled(num_units: int, draw, first=None) -> Ordering:
    """An ordering from `draw(key, epoch, order before) -> int32[M]` and `first(key)`, if given."""
    base.check_num_units(num_units)

    def init(key, params=None):
        current = first(key) if first else base.first_order(key, num_units)
        left = jnp.full((), num_units, jnp.int32)
        following = draw(key, jnp.ones((), jnp.int32), current)
        # A copy of the key: who donates the state keeps the key that it was made from.
        key = jax.random.wrap_key_data(
            jnp.copy(jax.random.key_data(key)), impl=jax.random.key_impl(key)
        )
        return ShuffleState(current, following, left, jnp.zeros((), jnp.int32), key)

    def next_epoch(state):
        epoch = state.epoch + 1
        following = draw(state.key, epoch + 1, state.next)
        return state._replace(current=state.next, next=following, epoch=epoch)

    def observe(state, rows):
        if rows is not None:
            base.check_is_rows(rows)
        return state

    return Ordering(init, observe, next_epoch)
