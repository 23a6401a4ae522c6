"""An order's state, from that of W workers to that of another number, in the middle of an epoch.

On the host, in NumPy: all leaves are [W, ...]. A step of all workers keeps its W B units, so that
what is left of the epoch visits in every step what it would have visited.
"""

import functools

import jax
import numpy as np

from ordering.dealing import DealtState
from ordering.elastic_pairs import (
    Change,
    counted_of,
    dealt_to,
    joined,
    pending_of,
    placed_pairs,
    position_of,
    sliced,
    visited_of,
)
from ordering.gathered import GatheredState
from ordering.grab import GrabState
from ordering.herding import GreedyHerdingState
from ordering.pair_balance import PairBalanceState
from ordering.shuffles import ShuffleState


def resize(state, change: Change, units: np.ndarray | None = None, *, axis_name: str = "worker"):
    """The same order for another number of workers: every unit stays visited or to be visited.

    Of each step's W B units, worker after worker, the w-th of the W' workers gets the next B'. Of
    pairs that are placed both units go to one worker and stay where they were placed. A shared
    running sum is kept, W sums of single workers are added where workers merge and divided where
    they split; so are sums of gradients, and their means averaged.

    Where two workers' pending units meet, they become a pair, placed as they came. Where a pair has
    to be split, both units wait for a partner, and a gradient that is not a number stands for
    theirs: the kernel places their next pairs as they come and adds nothing to the running sum,
    which holds the pair's difference already.

    Args:
      state: of W workers, leaves [W, ...], after `Ordering.sync`; change: to W'.
      units: int[W, M], what the workers' numbers name, rows increasing; None where numbers name
        units of all workers (`dealt`).
      axis_name: of the workers.

    Returns:
      (state, units) of W' workers, int32[W', M'].

    Raises:
      ValueError: for a state that is of no order of this package in the middle of an epoch.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np, ordering
      >>> from ordering.elastic import Change, resize
      >>> def started(order, workers):
      ...     keys = jax.random.split(jax.random.key(0), workers)
      ...     return jax.vmap(lambda key: order.init(key, jnp.zeros(3)), axis_name="worker")(keys)
      >>> four, two = (ordering.cd_grab(m, units_per_step=m // 4) for m in (8, 16))
      >>> change = Change(2, (2, 4), 0, two, started(two, 2), coordinated=True, entries=3)
      >>> state, units = resize(started(four, 4), change, np.arange(32).reshape(4, 8))
      >>> state.current.shape, units[1, 0].item()
      ((2, 16), 16)
    """
    state = jax.tree.map(_on_host, state)
    if units is None:
        new, owned = resized(state, change), None
    else:
        new = resized(_renumbered(state, lambda x: np.take_along_axis(units, x, axis=1)), change)
        owned = np.sort(new.current, axis=1).astype(np.int32)
        new = _renumbered(new, functools.partial(_places, owned))
    if isinstance(new, ShuffleState):  # drawn ahead, from numbers of their own
        new = jax.vmap(change.order.next_epoch, axis_name=axis_name)(new)
    return new, owned


@functools.singledispatch
def resized(state, change: Change):
    """`resize`, where all numbers name units of all workers; a row for every type of state.

    A type that has none begins anew from the current order, which it can between two epochs.
    """
    if change.visited:
        raise ValueError(
            f"{type(state).__name__} has no row in ordering.elastic, so that its order cannot go "
            "on with other workers in the middle of an epoch: save at the end of one "
            "(--checkpoint_every=N with N loads of an epoch), or register one with `resized`."
        )
    current = dealt_to(state.current, change)
    return change.fresh._replace(current=current, next=current.copy())


@resized.register
def _(state: ShuffleState, change):
    """The rest of this epoch; `next_epoch`, which is still to be called, draws the next one."""
    current = dealt_to(state.current, change)
    epoch = np.full(change.workers, state.epoch[0] - 1, np.int32)
    return change.fresh._replace(current=current, next=current.copy(), epoch=epoch)


