"""An order's state, from that of W workers to that of another number, in the middle of an epoch.

On the host, in NumPy: leaves are [W, ...]. What is left of the epoch is visited in the current
order. What the order has observed of it is forgotten: it makes its next order from the next epoch.
"""

import functools

import jax
import numpy as np

from ordering.base import Ordering
from ordering.dealing import DealtState
from ordering.gathered import GatheredState
from ordering.grab import GrabState
from ordering.herding import GreedyHerdingState
from ordering.pair_balance import PairBalanceState
from ordering.shuffles import ShuffleState


def resize(
    state, fresh, order: Ordering, units: np.ndarray | None = None, *,
    units_per_step: int, visited: int, axis_name: str = "worker",
):  # fmt: skip
    """The same order for another number of workers: every unit stays visited or to be visited.

    A step of all workers keeps its W B units: of these, worker after worker, the w-th of the W'
    workers gets the next B' = W B / W'. Orders that look at no gradient are drawn on, for as many
    workers. Those that do visit the current order once more in the next epoch, observe it, and go
    on from there as they began; pairs of dealt units are dealt as they stand, and greedy herding
    observes what is left of this epoch already.

    Args:
      state: leaves [W, ...]; fresh: a first state of `order`, of W' workers with M' = W M / W'
        units each, whose keys and shapes are taken.
      units: int[W, M], what the workers' numbers name, rows increasing; None where numbers name
        units of all workers (`dealt`).
      units_per_step: B, of the W workers.
      visited: units of this epoch that every one of the W' workers has visited; 0 between two.

    Returns:
      (state, units) of W' workers, int32[W', M']. ValueError in the middle of an epoch for a state
      that is of no order of this package.
    """
    current, owned = np.asarray(state.current), None
    if units is not None:
        current = np.take_along_axis(units, current, axis=1)
    current = dealt_to(current, len(fresh.current), units_per_step)
    if units is not None:
        owned = np.sort(current, axis=1).astype(np.int32)
        current = np.stack([np.searchsorted(*rows) for rows in zip(owned, current, strict=True)])
    new = begun(fresh, state, current.astype(np.int32), visited)
    if isinstance(new, ShuffleState):  # drawn ahead
        new = jax.vmap(order.next_epoch, axis_name=axis_name)(new)
    return new, owned


def dealt_to(rows: np.ndarray, workers: int, units_per_step: int) -> np.ndarray:
    """[W', M'] of [W, M], along the workers' orders: every step keeps its units."""
    whole = rows.shape[1] // units_per_step * units_per_step

    def cut(x, steps):
        x = x.reshape(len(x), steps, -1).swapaxes(0, 1)
        return x.reshape(steps, workers, -1).swapaxes(0, 1).reshape(workers, -1)

    parts = cut(rows[:, :whole], whole // units_per_step), cut(rows[:, whole:], 1)
    return np.concatenate(parts, axis=1)


@functools.singledispatch
def begun(fresh, state, current: np.ndarray, visited: int):
    """A first state that visits int32[W', M'] of this epoch; a row for every type of state.

    In the middle of an epoch most count all of its units as observed: what is left is then surplus.
    """
    if visited:
        raise ValueError(
            f"{type(state).__name__} has no row in ordering.resize, so that its order cannot go "
            "on with other workers in the middle of an epoch: save at the end of one "
            "(--checkpoint_every=N with N loads of an epoch), or register one with `begun`."
        )
    return fresh._replace(current=current, next=current.copy())


@begun.register
def _(fresh: ShuffleState, state, current, visited):
    """`next_epoch`, which is still to be called, makes these orders current and draws the next."""
    epoch = np.full(len(current), state.epoch[0] - 1, np.int32)
    return fresh._replace(current=current, next=current.copy(), epoch=epoch)


@begun.register(PairBalanceState)
@begun.register(GatheredState)
@begun.register(GrabState)
def _(fresh, state, current, visited):
    following, half = current.copy(), current.shape[1] // 2
    if not isinstance(fresh, GrabState):  # an odd unit, which pairs leave over, is in the middle
        following[:, half:] = np.roll(current[:, half:], current.shape[1] % 2, axis=1)
    position = np.full(len(current), current.shape[1] if visited else 0, np.int32)
    fresh = fresh._replace(current=current, next=following, position=position)
    if isinstance(fresh, GatheredState):
        fresh = fresh._replace(signed=position // 2)
    return fresh


@begun.register
def _(fresh: GreedyHerdingState, state, current, visited):
    position = np.full(len(current), visited, np.int32)
    return fresh._replace(current=current, next=current.copy(), position=position)


@begun.register
def _(fresh: DealtState, state, current, visited):
    everywhere = lambda x: np.broadcast_to(x, (len(current), *np.shape(x))).copy()  # noqa: E731
    paired = current.shape[1] // 2 * 2
    front, back = current[:, :paired:2], current[:, 1:paired:2]
    # Every pair is dealt as if its sign were +, and read ahead so.
    following = np.concatenate([front, current[:, paired:], back[:, ::-1]], axis=1)
    return fresh._replace(
        pairs=begun(fresh.pairs, state.pairs, current, visited)._replace(next=following),
        everyone=everywhere(current),
        waiting=jax.tree.map(lambda x: everywhere(x[0]), state.waiting),
    )
