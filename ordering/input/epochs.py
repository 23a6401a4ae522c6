"""The epoch's boundary without a gap: the next epoch is read before this one has ended."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ordering import base
from ordering.base import State

Read = Callable[[np.ndarray, int], Iterable]


class NextEpoch(NamedTuple):
    """The first steps of the next epoch, read while this one runs: see `prefetch_next_epoch`."""

    orders: np.ndarray  # int[.., m]
    num_steps: int
    batches: Iterable


def prefetch_next_epoch(read: Read, state: State, *, units_per_step: int) -> NextEpoch:
    """Starts to read the next epoch before this one ends: the steps that are already decided.

    These are min(left) // B steps, over the workers, or all where left = M. Pair balancing has
    decided half of the next epoch when this one ends. Call it once, late in the epoch.

    It fetches `left` and these orders, and waits for the device to have them: pass the state of
    an earlier step, so that the host does not wait. Where steps donate their state, pass a copy.

    Args:
      read: `(orders, first_step) -> batches`, which starts reading at the call: the slice
        orders, int[.., m], of the new epoch starts at `first_step`.
      state: of any ordering, for one worker or with a leading worker axis.
      units_per_step: B in [1, M], units per worker and step.

    Returns:
      A `NextEpoch` for `read_epoch`.

    Raises:
      ValueError: if units_per_step is out of range.

    Example:
      >>> import jax, ordering
      >>> order = ordering.random_reshuffling(6)
      >>> state = order.init(jax.random.key(0), params=None)
      >>> read = lambda orders, first_step: iter(orders.reshape(-1, 2))
      >>> front = ordering.input.prefetch_next_epoch(read, state, units_per_step=2)
      >>> len(list(ordering.input.read_epoch(read, order.next_epoch(state), front)))
      3
    """
    num_units = state.next.shape[-1]
    base.check_units_per_step(num_units, units_per_step)
    left = int(np.min(jax.device_get(state.left)))
    known = num_units if left >= num_units else left - left % units_per_step
    orders = np.asarray(state.next[..., :known])
    return NextEpoch(orders, -(-known // units_per_step), read(orders, 0) if known else ())


def read_epoch(read: Read, state: State, front: NextEpoch | None = None) -> Iterator:
    """One iterator over the epoch that `state` begins: the front's batches, then all others.

    With a front the host does not wait: the order is fetched, checked against the front, and the
    rest opened when half of the front is used up, while the device has work.

    Args:
      read: as in `prefetch_next_epoch`. (To resume within an epoch, call `read` from that step on.)
      state: after `init` or `next_epoch`; it may be donated afterwards.
      front: what `prefetch_next_epoch` gave during the epoch before, if anything; used up.

    Returns:
      An iterator of what `read` gives.

    Raises:
      ValueError: from `next`, if the front is not that of `state.current`.

    Example: see `prefetch_next_epoch`.
    """
    if front is None:
        return iter(read(np.asarray(state.current), 0))
    current = jnp.copy(state.current)
    current.copy_to_host_async()

    def run():
        opened = iter(front.batches)
        yield from itertools.islice(opened, front.num_steps // 2)
        known, orders = front.orders.shape[-1], np.asarray(current)
        if not np.array_equal(front.orders, orders[..., :known]):
            raise ValueError(
                f"the front of {known} units is not the front of this epoch's order: open it "
                "from a state of the epoch just before, or pass None."
            )
        rest = orders[..., known:]
        following = read(rest, front.num_steps) if rest.size else ()
        yield from itertools.chain(opened, following)

    return run()
