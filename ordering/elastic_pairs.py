"""Pairs that are placed, and units that wait for a partner, dealt to another number of workers.

On the host, in NumPy: what ordering/elastic.py does for orders that balance pairs.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from ordering import base
from ordering.exchange import slice_size


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


def placed_pairs(state, change, *, placed):
    """(current, next, whose pending units wait now: int[W', 0 or 1], -1 where it is not known)."""
    before, after = len(state.current), change.workers
    common, last = math.gcd(before, after), state.current.shape[1]
    ends = state.current[:, : 2 * placed].reshape(before, placed, 2)
    back = state.next[:, last - placed :][:, ::-1]
    pairs = np.concatenate([ends, state.next[:, :placed, None], back[:, :, None]], axis=2)
    alone = state.current[:, 2 * placed : change.visited]
    alone = np.stack([alone, np.broadcast_to(np.arange(before)[:, None], alone.shape)], axis=2)
    groups = [
        _regrouped(*parts, after // common, visited_of(state, change) // 2)
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


def visited_of(state, change) -> int:
    """Units of this epoch that every one of the W' workers has visited."""
    return change.visited * len(state.current) // change.workers


def counted_of(state) -> int:
    """Units that every one of the W workers has observed."""
    return min(int(state.position[0]), state.current.shape[1])


def position_of(state, change):
    """Where no pair is split over two steps, units without a partner are not counted."""
    visited = visited_of(state, change)
    counted = visited if change.units_per_step[1] % 2 else visited // 2 * 2
    return np.full(change.workers, counted, np.int32)


def pending_of(state, change, source):
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
        rows = np.stack([joined(state.pending[:, w], change) for w in range(len(state.current))])
    return sliced(placed(np.zeros((change.workers, change.entries), np.float32), rows), change)


def joined(slices, change):
    """[D] of the slices [W, slice] of all devices."""
    return slices.reshape(-1)[: change.entries]


def sliced(rows, change):
    """[W', n, slice] of n rows [n, D]: every device holds its slice of all."""
    size = slice_size(change.entries, change.workers)
    rows = np.pad(rows, ((0, 0), (0, size * change.workers - change.entries)))
    return rows.reshape(len(rows), change.workers, size).swapaxes(0, 1).copy()
