"""Windows of packed text out of files of tokens."""

import functools
import os
import struct
from collections.abc import Sequence

import numpy as np
from jax.typing import DTypeLike

from ordering.blocks.files import Part, open_parts
from ordering.blocks.formats import FORMATS, NPY, Format, Index, Ranges, Unfit, read_numbers
from syncopate import plans

LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # magic number and version: type of the tokens
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_TYPES = ["|u1", "|i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"]
SIDES = ["end", "start"]
OTHERS = (*FORMATS, ".parquet", ".gz", ".zip", ".bz2", ".xz", ".zst")


def tokens(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    length: int,
    separator: int | None = None,
    separator_at: str = "end",
    dtype: DTypeLike | None = None,
    header_bytes: int | None = None,
    whole_digest: bool = False,
) -> tuple[Part, ...]:
    """Windows of `length` tokens out of files of tokens, for `split`.

    Record i of a file is the tokens i L to i L + L: L inputs and, one place later, L targets, so
    that each token is predicted once. Documents follow each other in a file, each with a separator
    at one of its sides. Fewer than L tokens at the end of a file are left out.

    Args:
      paths: as in `files`. Files hold plain numbers, as `array.tofile` writes them. The headers of
        llm.c's files, and `.npy`, are known, and so is the type that the `.idx` beside a `.bin` of
        Megatron names.
      length: L >= 1, tokens that a window predicts.
      separator: the token between documents. With it, records tell the documents apart.
      separator_at: "end" if a document ends with it, as in nanoGPT's files and Megatron's; "start"
        if it begins with it, as in those of llm.c for FineWeb.
      dtype: the type of the tokens in the files; None for what a file says, else uint16.
      header_bytes: bytes before the first token; None for a header that is known, or none.
      whole_digest: as in `files`.

    Returns:
      One `Part` per file, whose records are dicts: "tokens", int32[L + 1]; and with a separator
      "documents", int32[L + 1], which counts the documents of the window from 0. A separator
      belongs to the document that it ends or begins. Mask attention where the documents of two
      tokens differ, and leave out targets whose document is not that of their input.

    Raises:
      ValueError: for a file that is missing or holds no window, an argument out of range, or one
        that is not what the file says; from a read, for a token that int32 does not hold.

    Examples:
      >>> import numpy as np, ordering, pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "text.bin"
      >>> np.array([5, 6, 0, 7, 8, 9, 0], np.uint16).tofile(path)
      >>> (part,) = ordering.blocks.tokens(path, length=3, separator=0)
      >>> records = part.read(0, 2)
      >>> records["tokens"].tolist(), records["documents"].tolist()
      ([[5, 6, 0, 7], [7, 8, 9, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]])

    References:
      llm.c's files, https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
      Megatron's, https://github.com/NVIDIA/Megatron-LM/tree/main/megatron/core/datasets
      Radford et al., Language Models are Unsupervised Multitask Learners, 2019, whose texts follow
      each other in this way, https://openai.com/index/better-language-models/
    """
    length = plans.check_whole("length", length, 1)
    if header_bytes is not None:
        header_bytes = plans.check_whole("header_bytes", header_bytes, 0)
    if separator is not None:
        separator = plans.check_whole("separator", separator, 0)
    if not isinstance(separator_at, str) or separator_at not in SIDES:
        raise ValueError(f"separator_at is {separator_at!r}: pass one of {', '.join(SIDES)}.")
    try:
        kind = None if dtype is None else np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind is not None and kind.kind not in "iu":
        raise ValueError(f"dtype is {dtype!r}: tokens are whole numbers, as np.uint16.")
    mark = separator, SIDES.index(separator_at)
    index = functools.partial(_index, length, mark, kind, header_bytes)
    return open_parts(paths, lambda path: Format(index, Ranges, _read), whole_digest)


def _index(length, mark, dtype, header, path):
    header, known, count = _header(path) if header is None else (header, None, None)
    if dtype is not None and known is not None and dtype != known:
        raise Unfit(f"dtype is {dtype}, and the file says {known}: leave dtype out")
    dtype = next(kind for kind in (known, dtype, np.dtype(np.uint16)) if kind is not None)
    if dtype.kind not in "iu":
        raise Unfit(f"it holds {dtype}, and tokens are whole numbers: write it anew")
    most = min(np.iinfo(dtype).max, np.iinfo(np.int32).max)
    if mark[0] is not None and mark[0] > most:
        raise Unfit(
            f"separator is {mark[0]}, and its tokens of {dtype} are at most {most}: pass the dtype "
            "of the file, or the separator that it has"
        )
    found, rest = divmod(max(0, os.path.getsize(path) - header), dtype.itemsize)
    if count is not None and found != count:
        raise ValueError(f"it has {found} tokens, and its header says {count}")
    if rest:
        raise Unfit(
            f"after header_bytes={header} it has {found} tokens of {dtype} and {rest} bytes more: "
            "pass the dtype and the header of the file"
        )
    if 0 < found <= length:
        raise Unfit(
            f"it has {found} tokens after header_bytes={header}, and a window of length "
            f"{length} takes {length + 1}: leave it out, or choose another length"
        )
    return Index(max(0, found - 1) // length, (length, mark, dtype, header))


def _header(path):
    """(bytes before the tokens, their type, their number), None for what the file does not say."""
    with open(path, "rb") as file:
        start = file.read(1024)
    if start.startswith(MEGATRON):
        raise Unfit("it is an index of Megatron: pass the .bin file beside it")
    if start.startswith(NPY):
        count, (offset, dtype, shape, _), _ = FORMATS[".npy"].index(path)
        if shape:
            raise Unfit(f"its records have the shape {shape}: read it by files")
        return offset, dtype, count
    if len(start) == 1024:
        magic, version, count = struct.unpack_from("<3i", start)
        if (magic, version) in LLM_C:
            return 1024, np.dtype(LLM_C[magic, version]), count
    if path.lower().endswith(OTHERS):
        raise Unfit("it is named as a file of another kind: read it by files, or unpack it")
    beside = os.path.splitext(path)[0] + ".idx"
    if os.path.isfile(beside):
        with open(beside, "rb") as file:
            start = file.read(18)  # the magic bytes, the version in 8, the type
        if start.startswith(MEGATRON):
            return 0, np.dtype(MEGATRON_TYPES[start[17] - 1]), None
    return 0, None, None


def _read(file, place, start, stop):
    length, (separator, side), dtype, header = place
    flat = read_numbers(file, (header, dtype, ()), start * length, stop * length + 1)
    count = (len(flat) - 1) // length
    windows = np.lib.stride_tricks.sliding_window_view(flat, length + 1)[::length][:count]
    tokens = windows.astype(np.int32)
    if dtype.itemsize >= 4 and (tokens != windows).any():
        wrong = windows[tokens != windows][0]
        raise Unfit(f"{wrong} is no token of int32: pass the dtype of the file")
    records = {"tokens": tokens}
    if separator is not None:
        marks = np.cumsum(tokens == separator, axis=1, dtype=np.int32)
        if side:  # a mark counts from its own place on
            records["documents"] = marks - marks[:, :1]
        else:
            zeros = np.zeros_like(marks[:, :1])
            records["documents"] = np.concatenate([zeros, marks[:, :-1]], axis=1)
    return records
