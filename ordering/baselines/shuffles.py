"""Orders that use no gradients, as controls: one shuffle for all epochs, blocks, and `unzip`."""

import dataclasses

import jax.numpy as jnp

from ordering.base import Ordering
from ordering.shuffles import Shuffled, epoch_permutation, first_order
from syncopate import plans


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShuffleOnce(Shuffled):
    """What `shuffle_once` returns."""

    def draw(self, key, epoch, current):
        return jnp.copy(current)  # because a donated state must not hold a buffer twice


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
    return ShuffleOnce(num_units=num_units, units_per_step=units_per_step)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockReshuffling(Shuffled):
    """What `block_reshuffling` returns."""

    block_size: int

    def __post_init__(self):
        super().__post_init__()
        size = plans.check_whole("block_size", self.block_size, 1, self.num_units)
        self._set(block_size=size)

    def draw(self, key, epoch, current):
        size, unit = self.block_size, jnp.arange(self.num_units, dtype=jnp.int32)
        blocks = epoch_permutation(key, epoch, -(-self.num_units // size))
        sizes = jnp.minimum(size, self.num_units - blocks * size)
        start = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
        start = blocks.at[blocks].set(start, unique_indices=True)
        place = start[unit // size] + unit % size
        first = first_order(key, self.num_units)
        fresh = first.at[place].set(first, unique_indices=True)
        return jnp.where(epoch % 2 == 1, current[::-1], fresh)


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
    return BlockReshuffling(
        num_units=num_units, block_size=block_size, units_per_step=units_per_step
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unzip(Shuffled):
    """What `unzip` returns."""

    def draw(self, key, epoch, current):
        return jnp.concatenate([current[0::2], current[1::2][::-1]])


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
    return Unzip(num_units=num_units, units_per_step=units_per_step)
