"""Sources of blocks: records that are read in ranges, from functions and from files."""

import contextlib
import dataclasses
import glob
import hashlib
import importlib
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, PyTree

from ordering.data.sources import never_ends

SAMPLE, SAMPLES = 4096, 64  # bytes of a sample, and samples of a file in its digest
OPEN = 128  # handles that stay open, for the files of one call
MOST = 2**29  # bytes of decoded row groups that stay in memory
REQUEST = 2**30  # bytes at once; Linux reads at most 0x7ffff000
PACKED = (b"\x1f\x8b", b"PK", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, zip and so on
TICK = 10**7  # nanoseconds, the resolution of a file system's clock


class Source:
    """Records that are read in ranges, by several threads.

    Attributes:
      name: its name in messages.
      num_records: the number of records.
      digest: two numbers of 32 bits, which change if the source is replaced.
      is_bytes: whether records are bytes and not arrays; None if only a read can tell.
      types: the types of the records as of `types_of`, if they are known without a read.
      incomplete: a range of records with one that is known to lack a value.
    """

    name: str
    num_records: int
    digest: tuple[int, int]
    is_bytes: bool | None = None
    types: dict | None = None
    incomplete: tuple[int, int] | None = None
    read: Callable[[int, int], PyTree]  # (start, stop): a list of bytes, or a tree of arrays

    def __len__(self) -> int:
        return self.num_records

    def fetch(self, start: int, stop: int, kept: Bool[np.ndarray, "n"] | None = None) -> PyTree:
        """The records of a range that are kept; they are valid if `check` passes afterwards."""
        places = np.arange(stop - start) if kept is None else np.flatnonzero(kept)
        return self.take(self.raw(start, stop), places, places + start)

    def raw(self, start: int, stop: int) -> Any:
        """All records of a range, as the source has them."""
        return never_ends(lambda: self.read(start, stop))

    def take(self, records: Any, places: np.ndarray, numbers: np.ndarray) -> PyTree:
        """The raw records at these places; `numbers` are their numbers in the source."""
        if isinstance(records, list):
            return [records[i] for i in places.tolist()]
        whole = len(places) == len(jax.tree.leaves(records)[0])
        return records if whole else jax.tree.map(lambda x: x[places], records)

    def rows(self, start: int, stop: int) -> list:
        """The records of a range as a list; None where a value is missing."""
        records = self.raw(start, stop)
        if isinstance(records, list):
            return records
        return [jax.tree.map(lambda x: x[i], records) for i in range(stop - start)]  # noqa: B023

    def check(self) -> None:
        """Raises ValueError if the source has changed."""


def types_of(records: PyTree[np.ndarray]) -> dict[str, tuple]:
    """(dtype, shape of a record) of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(records)
    name_of = lambda path: jax.tree_util.keystr(path, simple=True, separator=".") or "it"  # noqa: E731
    return {name_of(path): (x.dtype, x.shape[1:]) for path, x in leaves}


@dataclasses.dataclass(frozen=True)
class Part(Source):
    """A function as a source of blocks."""

    name: str
    num_records: int
    digest: tuple[int, int]
    read: Callable[[int, int], PyTree]
    is_bytes: bool | None = None


class Unfit(ValueError):
    """A file is intact, but cannot be used as asked; the message says what to do."""


class File(Source):
    """A file as a source of blocks; it raises an error if the file changes after it was opened.

    It can be sent to other processes. Each kind of file is a subclass.
    """

    is_bytes = False
    index: Callable[[], int]  # returns num_records, and keeps what `records` needs
    records: Callable[[Any, int, int], Any]  # (handle, start, stop) -> records
    about = ""  # what else says which record is which, for the digest

    def __init__(self, path: str, shared: "Shared", columns: list[str] | None = None):
        self.name, self.shared, self.columns, self.state = path, shared, columns, _state(path)
        if time.time_ns() - self.state[1] < TICK:  # a later change could have the same time
            time.sleep(TICK / 1e9)
        try:
            self.num_records = self.index()
        except (ImportError, MemoryError):
            raise
        except Exception as error:  # each library has its own types of errors
            if _is_of_disk(error, path):
                raise
            advice = " It is packed: unpack it first." if _is_packed(path) else ""
            if not advice and not isinstance(error, Unfit):
                advice = " Replace the file, or leave it out."
            raise ValueError(f"{path} cannot be read: {_text(error)}.{advice}") from error
        size = os.path.getsize(path)
        starts = np.linspace(0, max(0, size - SAMPLE), SAMPLES).astype(np.int64)
        with open(path, "rb", buffering=0) as file:
            samples = [os.pread(file.fileno(), SAMPLE, int(at)) for at in np.unique(starts)]
        self.digest = digest_of(size, [*samples, self.about.encode()])
        if _state(path) != self.state:
            raise ValueError(f"{path} changes: wait until it is written.")

    @staticmethod
    def open(path: str) -> Any:
        """A handle, which only one thread uses at a time."""
        return Ranges(path)

    def read(self, start: int, stop: int) -> PyTree:
        """Records of a range: a list of bytes, or arrays [stop - start, ...]."""
        records = self.fetch(start, stop)
        self.check()
        return records

    def raw(self, start: int, stop: int) -> Any:
        if not 0 <= start < stop <= len(self):
            raise ValueError(
                f"records {start} to {stop} of {self.name}: pass 0 <= start < stop <= {len(self)}."
            )
        try:
            with self.shared.handle(self) as handle:
                records = self.records(handle, start, stop)
            column = jax.tree.leaves(records)[0] if isinstance(records, dict) else records
            if len(column) != stop - start:
                raise ValueError(f"it gave {len(column)} records")
            return records
        except Exception as error:
            self.check()
            if _is_of_disk(error, self.name) or not _is_of_content(error):
                error.add_note(f"Records {start} to {stop - 1} of {self.name} were read.")
                raise
            advice = "" if isinstance(error, Unfit) else " The file is damaged: replace it."
            what = f"{self.name}, records {start} to {stop - 1}, cannot be read"
            raise ValueError(f"{what}: {_text(error)}.{advice}") from error

    def check(self) -> None:
        try:
            is_same = _state(self.name) == self.state
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise ValueError(f"{self.name} has changed since it was opened: open the files again.")


def _is_of_disk(error: Exception, path: str) -> bool:
    """Whether the system failed, not the content of a file, which the error then names."""
    if not isinstance(error, OSError) or error.errno is None:  # as pyarrow's, for checksums
        return False
    error.filename = error.filename or path
    return True


def _is_of_content(error: Exception) -> bool:
    is_record_file = isinstance(error, RuntimeError) and "orrupted" in f"{error}"
    return isinstance(error, ValueError | OSError) or is_record_file


class Ranges:
    """A file that is read in ranges of bytes, and closed when it is no longer used.

    It is not mapped: where a disk fails, the read of mapped memory ends the process.
    """

    def __init__(self, path: str):
        self._file = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):  # the bytes after a range are not needed next
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        weakref.finalize(self, os.close, self._file)

    def read(self, start: int, stop: int) -> bytes:
        parts = []
        while start < stop:
            parts.append(os.pread(self._file, min(stop - start, REQUEST), start))
            if not parts[-1]:
                raise ValueError("it is shorter than it was")
            start += len(parts[-1])
        return b"".join(parts)  # no copy of a single part


class Shared:
    """What the files of one call keep open and decoded; it goes when they go."""

    def __init__(self):
        self._process, self._lock = os.getpid(), threading.Lock()
        self._handles: list[tuple[tuple, Any]] = []  # that no thread uses; the last used last
        self._groups: dict[tuple, Future] = {}  # decoded row groups, the last used last
        self._bytes = 0  # of these

    def __reduce__(self):
        return Shared, ()

    def _of_process(self) -> "Shared":
        if self._process != os.getpid():  # a fork, at which the lock may have been held
            self.__init__()
        return self

    @contextlib.contextmanager
    def handle(self, file: File) -> Iterator[Any]:
        """A handle of a file for this thread; after an error it is not used again."""
        name = type(file), file.name, file.state
        with self._of_process()._lock:
            places = [i for i, (other, _) in enumerate(self._handles) if other == name]
            handle = self._handles.pop(places[-1])[1] if places else None
        handle = file.open(file.name) if handle is None else handle
        try:
            yield handle
        except BaseException:
            self._handles.clear()  # others of the file may have failed, too
            raise
        with self._lock:
            self._handles.append((name, handle))
            del self._handles[:-OPEN]

    def group(self, key: tuple, decode: Callable[[], Any]) -> Any:
        """The result of `decode`, which one thread calls while others wait."""
        with self._of_process()._lock:
            is_new = key not in self._groups
            group = self._groups[key] = self._groups.pop(key, None) or Future()
        if is_new:
            try:
                group.set_result(decode())
            except BaseException as error:
                group.set_exception(error)
            with self._lock:
                self._keep(key, group)
        return group.result()

    def _keep(self, key, group):
        """Counts the bytes of a group, or forgets one that failed, and makes room."""
        if group.exception():
            self._groups.pop(key, None)
        elif self._groups.get(key) is group:
            self._bytes += group.result().nbytes
        while self._bytes > MOST and len(self._groups) > 1:
            oldest = self._groups.pop(next(iter(self._groups)))
            self._bytes -= oldest.result().nbytes if oldest.done() else 0


def needed(module: str, package: str, files: str) -> Any:
    """A module that reads such files; raises ImportError with what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{files} files need {package}: pip install {package}.") from error


def files_of(paths: Any, opened: Callable[[str, Shared], File]) -> tuple[File, ...]:
    """The files of paths and patterns that have records, each once."""
    given: Any = [paths] if isinstance(paths, str | os.PathLike) else paths
    is_list = isinstance(given, Sequence)
    if not is_list or not all(isinstance(path, str | os.PathLike) for path in given):
        raise ValueError(f"paths is {paths!r}: pass a path, a pattern, or a list of them.")
    opened_files, shared = {}, Shared()
    for path in map(os.fspath, given):
        matches = _matches(path)
        for match in matches or [path]:
            if os.path.isdir(match):
                raise ValueError(f"{match} is a folder: pass its files, as {match}/*.parquet.")
            if not os.path.isfile(match):
                raise ValueError(
                    f"paths has {match!r}, which is no file on this disk: copy those of a bucket."
                )
            if (real := os.path.realpath(match)) not in opened_files:
                opened_files[real] = opened(match, shared)
            if not matches and not len(opened_files[real]):
                raise ValueError(f"{path} holds no records: leave it out.")
    if not any(map(len, opened_files.values())):
        raise ValueError(f"paths is {paths!r}: no file holds a record. Pass one that does.")
    return tuple(file for file in opened_files.values() if len(file))


def _matches(path: str) -> list[str]:
    """The files that match a pattern; none if it is a path whose file or folder exists."""
    existing = path
    while existing and not os.path.exists(existing):
        existing = os.path.dirname(existing)
    rest = path[len(existing) :]
    pattern = glob.escape(existing) + rest
    return sorted(glob.glob(pattern, recursive=True)) if glob.has_magic(rest) else []


def _state(path: str) -> tuple[int, int]:
    """The size of a file and the time of its last change."""
    stat = os.stat(path)
    return stat.st_size, stat.st_mtime_ns


def _is_packed(path):
    with open(path, "rb") as file:
        return file.read(6).startswith(PACKED)


def _text(error: Exception) -> str:
    """The message of an error, to be part of another."""
    return f"{error}".rstrip(".") or type(error).__name__


def digest_of(size: int, samples: Iterable[bytes]) -> tuple[int, int]:
    hashed = hashlib.blake2b(str(size).encode(), digest_size=8)
    for sample in samples:
        hashed.update(sample)
    return struct.unpack("<II", hashed.digest())
