"""Windows of packed text out of files of tokens."""

import functools
import os
from collections.abc import Sequence

import numpy as np
from jax.typing import DTypeLike

from ordering.blocks.files import Part, expanded, open_part
from ordering.blocks.formats import Format, Ranges, read_numbers
from syncopate import plans


def tokens(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    length: int,
    separator: int | None = None,
    dtype: DTypeLike = np.uint16,
    header_bytes: int = 0,
    whole_digest: bool = False,
) -> tuple[Part, ...]:
    """Windows of `length` tokens out of files of tokens, for `split`.

    Record i of a file is the tokens i L to i L + L: L inputs and, one place later, L targets, so
    that each token is predicted once. Documents follow each other in a file, each with a separator
    at its end. Fewer than L tokens at the end of a file are left out.

    Args:
      paths: as in `files`. Files hold plain numbers, as `array.tofile` writes them.
      length: L >= 1, tokens that a window predicts.
      separator: the token that ends a document. With it, records tell the documents apart.
      dtype: the type of the tokens in the files.
      header_bytes: bytes before the first token.
      whole_digest: as in `files`.

    Returns:
      One `Part` per file, whose records are dicts: "tokens", int32[L + 1]; and with a separator
      "documents", int32[L + 1], which counts the documents of the window from 0. A separator
      belongs to the document that it ends. Mask attention where the documents of two tokens
      differ, and leave out targets whose document is not that of their input.

    Raises:
      ValueError: for a file that is missing or holds no window, or an argument out of range.

    Examples:
      >>> import numpy as np, ordering, pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "text.bin"
      >>> np.array([5, 6, 0, 7, 8, 9, 0], np.uint16).tofile(path)
      >>> (part,) = ordering.blocks.tokens(path, length=3, separator=0)
      >>> records = part.read(0, 2)
      >>> records["tokens"].tolist(), records["documents"].tolist()
      ([[5, 6, 0, 7], [7, 8, 9, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]])

    References:
      Radford et al., Language Models are Unsupervised Multitask Learners, 2019, whose texts follow
      each other in this way, https://openai.com/index/better-language-models/
    """
    length = plans.check_whole("length", length, 1)
    header_bytes = plans.check_whole("header_bytes", header_bytes, 0)
    if separator is not None:
        separator = plans.check_whole("separator", separator, 0)
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "iu":
        raise ValueError(f"dtype is {dtype!r}: tokens are whole numbers, as np.uint16.")
    index = functools.partial(_index, (length, separator, kind, header_bytes))
    form = Format(index, Ranges, _read)
    return tuple(open_part(path, form, whole_digest) for path in expanded(paths))


def _index(index, path):
    length, _, dtype, header = index
    count = max(0, os.path.getsize(path) - header) // dtype.itemsize
    if count <= length:
        raise ValueError(
            f"it has {count} tokens after header_bytes={header}, and a window of length "
            f"{length} takes {length + 1}"
        )
    return (count - 1) // length, index


def _read(file, index, start, stop):
    length, separator, dtype, header = index
    flat = read_numbers(file, (header, dtype, ()), start * length, stop * length + 1)
    count = (len(flat) - 1) // length
    windows = np.lib.stride_tricks.sliding_window_view(flat, length + 1)[::length][:count]
    records = {"tokens": windows.astype(np.int32)}
    if separator is not None:
        ends = np.cumsum(windows == separator, axis=1, dtype=np.int32)
        records["documents"] = np.concatenate([np.zeros_like(ends[:, :1]), ends[:, :-1]], axis=1)
    return records
