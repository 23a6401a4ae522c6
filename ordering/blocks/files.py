"""Files of records, which are read in ranges."""

import collections
import contextlib
import functools
import glob
import hashlib
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ordering.blocks.formats import FORMATS, Format, Unfit, parquet
from syncopate import plans

SAMPLE, SAMPLES = 4096, 64  # bytes of a sample, and samples of a file in its digest
OPEN = 64  # files that stay open while nobody reads them
PACKED = {b"\x1f\x8b": "gzip", b"PK": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
PACKED |= {b"\x28\xb5\x2f\xfd": "zstd"}
KINDS = ["array_record", "tfrecord", "parquet", "npy"]
TICK = 10**7  # nanoseconds in which the clock of a file system may stand still


class Part(NamedTuple):
    """A file of records, or arrays that take its place.

    Attributes:
      name: the file's path.
      num_records: N >= 1.
      digest: two numbers of 32 bits, which tell that a file has been exchanged.
      read: `(start, stop) -> records`, a list of bytes or a tree of arrays [stop - start, ...]. It
        can be called from several threads, and sent to other processes. An array in which values
        are missing, or whose lists have several lengths, is one of objects, for `split(keep=)`.
      incomplete: a range of records of which one lacks a value, where the file says so.
    """

    name: str
    num_records: int
    digest: tuple[int, int]
    read: Callable[[int, int], PyTree]
    incomplete: tuple[int, int] | None = None


def files(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    kind: str | None = None,
    columns: Sequence[str] | None = None,
    whole_digest: bool = False,
) -> tuple[Part, ...]:
    """Files of records, for `split`.

    The format follows from the names: `.array_record`, `.arrayrecord`, `.tfrecord`, `.tfrecords`,
    `.tfrec`, `.parquet`, or `.npy` for an array whose leading axis counts records. Names such as
    `train.tfrecord-00001-of-00008` are understood. Files are indexed now, and read when asked for:
    a file that is changed from now on is refused.

    Args:
      paths: a path, a pattern as `data/*.parquet`, or several of them; `**` stands for folders at
        any depth. The sequence of files is that of the list, and alphabetic where a pattern stands.
        A path that exists is no pattern, and files of a pattern may be without records.
      kind: "array_record", "tfrecord", "parquet" or "npy", for files with other names, such as
        `train-00001-of-01024`; None to go by the names.
      columns: the columns to read from Parquet; None for all.
      whole_digest: whether a file's digest is that of all its bytes, which reads all of it, and
        not of its size and 64 samples of 4 KiB.

    Returns:
      One `Part` per file that has records: bytes from ArrayRecord and TFRecord; rows of a dict of
      arrays from Parquet, where bytes of a fixed size are uint8[size], and from arrays of
      structured types. Types follow from the file, not from the values.

    Raises:
      ValueError: for a file that is missing, empty, damaged or of an unknown kind. A read verifies
        the checksums of ArrayRecord and TFRecord, and of Parquet if it has some; there are none in
        `.npy`.
      ImportError: without `array_record`, `google_crc32c` or `pyarrow`, which read ArrayRecord,
        TFRecord and Parquet, if such files are given.

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
    if columns is not None:
        names = list(columns) if isinstance(columns, Sequence) else []
        strange = isinstance(columns, str) or not all(isinstance(name, str) for name in names)
        if strange or not names or len(set(names)) < len(names):
            raise ValueError(
                f"columns is {columns!r}: pass a list of names, each once, or None for all."
            )
    formats = {**FORMATS, ".parquet": parquet(None if columns is None else tuple(columns))}
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise ValueError(f"kind is {kind!r}: pass one of {', '.join(KINDS)}, or None.")
    return open_parts(paths, lambda path: _format_of(path, formats, kind), whole_digest)


def open_parts(paths: Any, form_of: Callable[[str], Format], whole: bool) -> tuple[Part, ...]:
    """A `Part` for each file of some paths that has records."""
    parts = []
    for path, is_match in _expanded(paths):
        part = _open_part(path, form_of(path), whole)
        if part.num_records:
            parts.append(part)
        elif not is_match:
            raise ValueError(f"{path} holds no records: leave it out.")
    if not parts:
        raise ValueError(f"paths is {paths!r}: no file holds a record. Pass one that does.")
    return tuple(parts)


def _expanded(paths: Any) -> list[tuple[str, bool]]:
    """The paths, with patterns replaced by what they match, and whether they are such matches."""
    given: Any = [paths] if isinstance(paths, str | os.PathLike) else paths
    is_list = isinstance(given, Sequence)
    if not is_list or not all(isinstance(path, str | os.PathLike) for path in given):
        raise ValueError(f"paths is {paths!r}: pass a path, a pattern, or a list of them.")
    found: list[tuple[str, bool]] = []
    for path in map(os.fspath, given):
        matches = _matches(path)
        for match in [path] if matches is None else matches:
            if os.path.isdir(match) and matches is None:
                raise ValueError(f"{match} is a folder: pass its files, as {match}/*.parquet.")
            if not os.path.isfile(match):
                raise ValueError(f"there is no file {match}: pass paths of files.")
            found.append((match, matches is not None))
    if not found:
        raise ValueError("paths is empty: pass at least one file.")
    return found


def _matches(path: str) -> list[str] | None:
    """What a pattern matches; None for a path, as a path is whose folders or file exist."""
    if re.match(r"\w\w+:/", path) and not os.path.exists(path):  # pathlib leaves one slash
        raise ValueError(
            f"{path} is an address, and files are read from a disk: copy it, or mount its bucket, "
            "and pass the path there."
        )
    known = path
    while known and not os.path.exists(known):
        known = os.path.dirname(known)
    rest = path[len(known) :]
    if not glob.has_magic(rest):
        return None
    matches = sorted(glob.glob(glob.escape(known) + rest, recursive=True))
    if not matches:
        raise ValueError(f"there is no file {path}: pass paths of files.")
    return matches


def _format_of(path: str, formats: dict[str, Format], kind: str | None) -> Format:
    if kind is not None:
        return formats[f".{kind}"]
    name = os.path.basename(path).lower()
    for ending, form in formats.items():
        if name.endswith(ending) or f"{ending}-" in name:
            return form
    _check_packed(path)
    raise ValueError(
        f"{path} is of no known kind: pass files named {', '.join(formats)}, or kind=, one of "
        f"{', '.join(KINDS)}; files of tokens go to tokens."
    )


def _open_part(path: str, form: Format, whole_digest: bool) -> Part:
    """A `Part` of one file: from here on it is this file in this state."""
    state = _state(path)
    if time.time_ns() - state[1] < TICK:  # a later change could have the same time
        time.sleep(TICK / 1e9)
    try:
        num_records, place, incomplete = form.index(path)
    except ImportError:
        raise
    except Exception as error:  # each library has its own
        if not isinstance(error, OSError):
            _check_packed(path)
        advice = "" if isinstance(error, Unfit) else " Replace the file, or leave it out."
        raise ValueError(f"{path} cannot be read: {said(error)}.{advice}") from error
    read = _File(path, form, place, state)
    part = Part(path, num_records, _digest_of_file(path, whole_digest), read, incomplete)
    if _state(path) != state:
        raise ValueError(f"{path} changes: wait until it is written.")
    return part


def _check_packed(path: str) -> None:
    """Raises ValueError for a file that begins as gzip and its like begin theirs."""
    with open(path, "rb") as file:
        start = file.read(6)
    for begin, name in PACKED.items():
        if start.startswith(begin):
            raise ValueError(f"{path} is packed by {name}: unpack it first.")


def _state(path: str) -> tuple[int, int]:
    """The size of a file and the time of its last change."""
    found = os.stat(path)
    return found.st_size, found.st_mtime_ns


def said(error: Exception) -> str:
    """The message of an error, to be part of another."""
    return f"{error}".rstrip(".") or type(error).__name__


class _File:
    """Reads ranges of a file, as long as it is in the state in which it was indexed."""

    def __init__(self, path: str, form: Format, place: Any, state: tuple[int, int]):
        self.path, self.form, self.place, self.state = path, form, place, state
        self.handles: list[Any] = []  # of this process, which nobody uses at the moment

    def __call__(self, start: int, stop: int) -> PyTree:
        try:
            with _OPEN.handle(self) as handle:
                records = self.form.read(handle, self.place, start, stop)
            count = len(records if isinstance(records, list) else jax.tree.leaves(records)[0])
            if count != stop - start:
                raise ValueError(f"it gave {count} records")
            if _state(self.path) != self.state:
                raise ValueError("its size or the time of its last change is another")
        except Exception as error:
            raise ValueError(
                f"{self.path}, records {start} to {stop - 1}, cannot be read: {said(error)}. "
                f"{self._advice(error)}".rstrip()
            ) from error
        return records

    def _advice(self, error):
        if os.path.exists(self.path) and _state(self.path) == self.state:
            return "" if isinstance(error, Unfit) else "The file is damaged: replace it."
        return "The file has changed since it was opened: leave files alone while they are read."

    def __reduce__(self):
        return _File, (self.path, self.form, self.place, self.state)


class _OpenFiles:
    """The handles of all files. Those that nobody uses are at most OPEN, of the files read last."""

    def __init__(self):
        self._lock, self._idle = threading.Lock(), collections.deque[weakref.ref[_File]]()

    @contextlib.contextmanager
    def handle(self, file: _File) -> Iterator[Any]:
        """A handle of the file for one thread; after an error it is not used again."""
        with self._lock:
            handle = file.handles.pop() if file.handles else None
            if handle is not None:
                self._idle.remove(weakref.ref(file))
        handle = file.form.open(file.path) if handle is None else handle
        yield handle
        with self._lock:
            file.handles.append(handle)
            self._idle.append(weakref.ref(file))
            oldest = self._idle.popleft()() if len(self._idle) > OPEN else None
            closed = None if oldest is None else oldest.handles.pop(0)
        del closed  # outside the lock, as a file may take time to close

    def forget(self) -> None:
        """A process that was forked must not read with the handles of its parent."""
        for file in filter(None, (reference() for reference in self._idle)):
            file.handles.clear()
        self._lock, self._idle = threading.Lock(), collections.deque()


_OPEN = _OpenFiles()
os.register_at_fork(after_in_child=_OPEN.forget)


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
    for x in jax.tree.leaves(arrays):
        if isinstance(x, np.ma.MaskedArray) and np.ma.is_masked(x):
            raise ValueError("parts hold a masked array: fill its missing values in, by filled.")
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
