"""How many examples of each of S sources every step takes, so that counts follow shares.

What sources are owed is kept in whole numbers of 2^-bits examples: sums over any number of steps
are exact, and the sum over sources is always zero.
"""

import bisect
from typing import Any, cast

import numpy as np
from jaxtyping import Float, Int

BLOCK = 1024  # steps that are planned at a time
TIE = 20  # what sources are owed is compared in 2^-20 examples, far above the noise of weights
NO_END = 2**62  # examples of a source that begins again


def fixed_bits(batch_size: int, num_sources: int) -> int:
    """The bits of a fraction, such that sums in a step fit int64."""
    return 61 - (batch_size + num_sources).bit_length()


def fixed_point(values: Float[np.ndarray, "n S"], total: int, bits: int) -> Int[np.ndarray, "n S"]:
    """The values in 2^-bits; rows add up to `total` exactly, by a change of the largest value."""
    scaled = np.rint(values * 2.0**bits).astype(np.int64)
    scaled[np.arange(len(values)), values.argmax(axis=1)] += (total << bits) - scaled.sum(axis=1)
    return scaled


def plan_counts(
    shares: Float[np.ndarray, "T S"],
    batch_size: int,
    owed: Float[np.ndarray, "S"],
    left: Int[np.ndarray, "S"],
    exhausted: str,
) -> tuple[Int[np.ndarray, "t S"], Float[np.ndarray, "t S"]]:
    """(counts, the shares that they follow), for all steps, or the first ones with "end".

    Raises ValueError for a step that none of the sources may fill.
    """
    bits, step, counts = fixed_bits(batch_size, len(left)), 0, np.empty(shares.shape, np.int32)
    behind = fixed_point(owed[None], 0, bits)[0]
    while step < len(shares):
        part = shares[step : step + BLOCK]
        if exhausted == "stop" and not left.all():
            part = shares_of_open(part, behind * 2.0**-bits / batch_size, left > 0, step)
            shares = shares if shares.flags.writeable else shares.copy()
            shares[step : step + len(part)] = part
        due = fixed_point(part * batch_size, batch_size, bits)
        rows = fill_steps(due, behind, batch_size, bits)
        taken, done = np.cumsum(rows, axis=0), len(rows)
        over: Any = (taken > left).any(axis=1)
        if exhausted == "end" and over.any():
            end = step + int(over.argmax())
            counts[step:end] = rows[: end - step]
            return counts[:end], shares[:end]
        if (stops := (taken >= np.maximum(left, 1)).any(axis=1)).any() and exhausted == "stop":
            i = int(stops.argmax())
            if over[i]:
                target, limit = due[i] + (rows[i] << bits), left - taken[i] + rows[i]
                taken[i] -= rows[i]
                rows[i] = fill_step(target, batch_size, limit, part[i] > 0, bits, step + i)
                taken[i] += rows[i]
                due[i] = target - (rows[i] << bits)
            done = i + 1
        counts[step : step + done], behind = rows[:done], due[done - 1]
        left, step = left - taken[done - 1], step + done
    return counts, shares


def shares_of_open(part, behind, is_open, step):
    """The shares of sources that are left, which also get what the others are owed, in batches."""
    part = np.where(is_open, part, 0.0)
    total = part.sum(axis=1)
    filled = len(total) if total.all() else int((total == 0).argmax())
    if not filled:
        raise ValueError(_advice(step))
    part = part[:filled] / total[:filled, None]
    lost = np.where(is_open, 0.0, behind)
    part[0] += lost.sum() * part[0] - lost
    return part


def rank_terms(size: int, bits: int) -> tuple[int, int, Int[np.ndarray, "S"]]:
    """(half, mask, turn): `(target + half & mask) + turn` has no noise and no two equal values.

    Of equal targets the first gets a little more. The value >> bits is the number of examples by
    which a target exceeds 1, rounded up.
    """
    coarse = max(bits - TIE, size.bit_length())
    return 1 << coarse - 1, -(1 << coarse), np.arange(size)[::-1] - (1 << coarse)


def fill_steps(due, behind, batch_size, bits):
    """int64[n, S], the counts of some steps; `due` becomes what is owed after each of them."""
    size, rows = due.shape[1], cast(Any, np.empty(due.shape, np.int64))
    half, mask, turn = rank_terms(size, bits)
    for target, row in zip(due, rows, strict=True):
        target += behind
        values = (target + half & mask) + turn
        np.maximum(values >> bits, 0, out=row)  # all that are owed more than one come first
        rest = batch_size - int(np.add.reduce(row))
        if rest < 0:
            row[:] = highest(values, batch_size, batch_size, bits)
        elif rest:
            values -= row << bits
            row += values >= np.partition(values, size - rest)[size - rest]
        target -= row << bits
        behind = target
    return rows


def fill_step(target, batch_size, limit, has_share, bits, step):
    """int64[S], the counts of a step with at most `limit` examples of each source."""
    half, mask, turn = rank_terms(len(target), bits)
    values = (target + half & mask) + turn
    # A source of share zero is chosen only for what it was owed before.
    limit = np.where(has_share, limit, np.minimum(limit, np.maximum((values >> bits) + 1, 0)))
    if limit.sum() < batch_size:
        raise ValueError(_advice(step))
    return highest(values, batch_size, limit, bits)


def highest(values, batch_size, limit, bits):
    """int64[S], how many of the values x, x - 1, x - 2, ... of each source are the highest."""
    ceiling = (values >> bits) + 1
    above = lambda level: np.clip(ceiling - level, 0, limit)  # noqa: E731
    levels = range(int(ceiling.min()) - batch_size, int(ceiling.max()) + 1)
    first = bisect.bisect_left(levels, True, key=lambda level: above(level).sum() <= batch_size)
    level = levels[first]
    row = above(level)
    able = np.flatnonzero(above(level - 1) > row)
    best = able[np.argsort(-(values[able] & (1 << bits) - 1))]
    row[best[: batch_size - row.sum()]] += 1
    return row


def _advice(step: int) -> str:
    return (
        f"step {step} has no source with a weight and examples left: end before it, or pass "
        "exhausted='end' or 'repeat'."
    )
