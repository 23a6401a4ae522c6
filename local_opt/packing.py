"""Whole numbers of a few bits in rows of bytes, and four values that stand for many.

Rows are 128 numbers, the lanes of a TPU, where a gather of other slices becomes an all-reduce.
"""

import functools

import jax.numpy as jnp
from jax import lax

LANES = 128
TOGETHER = 64  # blocks whose values share four means


def in_rows(vector):
    """[n] as rows of 128, padded with zeros."""
    return jnp.pad(vector, (0, -len(vector) % LANES)).reshape(-1, LANES)


def _widths(bits):
    """Bits of a number that go together, into bytes of such parts: 12 as 8 and 4."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def packed(codes, bits):
    """Whole numbers [m, 128] below 2^bits as uint8[packed_rows(m, bits), 128].

    A byte holds parts of numbers of the same column, from rows that are far apart: rows move as
    wholes, where an order number by number would shuffle lanes.
    """
    found, shift = [], 0
    for width in _widths(bits):
        part = (codes >> shift).astype(jnp.uint8) & (2**width - 1)
        part = jnp.pad(part, ((0, -len(part) % (8 // width)), (0, 0)))
        parts = jnp.split(part, 8 // width)
        found.append(
            functools.reduce(jnp.bitwise_or, [p << width * i for i, p in enumerate(parts)])
        )
        shift += width
    return jnp.concatenate(found)


def unpacked(message, bits, m):
    """uint16[m, 128], from the first rows of a message of `packed`."""
    total, start, shift = jnp.zeros((m, LANES), jnp.uint16), 0, 0
    for width in _widths(bits):
        rows = message[start : start + packed_rows(m, width)]
        parts = [(rows >> i) & (2**width - 1) for i in range(0, 8, width)]
        total |= jnp.concatenate(parts)[:m].astype(jnp.uint16) << shift
        start, shift = start + len(rows), shift + width
    return total


def packed_rows(m: int, bits: int) -> int:
    """Rows of bytes for m rows of numbers."""
    return sum(-(-m * width // 8) for width in _widths(bits))


def packed_halves(numbers):
    """Numbers of 16 bits, of any shape, as rows of bytes."""
    return packed(in_rows(lax.bitcast_convert_type(numbers, jnp.uint16).reshape(-1)), 16)


def unpacked_halves(message, count):
    """bfloat16[count], from the first rows of a message of `packed_halves`."""
    raw = unpacked(message, 16, -(-count // LANES)).reshape(-1)[:count]
    return lax.bitcast_convert_type(raw, jnp.bfloat16)


def in_four(values):
    """Of float32[n, k]: the codes uint8[n k], and the means bfloat16[groups, 4] of each code."""
    n, k = values.shape
    groups = -(-n // TOGETHER)
    fill = groups * TOGETHER - n  # of the last group, which may have fewer blocks
    values = jnp.pad(values, ((0, fill), (0, 0))).reshape(groups, -1)
    there = (jnp.arange(groups * TOGETHER * k) < n * k).reshape(groups, -1)
    count = jnp.sum(there, axis=1, keepdims=True, dtype=jnp.float32)
    mean = jnp.sum(values, axis=1, keepdims=True) / count
    centred = jnp.where(there, values - mean, 0)
    deviation = jnp.sqrt(jnp.sum(centred**2, 1, keepdims=True) / jnp.maximum(count - 1, 1))
    unit = jnp.where(deviation == 0, 1, 1.5 * deviation)
    codes = jnp.clip(jnp.round(centred / unit + 2), 0, 3)
    means = []
    for code in range(4):
        mine = there & (codes == code)
        total = jnp.sum(jnp.where(mine, values, 0), axis=1)
        means.append(total / jnp.maximum(jnp.sum(mine, axis=1, dtype=jnp.float32), 1))
    # No code is equal to NaN, which training must not hide.
    means = jnp.where(jnp.isfinite(mean), jnp.stack(means, axis=1), jnp.nan)
    return codes.astype(jnp.uint8).reshape(-1)[: n * k], means.astype(jnp.bfloat16)


def from_four(codes, means, n):
    """float32[n k], the mean of every value's code."""
    groups, size = len(means) // 4, len(codes)
    each = size // n * TOGETHER
    codes = jnp.pad(codes, (0, groups * each - size)).reshape(groups, each)
    means = means.reshape(groups, 4).astype(jnp.float32)
    # A choice of four, as a gather would take its numbers one by one.
    low, high = (
        jnp.where(codes % 2 == 0, means[:, i, None], means[:, i + 1, None]) for i in (0, 2)
    )
    return jnp.where(codes < 2, low, high).reshape(-1)[:size]
