"""Wires: the formats in which changes are sent at a sync, and the feedback of what they round off.

A wire encodes r rows of numbers as q rows of a message. Rows are 128 numbers, the lanes of a TPU,
where a gather of other slices becomes an all-reduce.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from syncopate.plans import check_number, is_whole

LANES = 128


class Wire(NamedTuple):
    """A format in which workers send the changes of their parameters.

    Attributes:
      rule: a description.
      encode: `float32[r, 128] -> unsigned[q, 128]`.
      decode: `(unsigned[q, 128], r) -> float32[r, 128]`.
      dtype: of a message.
      multiple: r is a multiple of it.
      message_rows: `r -> q`.
      feedback: in [0, 1], the share of what was lost that the next sync sends again; 0 keeps no
        state.
      gathers: whether every worker's changes go to all workers, as their mean does not fit the
        format; else the mean is taken in two halves, as in a ring all-reduce.
    """

    rule: str
    encode: Callable
    decode: Callable
    dtype: Any
    multiple: int
    message_rows: Callable
    feedback: float
    gathers: bool


def float_wire(dtype: DTypeLike, *, feedback: float = 0.0) -> Wire:
    """Changes rounded to 16 bits: Q(x) = the nearest number of the format."""
    if not any((jnp.dtype(kind) == dtype) is True for kind in (jnp.bfloat16, jnp.float16)):
        raise ValueError(
            f"dtype is {dtype!r}: it must be bfloat16 or float16. For fewer bits take integer_wire."
        )
    dtype = jnp.dtype(dtype)
    check_number("feedback", feedback, "[0, 1]")

    def encode(rows):  # as whole numbers, so that no backend widens them
        return lax.bitcast_convert_type(rows.astype(dtype), jnp.uint16)

    def decode(message, r):
        del r
        return lax.bitcast_convert_type(message, dtype).astype(jnp.float32)

    rule = f"{dtype}, feedback {feedback:g}"
    return Wire(rule, encode, decode, jnp.uint16, 1, lambda r: r, float(feedback), False)


def integer_wire(bits: int, *, feedback: float = 1.0) -> Wire:
    """Changes as whole numbers of 8 or 4 bits, a scale per 128 of them, and error feedback.

    Q(x) = s round(x / s), s = max |x| / (2^(bits-1) - 1) over a row, rounded to bfloat16. Rounding
    is to the nearest and deterministic; feedback corrects its bias.

    References:
      Thérien et al., MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo, 2025,
      https://arxiv.org/abs/2505.23725
      Karimireddy, Rebjock, Stich, Jaggi, Error Feedback Fixes SignSGD and other Gradient
      Compression Schemes, 2019, https://arxiv.org/abs/1901.09847
    """
    if not is_whole(bits) or bits not in PACK:
        raise ValueError(f"bits is {bits!r}: it must be one of {sorted(PACK)}.")
    check_number("feedback", feedback, "[0, 1]")
    per_byte, most = 8 // bits, 2 ** (bits - 1) - 1

    def encode(rows):
        top = jnp.max(jnp.abs(rows), axis=1)
        # Not every backend's maximum keeps NaN, which training must not hide.
        top = jnp.where(jnp.all(jnp.isfinite(rows), axis=1), top, jnp.nan)
        # Larger, so that the largest number is not clipped if bfloat16 rounds down.
        scale = (top * (1.00390625 / most)).astype(jnp.bfloat16)
        step = scale.astype(jnp.float32)[:, None]
        codes = jnp.clip(jnp.round(rows / jnp.where(step == 0, 1, step)), -most, most)
        raw = lax.bitcast_convert_type(scale, jnp.uint16)
        bytes_of_scales = [_rows((raw >> shift).astype(jnp.uint8)) for shift in (8, 0)]
        return jnp.concatenate([PACK[bits](codes.astype(jnp.int8)), *bytes_of_scales])

    def decode(message, r):
        codes = UNPACK[bits](message[: r // per_byte])
        high, low = message[r // per_byte :].reshape(2, -1)[:, :r].astype(jnp.uint16)
        step = lax.bitcast_convert_type((high << 8) | low, jnp.bfloat16).astype(jnp.float32)
        return codes.astype(jnp.float32) * step[:, None]

    def message_rows(r):
        return r // per_byte + 2 * -(-r // LANES)

    rule = f"{bits} bits, a scale per {LANES}, feedback {feedback:g}"
    return Wire(rule, encode, decode, jnp.uint8, per_byte, message_rows, float(feedback), False)


def top_k_wire(density: float, *, block: int = 4096, feedback: float = 0.95) -> Wire:
    """The largest changes of every block, and error feedback for the others.

    Q(x) = x in bfloat16 if |x| is among the k = density b largest of its block, else 0. Workers
    send different entries, so their changes are gathered: 4 (W - 1) k bytes per block and sync.

    Args:
      density: in (0, 1], the share of the numbers that is sent; density b is a whole number. 1/128
        to 1/32 in the paper.
      block: b, a positive multiple of 128, at most 65536.
      feedback: in (0, 1], the share of what was not sent that stays for the next sync; 0.95 in the
        paper, where it replaces outer momentum.

    References:
      Sarfi, Thérien, Lidin, Belilovsky, Communication Efficient LLM Pre-training with SparseLoCo,
      2025, https://arxiv.org/abs/2508.15706
    """
    if not is_whole(block) or not 0 < block <= 2**16 or block % LANES:
        raise ValueError(f"block is {block!r}: pass a positive multiple of {LANES} <= {2**16}.")
    check_number("feedback", feedback, "(0, 1]")
    check_number("density", density, "(0, 1]")
    k = round(density * block)
    if abs(k - density * block) > 1e-6 or k < 1:
        raise ValueError(
            f"density is {density!r} of blocks of {block}: a block sends a whole number >= 1, as "
            f"with {max(k, 1)} / {block}."
        )

    def encode(rows):
        blocks = rows.reshape(-1, block)
        places = lax.top_k(jnp.abs(blocks), k)[1]
        values = jnp.take_along_axis(blocks, places, axis=1).astype(jnp.bfloat16)
        raw = lax.bitcast_convert_type(values, jnp.uint16)
        return jnp.concatenate([_rows(x.reshape(-1)) for x in (places.astype(jnp.uint16), raw)])

    def decode(message, r):
        n = r * LANES // block
        places, raw = (x.reshape(-1)[: n * k].reshape(n, k) for x in jnp.split(message, 2))
        values = lax.bitcast_convert_type(raw, jnp.bfloat16).astype(jnp.float32)
        zeros = jnp.zeros((n, block), jnp.float32)
        at = jnp.arange(n)[:, None], places.astype(jnp.int32)
        return zeros.at[at].set(values, unique_indices=True).reshape(r, LANES)

    def message_rows(r):
        return 2 * -(-r * LANES // block * k // LANES)

    rule, multiple = f"the largest {k} of {block}, feedback {feedback:g}", block // LANES
    return Wire(rule, encode, decode, jnp.uint16, multiple, message_rows, float(feedback), True)


def _rows(vector):
    """[n] as rows of 128, padded with zeros."""
    return jnp.pad(vector, (0, -len(vector) % LANES)).reshape(-1, LANES)


def _pack_halves(codes):
    """Two 4-bit numbers per byte, from the upper and the lower half of the rows."""
    high, low = jnp.split(lax.bitcast_convert_type(codes, jnp.uint8), 2)
    return (high << 4) | (low & 15)


def _unpack_halves(raw):
    pairs = lax.bitcast_convert_type(raw, jnp.int8)
    return jnp.concatenate([pairs >> 4, (pairs << 4) >> 4])


PACK = {8: lambda codes: lax.bitcast_convert_type(codes, jnp.uint8), 4: _pack_halves}
UNPACK = {8: lambda raw: lax.bitcast_convert_type(raw, jnp.int8), 4: _unpack_halves}


def rows_of(wire: Wire, size: int, parts: int = 1) -> int:
    """r for `size` numbers in so many parts of whole blocks."""
    multiple = parts * wire.multiple
    return -(-max(size, 1) // (LANES * multiple)) * multiple


def check_wire(wire: Wire | None) -> None:
    """Raises ValueError for anything but a wire or None."""
    if not isinstance(wire, Wire | None):
        raise ValueError(
            f"wire is {wire!r}: pass one of local_opt.WIRES, as WIRES['int8'], or None for means "
            "in full precision."
        )


# Wires by name, with the values of their papers.
WIRES = {
    "bfloat16": float_wire(jnp.bfloat16),
    "float16": float_wire(jnp.float16),
    "int8": integer_wire(8),
    "int4": integer_wire(4),
    "top_k": top_k_wire(1 / 64),
}
