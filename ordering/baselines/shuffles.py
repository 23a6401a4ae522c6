"""Orders that use no gradients, as controls: one shuffle for all epochs, blocks, and `unzip`."""

import jax.numpy as jnp

from ordering import base
from ordering.base import Ordering
from ordering.shuffles import epoch_permutation, shuffled
from syncopate import plans


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
      >>> order = ordering.baselines.shuffle_once(8)

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

    The first order is random, and is cut into blocks of `block_size` units (the last may be
    shorter). Even epochs draw a new order of the blocks and keep the order inside each block. The
    latter is our reading of the paper's abstract; the full text was not available.

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
      >>> order = ordering.baselines.block_reshuffling(100, block_size=10)

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
        blocks, unit = epoch_permutation(key, epoch, num_blocks), jnp.arange(num_units)
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

    From pi_1 .. pi_M the next order is pi_1, pi_3, ..., pi_4, pi_2, which `pair_balance` gives if
    all gradients are equal. A balanced order that is no better has gained nothing from gradients.

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
      >>> order = ordering.baselines.unzip(5)
      >>> state = order.init(jax.random.key(0), params=None)
      >>> p = state.current.tolist()
      >>> order.next_epoch(state).current.tolist() == [p[0], p[2], p[4], p[3], p[1]]
      True
    """
    draw = lambda key, epoch, p: jnp.concatenate([p[0::2], p[1::2][::-1]])  # noqa: E731
    return shuffled(num_units, draw, units_per_step=units_per_step)
