"""Windows of packed text, from files of tokens."""

import os
import struct
from collections.abc import Sequence

import numpy as np
from jax.typing import DTypeLike

from ordering.blocks.formats import ENDINGS, NPY, npy_header
from ordering.blocks.sources import File, Ranges, Shared, Unfit, files_of
from syncopate import plans

# The type of the tokens by the first number of llm.c's files, and by the code in Megatron's.
LLM_C = {struct.pack("<2i", 20240520, 1): "<u2", struct.pack("<2i", 20240801, 7): "<u4"}
MEGATRON, CODES = b"MMIDIDX\0\0", ["u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"]
MEGATRON_TYPES = {code: np.dtype(kind) for code, kind in enumerate(CODES, 1)}
OTHERS = (*ENDINGS, ".idx", ".gz", ".zip", ".bz2", ".xz", ".zst")
SIDES = ["end", "start"]


def tokens(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    length: int,
    separator: int | None = None,
    separator_at: str = "end",
    dtype: DTypeLike | None = None,
    header_bytes: int | None = None,
) -> tuple[File, ...]:
    """Windows of `length` tokens from files of tokens, for `split`.

    Record i of a file is the tokens i L to i L + L: L inputs and, one place later, L targets, so
    that each token is predicted once. Documents follow each other in a file, each with a separator
    at its start or its end. Fewer than L tokens at the end of a file are left out.

    Args:
      paths: as in `files`. Files hold plain numbers, as `array.tofile` writes them. The headers of
        llm.c's files and of `.npy` are understood, and so is the type in the `.idx` file beside a
        `.bin` file of Megatron.
      length: L >= 1, how many tokens a window predicts.
      separator: >= 0, the token between documents; None for none. With a separator, records show
        where documents begin.
      separator_at: "end" if it ends a document, as in nanoGPT's and Megatron's files; "start" if it
        begins one, as in llm.c's files for FineWeb.
      dtype: the type of the tokens in the files; None for the type in the file's header, or uint16.
      header_bytes: >= 0, bytes before the first token; None for a known header, or none.

    Returns:
      One source per file, whose records are dicts. "tokens" is int32[L + 1]. With a separator,
      "documents", int32[L + 1], counts the documents of the window from 0; a separator belongs to
      the document that it ends or begins. Mask attention between tokens of different documents, and
      leave out targets whose document differs from that of their input.

    Raises:
      ValueError: for a file that is missing or holds no window, or for an argument that is out of
        range or contradicts the file; from a read, for a token below 0 or beyond int32.

    Examples:
      >>> import numpy as np, pathlib, tempfile
      >>> from syncopate import ordering
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "text.bin"
      >>> np.array([5, 6, 0, 7, 8, 9, 0], np.uint16).tofile(path)
      >>> (source,) = ordering.blocks.tokens(path, length=3, separator=0)
      >>> records = source.read(0, 2)
      >>> records["tokens"].tolist(), records["documents"].tolist()
      ([[5, 6, 0, 7], [7, 8, 9, 0]], [[0, 0, 0, 1], [0, 0, 0, 0]])

    References:
      llm.c's files, https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py
      Megatron's, https://github.com/NVIDIA/Megatron-LM/tree/main/megatron/core/datasets
      Radford et al., Language Models are Unsupervised Multitask Learners, 2019, which concatenates
      texts in this way, https://openai.com/index/better-language-models/
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
    given = length, separator, separator_at, kind, header_bytes
    return files_of(paths, lambda path, shared: Tokens(path, shared, *given))


class Tokens(File):
    """Windows of tokens."""

    def __init__(self, path: str, shared: Shared, length, separator, side, dtype, header):
        self.length, self.separator, self.side = length, separator, side
        self.dtype, self.header = dtype, header
        super().__init__(path, shared)

    def index(self) -> int:
        header_dtype = count = None
        if self.header is None:
            self.header, header_dtype, count = _header(self.name, self.dtype)
        if self.dtype is not None and header_dtype is not None and self.dtype != header_dtype:
            raise Unfit(f"dtype is {self.dtype}, and the file says {header_dtype}: leave dtype out")
        kinds = (header_dtype, self.dtype, np.dtype(np.uint16))
        self.dtype = dtype = next(kind for kind in kinds if kind is not None)
        self.about = f"{self.header} {dtype.str} {self.length}"
        if dtype.kind not in "iu":
            raise Unfit(f"it holds {dtype}, and tokens are whole numbers: write it anew")
        most = min(np.iinfo(dtype).max, np.iinfo(np.int32).max)
        if self.separator is not None and self.separator > most:
            raise Unfit(
                f"separator is {self.separator}, and its tokens of {dtype} are at most {most}: "
                "pass the dtype of the file, or the separator that it has"
            )
        size = os.path.getsize(self.name)
        if 0 < size < self.header:
            raise Unfit(f"header_bytes is {self.header}, and the file has {size} bytes: pass fewer")
        num_tokens, rest = divmod(max(0, size - self.header), dtype.itemsize)
        if count is not None and num_tokens != count:
            raise ValueError(f"it has {num_tokens} tokens, and its header says {count}")
        if rest or 0 < num_tokens <= self.length:
            raise Unfit(
                f"after header_bytes={self.header} it has {num_tokens} tokens of {dtype} and "
                f"{rest} bytes more, and a window of length {self.length} takes {self.length + 1}: "
                "pass the dtype and the header of the file, or another length"
            )
        return max(0, num_tokens - 1) // self.length

    def records(self, handle: Ranges, start: int, stop: int) -> dict[str, np.ndarray]:
        length, size = self.length, self.dtype.itemsize
        first, last = start * length, stop * length + 1
        data = handle.read(self.header + first * size, self.header + last * size)
        flat = np.frombuffer(data, self.dtype)
        tokens = flat.astype(np.int32)
        if self.dtype.kind == "i" or size > 2:
            wrong = flat[(tokens != flat) | (tokens < 0)]
            if wrong.size:
                raise Unfit(f"{wrong[0]} is not a token of int32: pass the dtype of the file")
        tokens = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[::length]
        if self.separator is None:
            return {"tokens": np.array(tokens)}
        documents = np.cumsum(tokens == self.separator, axis=1, dtype=np.int32)
        if self.side == "start":  # a separator belongs to the document after it
            documents -= documents[:, :1]
        else:
            documents = np.pad(documents[:, :-1], ((0, 0), (1, 0)))
        return {"tokens": np.array(tokens), "documents": documents}


def _header(path, dtype):
    """(bytes before the tokens, their type, their number); None if the file does not say."""
    with open(path, "rb") as file:
        start = file.read(1024)
    if start.startswith(NPY):
        offset, kind, shape, _, count = npy_header(path)
        if shape:
            raise Unfit(f"its records have the shape {shape}: read it by files")
        return offset, kind, count
    if start[:8] in LLM_C:
        if len(start) < 1024:
            raise ValueError("it ends within its header")
        return 1024, np.dtype(LLM_C[start[:8]]), struct.unpack_from("<i", start, 8)[0]
    if path.lower().endswith(OTHERS):
        raise Unfit("it is named as a file of another kind: read it by files, or pass the tokens")
    beside = os.path.splitext(path)[0] + ".idx"
    if not os.path.isfile(beside):
        return 0, None, None
    with open(beside, "rb") as file:
        start = file.read(18)  # the magic bytes, the version in 8, the type
    code = start[17] if len(start) == 18 and start.startswith(MEGATRON) else None
    if code not in MEGATRON_TYPES and dtype is None:
        what = "no code of a type" if code is None else f"the unknown type code {code}"
        raise Unfit(f"its index {beside} has {what}: pass dtype=, or write the index anew")
    return 0, MEGATRON_TYPES.get(code or 0), None
