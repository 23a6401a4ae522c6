"""An order's state, from that of W workers to that of another number, in the middle of an epoch.

On the host, in NumPy: all leaves are [W, ...]. A step of all workers keeps its W B units, so that
what is left of the epoch visits in every step what it would have visited.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from ordering import base
from ordering.dealing import DealtState
from ordering.exchange import slice_size
from ordering.gathered import GatheredState
from ordering.grab import GrabState
from ordering.herding import GreedyHerdingState
from ordering.pair_balance import PairBalanceState
from ordering.shuffles import ShuffleState


class Change(NamedTuple):
    """From W workers to W', in the middle of an epoch or between two.

    Fields:
      workers: W' >= 1.
      units_per_step: (B, B') with W B = W' B'.
      visited: units of this epoch that every one of the W workers has visited: those of whole steps
        or all M.
      order: of the W' workers, for M' = W M / W' units each.
      fresh: its first state, leaves [W', ...].
      coordinated: whether one running sum is of all workers.
      entries: D, of a gradient or of the sketch that stands for it.
    """

    workers: int
    units_per_step: tuple[int, int]
    visited: int
    order: base.Ordering
    fresh: Any
    coordinated: bool = False
    entries: int = 0


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
    current, following, source = _pairs(state, change, placed=_counted(state) // 2)
    if change.coordinated:
        total = _sliced(_joined(state.running_sum, change)[None], change)[:, 0]
    else:
        total = jax.tree.map(functools.partial(_added, change=change), state.running_sum)
    return PairBalanceState(
        current, following, _position(state, change), total, _pending(state, change, source),
        _rule(state, change),
    )  # fmt: skip


@resized.register
def _(state: GatheredState, change):
    observed = _counted(state) // 2
    if state.signed[0] < observed:
        raise ValueError(
            f"{observed - state.signed[0]} pairs of every worker wait for their signs: call "
            "Ordering.sync first."
        )
    current, following, source = _pairs(state, change, placed=int(state.signed[0]))
    position, (like, *_) = _position(state, change), jax.tree.leaves(state.running_sum)
    return GatheredState(
        current=current,
        next=following,
        position=position,
        signed=position // 2,
        running_sum=np.repeat(like[:1], change.workers, axis=0),
        pending=_pending(state, change._replace(coordinated=False), source),
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
    visited, following = _visited(state, change), current.copy()
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
        position=np.full(change.workers, _visited(state, change), np.int32),
        left=np.zeros(change.workers, np.int32),
        gradients=state.gradients.reshape(-1, size)[rows].reshape(change.workers, -1, size),
    )


@resized.register
def _(state: DealtState, change):
    pairs = resized(state.pairs, change._replace(fresh=change.fresh.pairs))
    everyone = np.broadcast_to(pairs.current, (change.workers, *pairs.current.shape)).copy()
    return type(state)(pairs, everyone)


def dealt_to(rows: np.ndarray, change: Change) -> np.ndarray:
    """[W', M', ...] of [W, M, ...] along the workers' orders: every step keeps its units."""
    return _cut(rows, change.workers, change.units_per_step[0])


def _cut(rows, workers, size):
    """Of the next `size` of each of W workers together, the next of each of W'; so to the end."""
    whole = rows.shape[1] // size * size
    parts = [(rows[:, :whole], whole // size), (rows[:, whole:], 1)]

    def cut(x, groups):
        rest = x.shape[2:]
        x = x.reshape(len(x), groups, -1, *rest).swapaxes(0, 1)
        x = x.reshape(groups, workers, -1, *rest).swapaxes(0, 1)
        return x.reshape(workers, -1, *rest)

    return np.concatenate([cut(x, groups) for x, groups in parts if groups], axis=1)


def _pairs(state, change, *, placed):
    """(current, next, whose pending units wait now: int[W', 0 or 1], -1 where it is not known)."""
    before, after = len(state.current), change.workers
    common, last = math.gcd(before, after), state.current.shape[1]
    ends = state.current[:, : 2 * placed].reshape(before, placed, 2)
    back = state.next[:, last - placed :][:, ::-1]
    pairs = np.concatenate([ends, state.next[:, :placed, None], back[:, :, None]], axis=2)
    alone = state.current[:, 2 * placed : change.visited]
    alone = np.stack([alone, np.broadcast_to(np.arange(before)[:, None], alone.shape)], axis=2)
    groups = [
        _regrouped(*parts, after // common, _visited(state, change) // 2)
        for parts in zip(np.split(pairs, common), np.split(alone, common), strict=True)
    ]
    pairs, alone = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    rest = dealt_to(state.current[:, change.visited :], change)
    ends = pairs[:, :, :2].reshape(after, -1)
    current = np.concatenate([ends, alone[:, :, 0], rest], axis=1).astype(np.int32)
    following, count = current.copy(), pairs.shape[1]
    following[:, :count] = pairs[:, :, 2]
    following[:, current.shape[1] - count :] = pairs[:, ::-1, 3]
    return current, following, alone[:, :, 1]


def _regrouped(pairs, alone, workers, count):
    """Placed pairs [w, n, 4] and units without a partner [w, h, 2], for `count` pairs of each."""
    whole = pairs.shape[1] // workers * workers
    dealt = _cut(pairs[:, :whole], workers, workers)
    rest, alone = pairs[:, whole:].reshape(-1, 4), alone.reshape(-1, 2)
    wanted = workers * (count - dealt.shape[1])
    split = rest[wanted:, :2].reshape(-1)
    alone = np.concatenate([alone, np.stack([split, np.full_like(split, -1)], axis=1)])
    meet = 2 * max(0, wanted - len(rest))
    met = alone[:meet, 0].reshape(-1, 2)
    rest = np.concatenate([rest[:wanted], np.concatenate([met, met], axis=1)])
    pairs = np.concatenate([dealt, rest.reshape(workers, -1, 4)], axis=1)
    return pairs, alone[meet:].reshape(workers, -1, 2)


def _visited(state, change) -> int:
    return change.visited * len(state.current) // change.workers


def _counted(state) -> int:
    return min(int(state.position[0]), state.current.shape[1])


def _position(state, change):
    """Where no pair is split over two steps, units without a partner are not counted."""
    visited = _visited(state, change)
    counted = visited if change.units_per_step[1] % 2 else visited // 2 * 2
    return np.full(change.workers, counted, np.int32)


def _pending(state, change, source):
    """The first halves of pairs of W' workers, in the place of its first state's zeros."""

    def placed(zeros, rows=None):  # of worker after worker
        if not source.size:
            return np.asarray(zeros)
        known = source[:, 0] >= 0
        if rows is None or not known.any():
            return np.full_like(zeros, np.nan)
        rows = rows[np.maximum(source[:, 0], 0)]
        return np.where(known.reshape(-1, *[1] * (rows.ndim - 1)), rows, np.nan).astype(zeros.dtype)

    known = [state.pending] if jax.tree.leaves(state.pending) else []
    if not jax.tree.leaves(change.fresh.pending):
        return change.fresh.pending
    if not change.coordinated:
        return jax.tree.map(placed, change.fresh.pending, *known)
    rows = None
    if known:
        rows = np.stack([_joined(state.pending[:, w], change) for w in range(len(state.current))])
    return _sliced(placed(np.zeros((change.workers, change.entries), np.float32), rows), change)


def _joined(slices, change):
    """[D] of the slices [W, slice] of all devices."""
    return slices.reshape(-1)[: change.entries]


def _sliced(rows, change):
    """[W', n, slice] of n rows [n, D]: every device holds its slice of all."""
    size = slice_size(change.entries, change.workers)
    rows = np.pad(rows, ((0, 0), (0, size * change.workers - change.entries)))
    return rows.reshape(len(rows), change.workers, size).swapaxes(0, 1).copy()


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
