"""Compressors: formats in which changes are sent at a sync, and the feedback of what they lose.

Rows have 128 numbers, as many as a TPU has lanes: its compiler turns a gather of other slices into
an all-reduce.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from syncopate.plans import check_number, is_whole

LANES = 128

TOGETHER = 64  # blocks whose values share four means


class Compressor(NamedTuple):
    """A format in which workers send the changes of their parameters.

    Both directions are functions of the rows alone: a format keeps no state and draws no numbers.

    Attributes:
      rule: a description.
      encode: `float32[r, 128] -> unsigned[q, 128]`.
      decode: `(unsigned[q, 128], r) -> float32[r, 128]`.
      dtype: the type of a message.
      multiple: a number that divides r.
      message_rows: `r -> q`.
      feedback: in [0, 1], the part of the lost values that the next sync sends again; 0 keeps no
        state.
      gathers: whether every worker's changes go to all workers, because the format cannot hold
        their mean. Otherwise a reduce-scatter and an all-gather give the mean, as in a ring.
    """

    rule: str
    encode: Callable
    decode: Callable
    dtype: Any
    multiple: int
    message_rows: Callable
    feedback: float
    gathers: bool


NARROW = {"bfloat16": 0.0, "float16": 0.0, "int8": 1.0, "int4": 1.0}  # the usual feedback


def quantize(dtype: DTypeLike, *, feedback: float | None = None) -> Compressor:
    """Changes rounded to a narrow type, and error feedback.

    For bfloat16 and float16, Q(x) is the nearest number of the type. For int8 and int4 it is
    s round(x / s), where s = max |x| / (2^(bits-1) - 1) over a row of 128 numbers, rounded to
    bfloat16. Rounding is to the nearest and deterministic; feedback corrects its bias.

    Args:
      dtype: bfloat16, float16, int8 or int4, as a name or a type of `jnp`.
      feedback: in [0, 1], the part of the rounding error that is kept for the next sync. None
        stands for 1 with int8 and int4, and for 0, which keeps no state, with the others.

    Returns:
      A `Compressor`, for `local_steps`, `local_rounds` and `sync_bytes`.

    Raises:
      ValueError: for another type, or a feedback out of range.

    Examples:
      >>> import optax
      >>> from syncopate import local_opt
      >>> compressor = local_opt.quantize("int8")
      >>> rounds = local_opt.local_rounds(optax.sgd(0.1), compress=compressor)

    References:
      Thérien et al., MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo, 2025,
      https://arxiv.org/abs/2505.23725
      Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other Gradient
      Compression Schemes, 2019, https://arxiv.org/abs/1901.09847
    """
    name = next((name for name in NARROW if (jnp.dtype(name) == dtype) is True), None)
    if name is None:
        raise ValueError(f"dtype is {dtype!r}: it must be one of {', '.join(NARROW)}.")
    feedback = check_number("feedback", NARROW[name] if feedback is None else feedback, "[0, 1]")
    if name in ("int8", "int4"):
        return _whole_numbers(8 if name == "int8" else 4, feedback)
    kind = jnp.dtype(name)

    def encode(rows):  # sent as whole numbers, which no backend widens
        return lax.bitcast_convert_type(rows.astype(kind), jnp.uint16)

    def decode(message, r):
        del r
        return lax.bitcast_convert_type(message, kind).astype(jnp.float32)

    rule = f"{name}, feedback {feedback:g}"
    return Compressor(rule, encode, decode, jnp.uint16, 1, lambda r: r, feedback, False)


def _whole_numbers(bits, feedback):
    """A compressor with codes of 8 or 4 bits, and a scale per row."""
    per_byte, most = 8 // bits, 2 ** (bits - 1) - 1

    def encode(rows):
        top = jnp.max(jnp.abs(rows), axis=1)
        # Not every backend's maximum keeps NaN, which training must not hide.
        top = jnp.where(jnp.all(jnp.isfinite(rows), axis=1), top, jnp.nan)
        # Slightly larger, so that the largest number is not clipped if bfloat16 rounds down.
        scale = (top * (1.00390625 / most)).astype(jnp.bfloat16)
        step = scale.astype(jnp.float32)[:, None]
        codes = jnp.clip(jnp.round(rows / jnp.where(step == 0, 1, step)), -most, most)
        codes = (codes + 2 ** (bits - 1)).astype(jnp.uint8)
        return jnp.concatenate([packed(codes, bits), packed_halves(scale)])

    def decode(message, r):
        codes = unpacked(message, bits, r).astype(jnp.float32) - 2 ** (bits - 1)
        step = unpacked_halves(message[r // per_byte :], r).astype(jnp.float32)
        return codes * step[:, None]

    def message_rows(r):
        return r // per_byte + 2 * -(-r // LANES)

    rule = f"{bits} bits, a scale per {LANES}, feedback {feedback:g}"
    return Compressor(rule, encode, decode, jnp.uint8, per_byte, message_rows, feedback, False)


def top_k(
    density: float, *, bits: int = 16, block: int = 4096, feedback: float = 0.95
) -> Compressor:
    """The largest changes of every block, and error feedback for the others.

    Q(x) = q(x) if |x| is among the k = density b largest of its block, else 0. With 16 bits, q
    rounds to bfloat16. With 2 bits, a value has the code c(x) = clip(round((x - m) / (1.5 s) + 2),
    0, 3), and q(x) is the mean, in bfloat16, of the values with that code. m and s are the mean and
    the standard deviation of the values in 64 blocks. A place in the block takes ceil(log2 b) bits.
    The leaves are concatenated and cut into blocks.

    Workers send different entries, so their changes are gathered. A worker sends W - 1 messages of
    k (bits + ceil(log2 b)) / 8 bytes per block, and 8 bytes more per 64 blocks with 2 bits.

    Args:
      density: in (0, 1], the part of the numbers that is sent; density b is a whole number.
        SparseLoCo has 1/128 to 1/32, `outer=optax.sgd(1.0)` and rounds of 30 steps.
      bits: bits per value: 16, or 2 as in the paper.
      block: b, a positive multiple of 128, at most 65536; 4096 in the paper.
      feedback: in (0, 1], the part of the unsent values that is kept for the next sync; 0.95 in the
        paper, where it replaces outer momentum.

    Returns:
      A `Compressor`, as `quantize`.

    Raises:
      ValueError: for values out of range.

    Examples:
      >>> from syncopate import local_opt
      >>> local_opt.top_k(64 / 4096, bits=2).rule
      'the largest 64 of 4096, 2 bits, feedback 0.95'

    References:
      Sarfi, Thérien, Lidin, Belilovsky, Communication Efficient LLM Pre-training with SparseLoCo,
      2025, https://arxiv.org/abs/2508.15706; its quantiser has one table per tensor
      (https://github.com/one-covenant/templar, src/tplr/compress.py)
    """
    if not is_whole(bits) or bits not in (2, 16):
        raise ValueError(f"bits is {bits!r}: it must be 2 or 16.")
    if not is_whole(block) or not 0 < block <= 2**16 or block % LANES:
        raise ValueError(f"block is {block!r}: pass a positive multiple of {LANES} <= {2**16}.")
    block = int(block)  # an array of JAX would be traced inside a step
    feedback = check_number("feedback", feedback, "(0, 1]")
    density = check_number("density", density, "(0, 1]")
    k = round(density * block)
    if abs(k - density * block) > 1e-6 or k < 1:
        raise ValueError(
            f"density is {density!r} of blocks of {block}: a block sends a whole number >= 1, so "
            f"pass {max(k, 1)} / {block}."
        )
    of_place = (block - 1).bit_length()

    def encode(rows):
        blocks = rows.reshape(-1, block)
        places = lax.top_k(jnp.abs(blocks), k)[1]
        values = jnp.take_along_axis(blocks, places, axis=1)
        places = packed(in_rows(places.astype(jnp.uint16).reshape(-1)), of_place)
        if bits == 16:
            return jnp.concatenate([places, packed_halves(values.astype(jnp.bfloat16))])
        codes, means = in_four(values)
        return jnp.concatenate([places, packed(in_rows(codes), bits), packed_halves(means)])

    def decode(message, r):
        n = r * LANES // block
        m = -(-n * k // LANES)
        first = packed_rows(m, of_place)
        places = unpacked(message, of_place, m).reshape(-1)[: n * k].reshape(n, k)
        if bits == 16:
            values = unpacked_halves(message[first:], n * k).astype(jnp.float32)
        else:
            codes = unpacked(message[first:], bits, m).reshape(-1)[: n * k]
            means = message[first + packed_rows(m, bits) :]
            values = from_four(codes, unpacked_halves(means, 4 * -(-n // TOGETHER)), n)
        zeros = jnp.zeros((n, block), jnp.float32)
        at = jnp.arange(n)[:, None], places.astype(jnp.int32)
        return zeros.at[at].set(values.reshape(n, k), unique_indices=True).reshape(r, LANES)

    def message_rows(r):
        n = r * LANES // block
        m = -(-n * k // LANES)
        means = 2 * -(-4 * -(-n // TOGETHER) // LANES) if bits == 2 else 0
        return packed_rows(m, of_place) + packed_rows(m, bits) + means

    rule = f"the largest {k} of {block}, {bits} bits, feedback {feedback:g}"
    return Compressor(rule, encode, decode, jnp.uint8, block // LANES, message_rows, feedback, True)


def rows_of(compressor: Compressor, size: int, parts: int = 1) -> int:
    """r for `size` numbers, cut into `parts` parts of whole blocks."""
    multiple = parts * compressor.multiple
    return -(-max(size, 1) // (LANES * multiple)) * multiple


def check_compressor(compressor: Compressor | None) -> None:
    """Raises ValueError unless this is a compressor or None."""
    if not isinstance(compressor, Compressor | None):
        raise ValueError(
            f"compress is {compressor!r}: pass a compressor, such as local_opt.quantize('int8') or "
            "top_k(1 / 64), or None for means in full precision."
        )


def in_rows(vector):
    """[n] as rows of 128, padded with zeros."""
    return jnp.pad(vector, (0, -len(vector) % LANES)).reshape(-1, LANES)


def _widths(bits):
    """Cuts the bits of a number into parts that share bytes: 12 bits as 8 and 4."""
    return [8] * (bits // 8) + [width for width in (4, 2, 1) if bits & width]


def packed(codes, bits):
    """Whole numbers [m, 128] below 2^bits as uint8[packed_rows(m, bits), 128].

    A byte holds parts of numbers from one column, whose rows are far apart. So only whole rows
    move, and no number changes its lane.
    """
    rows, shift = [], 0
    for width in _widths(bits):
        part = (codes >> shift).astype(jnp.uint8) & (2**width - 1)
        part = jnp.pad(part, ((0, -len(part) % (8 // width)), (0, 0)))
        parts = jnp.split(part, 8 // width)
        rows.append(functools.reduce(jnp.bitwise_or, [p << width * i for i, p in enumerate(parts)]))
        shift += width
    return jnp.concatenate(rows)


def unpacked(message, bits, m):
    """uint16[m, 128], from the first rows of a message that `packed` made."""
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
    """bfloat16[count], from the first rows of a message that `packed_halves` made."""
    raw = unpacked(message, 16, -(-count // LANES)).reshape(-1)[:count]
    return lax.bitcast_convert_type(raw, jnp.bfloat16)


def in_four(values):
    """The codes uint8[n k] of float32[n, k], and the mean bfloat16[groups, 4] of each code."""
    n, k = values.shape
    groups = -(-n // TOGETHER)
    fill = groups * TOGETHER - n  # the last group may have fewer blocks
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
    # Selects among the four, since a gather would take its numbers one by one.
    low, high = (
        jnp.where(codes % 2 == 0, means[:, i, None], means[:, i + 1, None]) for i in (0, 2)
    )
    return jnp.where(codes < 2, low, high).reshape(-1)[:size]
