"""Files of records, which are read in ranges."""

import functools
import glob
import hashlib
import os
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ordering.blocks.formats import FORMATS, Format, parquet
from syncopate import plans

SAMPLE, SAMPLES = 4096, 64  # bytes of a sample, and samples of a file in its digest


class Part(NamedTuple):
    """A file of records, or arrays that take its place.

    Attributes:
      name: the file's path.
      num_records: N >= 1.
      digest: two numbers of 32 bits, which tell that a file has been exchanged.
      read: `(start, stop) -> records`, a list of bytes or a tree of arrays [stop - start, ...]. It
        can be called from several threads, and sent to other processes.
    """

    name: str
    num_records: int
    digest: tuple[int, int]
    read: Callable[[int, int], PyTree]


def files(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    columns: Sequence[str] | None = None,
    whole_digest: bool = False,
) -> tuple[Part, ...]:
    """Files of records, for `split`.

    The format follows from the names: `.array_record`, `.arrayrecord`, `.tfrecord`, `.tfrecords`,
    `.parquet`, or `.npy` for an array whose leading axis counts records. Names such as
    `train.tfrecord-00001-of-00008` are understood. Files are indexed now, and read when asked for.

    Args:
      paths: a path, a pattern as `data/*.parquet`, or several of them. The sequence of files is
        that of the list, and alphabetic where a pattern stands.
      columns: the columns to read from Parquet; None for all.
      whole_digest: whether a file's digest is that of all its bytes, which reads all of it, and
        not of its size and 64 samples of 4 KiB.

    Returns:
      One `Part` per file. Records are bytes from ArrayRecord and TFRecord, rows of a dict of
      arrays from Parquet, where bytes of a fixed size are uint8[size].

    Raises:
      ValueError: for a file that is missing, empty, damaged or of an unknown kind.
      ImportError: without `array_record` or `pyarrow`, if such files are given.

    Examples:
      >>> import numpy as np, ordering, pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "numbers.npy"
      >>> np.save(path, np.arange(10))
      >>> (part,) = ordering.blocks.files(path)
      >>> part.num_records, part.read(2, 5).tolist()
      (10, [2, 3, 4])

    References:
      ArrayRecord, https://github.com/google/array_record
      TFRecord, https://www.tensorflow.org/tutorials/load_data/tfrecord
      Parquet, https://parquet.apache.org/docs/file-format/
    """
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Sequence)):
        raise ValueError(f"columns is {columns!r}: pass a list of names.")
    formats = {**FORMATS, ".parquet": parquet(None if columns is None else tuple(columns))}
    return tuple(
        open_part(path, _format_of(path, formats), whole_digest) for path in expanded(paths)
    )


def expanded(paths: Any) -> list[str]:
    """The paths, with patterns replaced by what they match; ValueError for those without a file."""
    given: Any = [paths] if isinstance(paths, str | os.PathLike) else paths
    is_list = isinstance(given, Sequence)
    if not is_list or not all(isinstance(path, str | os.PathLike) for path in given):
        raise ValueError(f"paths is {paths!r}: pass a path, a pattern, or a list of them.")
    found: list[str] = []
    for path in map(os.fspath, given):
        matches = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
        missing = [match for match in matches if not os.path.isfile(match)]
        if missing or not matches:
            raise ValueError(f"there is no file {(missing or [path])[0]}: pass paths of files.")
        found += matches
    if not found:
        raise ValueError("paths is empty: pass at least one file.")
    return found


def _format_of(path: str, formats: dict[str, Format]) -> Format:
    name = os.path.basename(path).lower()
    for ending, form in formats.items():
        if name.endswith(ending) or f"{ending}-" in name:
            return form
    raise ValueError(f"{path} is of no known kind: pass files named {', '.join(formats)}.")


def open_part(path: str, form: Format, whole_digest: bool = False) -> Part:
    """A `Part` of one file."""
    try:
        num_records, index = form.index(path)
    except ImportError:
        raise
    except Exception as error:  # each library has its own
        raise ValueError(
            f"{path} cannot be read: {said(error)}. Replace the file, or leave it out."
        ) from error
    if num_records < 1:
        raise ValueError(f"{path} holds no records: leave it out.")
    return Part(path, num_records, _digest_of_file(path, whole_digest), _File(path, form, index))


def said(error: Exception) -> str:
    """The message of an error, to be part of another."""
    return f"{error}".rstrip(".") or type(error).__name__


class _File:
    """Reads ranges of a file, with a handle for each thread and process."""

    def __init__(self, path: str, form: Format, index: Any):
        self.path, self.form, self.index = path, form, index
        self._handles = threading.local()

    def __call__(self, start: int, stop: int) -> PyTree:
        try:
            records = self.form.read(self._handle(), self.index, start, stop)
            count = len(records if isinstance(records, list) else jax.tree.leaves(records)[0])
            if count != stop - start:
                raise ValueError(f"it gave {count} records")
        except Exception as error:
            raise ValueError(
                f"{self.path}, records {start} to {stop - 1}, cannot be read: {said(error)}. The "
                "file is damaged, or has changed since it was opened: replace it."
            ) from error
        return records

    def _handle(self):
        # A process that was forked must not read with the handle of its parent.
        if getattr(self._handles, "process", None) != os.getpid():
            self._handles.handle = self.form.open(self.path)
            self._handles.process = os.getpid()
        return self._handles.handle

    def __reduce__(self):
        return _File, (self.path, self.form, self.index)


def _digest_of_file(path: str, whole: bool) -> tuple[int, int]:
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
        if whole:
            return _digest(size, iter(lambda: file.read(2**20), b""))
        starts = np.linspace(0, max(0, size - SAMPLE), SAMPLES).astype(np.int64)
        return _digest(size, (os.pread(file.fileno(), SAMPLE, int(s)) for s in np.unique(starts)))


def _digest(size: int, pieces) -> tuple[int, int]:
    hashed = hashlib.blake2b(str(size).encode(), digest_size=8)
    for piece in pieces:
        hashed.update(piece)
    return struct.unpack("<II", hashed.digest())


def of_arrays(arrays: PyTree[ArrayLike]) -> tuple[Part, ...]:
    """Arrays with a common leading axis as one `Part`."""
    arrays = jax.tree.map(lambda x: plans.as_array(x)[0], arrays)
    sizes = {x.shape[:1] for x in jax.tree.leaves(arrays)}
    if len(sizes) != 1 or sizes in ({()}, {(0,)}):
        raise ValueError(
            f"parts are arrays with the leading axes {sorted(sizes)}: pass what files or tokens "
            "returned, or arrays with one common leading axis of at least one record."
        )
    (size,) = sizes.pop()
    samples = np.unique(np.linspace(0, size - 1, SAMPLES).astype(np.int64))
    pieces = [np.ascontiguousarray(x[samples]) for x in jax.tree.leaves(arrays)]
    digest = _digest(size, (repr(x.tolist()).encode() for x in pieces))
    return (Part("the arrays", size, digest, functools.partial(_slices, arrays)),)


def _slices(arrays, start, stop):
    return jax.tree.map(lambda x: x[start:stop], arrays)