@resized.register
def _(state: PairBalanceState, change):
    current, following, source = placed_pairs(state, change, placed=counted_of(state) // 2)
    if change.coordinated:
        total = sliced(joined(state.running_sum, change)[None], change)[:, 0]
    else:
        total = jax.tree.map(functools.partial(_added, change=change), state.running_sum)
    return PairBalanceState(
        current, following, position_of(state, change), total, pending_of(state, change, source),
        _rule(state, change),
    )  # fmt: skip


@resized.register
def _(state: GatheredState, change):
    observed = counted_of(state) // 2
    if state.signed[0] < observed:
        raise ValueError(
            f"{observed - state.signed[0]} pairs of every worker wait for their signs: call "
            "Ordering.sync first."
        )
    current, following, source = placed_pairs(state, change, placed=int(state.signed[0]))
    position, (like, *_) = position_of(state, change), jax.tree.leaves(state.running_sum)
    return GatheredState(
        current=current,
        next=following,
        position=position,
        signed=position // 2,
        running_sum=np.repeat(like[:1], change.workers, axis=0),
        pending=pending_of(state, change._replace(coordinated=False), source),
        waiting=jax.tree.map(_on_host, change.fresh.waiting),
        rule=_rule(state, change),
    )


@resized.register
def _(state: GrabState, change):
    sides = np.zeros(state.current.shape, bool)  # in front of the next order
    for side, row, following, left in zip(
        sides, state.current, state.next, state.left, strict=True
    ):
        side[: change.visited] = np.isin(row[: change.visited], following[:left])
    current, sides = dealt_to(state.current, change), dealt_to(sides, change)
    visited, following = visited_of(state, change), current.copy()
    for row, new, side in zip(current, following, sides[:, :visited], strict=True):
        front, back = row[:visited][side], row[:visited][~side]
        new[: len(front)], new[len(row) - len(back) :] = front, back[::-1]
    added = functools.partial(_added, change=change)
    averaged = len(state.current) / change.workers  # of as many more units each
    return GrabState(
        current,
        following,
        position=np.full(change.workers, visited, np.int32),
        left=sides[:, :visited].sum(axis=1, dtype=np.int32),
        running_sum=jax.tree.map(added, state.running_sum),
        mean=jax.tree.map(lambda x: (added(x) / averaged).astype(x.dtype), state.mean),
        gathered=jax.tree.map(added, state.gathered),
        rule=_rule(state, change),
    )


@resized.register
def _(state: GreedyHerdingState, change):
    current = dealt_to(state.current, change)
    before, after = (np.sort(rows, axis=1).reshape(-1) for rows in (state.current, current))
    known = np.argsort(before)  # a worker's rows stand in the order of its units
    rows = known[np.searchsorted(before[known], after)]
    size = state.gradients.shape[-1]
    return GreedyHerdingState(
        current,
        current.copy(),
        position=np.full(change.workers, visited_of(state, change), np.int32),
        left=np.zeros(change.workers, np.int32),
        gradients=state.gradients.reshape(-1, size)[rows].reshape(change.workers, -1, size),
    )


@resized.register
def _(state: DealtState, change):
    pairs = resized(state.pairs, change._replace(fresh=change.fresh.pairs))
    everyone = np.broadcast_to(pairs.current, (change.workers, *pairs.current.shape)).copy()
    return type(state)(pairs, everyone)


def _added(sums, change):
    """[W', ...]: the sums of those who merge into one, a part of the sum of one who is split."""
    before, after = len(sums), change.workers
    ends = [np.arange(n + 1) / n for n in (after, before)]
    common = np.minimum.outer(ends[0][1:], ends[1][1:]) - np.maximum.outer(*(e[:-1] for e in ends))
    shares = np.maximum(np.round(common * after * before), 0) / after  # of each of the W
    return np.tensordot(shares, np.asarray(sums, np.float64), axes=1).astype(sums.dtype)


def _rule(state, change):
    """Shared coins stay; a worker's own begin anew from its key, its counts are a forerunner's."""
    from_whom = np.arange(change.workers) * len(state.current) // change.workers

    def taken(old, new):
        own = _is_key(old) and not change.coordinated
        return new if own else old[from_whom]

    return jax.tree.map(taken, state.rule, change.fresh.rule)


def _renumbered(state, name):
    fields = {"current", "next"} & {*state._fields}  # of an order of the host one alone
    return state._replace(**{field: name(getattr(state, field)) for field in fields})


def _places(owned, numbers):
    found = [np.searchsorted(row, of) for row, of in zip(owned, numbers, strict=True)]
    return np.stack(found).astype(np.int32)


def _on_host(leaf):
    return leaf if _is_key(leaf) else np.asarray(leaf)


def _is_key(leaf) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
