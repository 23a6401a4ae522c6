"""The checksum of TFRecord: CRC-32C, for many records at once.

A remainder is a number of 32 bits. That of some words is that of their first half, moved by as many
words of zeros, xor that of their second half: so n words become one in log2(n) steps.
"""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32

POLYNOMIAL = 0x82F63B78  # of Castagnoli, its lowest bit first
MASK = 0xA282EAD8  # TFRecord rotates the checksum and adds this


def masked_crc32c(records: Sequence[bytes]) -> UInt32[np.ndarray, "n"]:
    """uint32[n], the checksums that TFRecord stores behind these bytes."""
    found = np.zeros(len(records), np.uint32)
    sizes = np.array([len(record) + 4 for record in records])
    widths = 4 << np.ceil(np.log2(sizes / 4)).astype(int)
    for width in np.unique(widths).tolist():  # zeros in front change no remainder
        chosen = np.flatnonzero(widths == width)
        padded = b"".join((_first() + records[i]).rjust(width, b"\0") for i in chosen.tolist())
        found[chosen] = ~_remainders(np.frombuffer(padded, "<u4").reshape(len(chosen), -1))
    return (found >> 15 | found << 17) + np.uint32(MASK)


def _remainders(words: np.ndarray) -> np.ndarray:
    """uint32[n] from n rows of 2^k words each."""
    while words.shape[1] > 1:
        half = words.shape[1] // 2
        words = _moved(words[:, :half], half) ^ words[:, half:]
    return _moved(words, 1)[:, 0]


def _moved(remainders, words):
    low, high = _tables(words)
    halves = remainders.view("<u2")
    return low[halves[..., ::2]] ^ high[halves[..., 1::2]]


@functools.cache
def _tables(words: int) -> np.ndarray:
    """uint32[2, 2^16]: the lower and the upper half of a remainder, moved by words of zeros."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    if words == 1:
        for _ in range(32):
            bits = bits >> 1 ^ (bits & 1) * np.uint32(POLYNOMIAL)
    else:
        bits = _moved(_moved(bits, words // 2), words // 2)
    tables = np.zeros((2, 2**16), np.uint32)
    for i in range(16):
        tables[:, 1 << i : 2 << i] = tables[:, : 1 << i] ^ bits.reshape(2, 16)[:, i, None]
    return tables


@functools.cache
def _first() -> bytes:
    """The word after which the remainder is all ones, as that of a CRC-32C begins."""
    remainder = 0xFFFFFFFF
    for _ in range(32):
        bit = remainder >> 31
        remainder = (remainder ^ bit * POLYNOMIAL) << 1 | bit
    return remainder.to_bytes(4, "little")
