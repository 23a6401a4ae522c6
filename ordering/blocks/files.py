"""Files of records and of tokens, which are read in ranges."""

import dataclasses
import functools
import glob
import hashlib
import importlib
import math
import mmap
import os
import re
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Int, PyTree

from syncopate import plans

SAMPLE, SAMPLES = 4096, 64  # bytes of a sample, and samples of a file in its digest
OPEN = 64  # files that stay open
PACKED = {b"\x1f\x8b": "gzip", b"PK": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
PACKED |= {b"\x28\xb5\x2f\xfd": "zstd"}
KINDS = ["array_record", "tfrecord", "parquet", "npy"]
NPY = b"\x93NUMPY"
TICK = 10**7  # nanoseconds in which the clock of a file system may stand still
LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # magic number and version: type of the tokens
MEGATRON = b"MMIDIDX\0\0"
MEGATRON_TYPES = ["|u1", "|i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"]
SIDES = ["end", "start"]


# Sources of blocks. They have `len(source)` and `source.read(start, stop)`.


@dataclasses.dataclass(frozen=True)
class Part:
    """A function as a source of blocks.

    It may be called from several threads. An array in which values are missing, or whose lists have
    several lengths, is one of objects, for `split(keep=)`.
    """

    name: str  # for messages
    num_records: int
    digest: tuple[int, int]  # two numbers of 32 bits, which tell that it has been exchanged
    read: Callable[[int, int], PyTree]  # a list of bytes, or a tree of arrays [stop - start, ...]
    incomplete: tuple[int, int] | None = None  # records of which one is known to lack a value

    def __len__(self) -> int:
        return self.num_records


class Unfit(ValueError):
    """A file that is whole, but not what is asked for; says what to do about it."""


class File:
    """A file as a source of blocks, as `Part`: what it was when it was opened, or an error.

    It can be sent to other processes. A kind of files is a subclass.
    """

    incomplete: tuple[int, int] | None = None
    index: Callable[[], int]  # num_records; keeps what `records` needs to know
    records: Callable[[Any, int, int], PyTree]  # of (handle, start, stop)

    def __init__(self, path: str, columns: list[str] | None = None):
        self.name, self.columns, self.state = path, columns, _state(path)
        if time.time_ns() - self.state[1] < TICK:  # a later change could have the same time
            time.sleep(TICK / 1e9)
        try:
            self.num_records = self.index()
        except ImportError:
            raise
        except Exception as error:  # each library has its own
            if not isinstance(error, OSError):
                _check_packed(path)
            advice = "" if isinstance(error, Unfit) else " Replace the file, or leave it out."
            raise ValueError(f"{path} cannot be read: {said(error)}.{advice}") from error
        self.digest = _digest_of_file(path)
        if _state(path) != self.state:
            raise ValueError(f"{path} changes: wait until it is written.")

    @staticmethod
    def open(path: str) -> Any:
        """A handle, which one thread uses at a time."""
        return Ranges(path)

    def __len__(self) -> int:
        return self.num_records

    def read(self, start: int, stop: int) -> PyTree:
        """Records of the file; ValueError if they are damaged or the file has changed."""
        whose = self.state, os.getpid(), threading.get_ident()
        try:
            records = self.records(_opened(type(self), self.name, *whose), start, stop)
            count = len(records if isinstance(records, list) else jax.tree.leaves(records)[0])
            if count != stop - start:
                raise ValueError(f"it gave {count} records")
            if _state(self.name) != self.state:
                raise ValueError("its size or the time of its last change is another")
        except Exception as error:
            _opened.cache_clear()  # a handle may have failed for good
            raise ValueError(
                f"{self.name}, records {start} to {stop - 1}, cannot be read: {said(error)}. "
                f"{self._advice(error)}".rstrip()
            ) from error
        return records

    def _advice(self, error):
        if os.path.exists(self.name) and _state(self.name) == self.state:
            return "" if isinstance(error, Unfit) else "The file is damaged: replace it."
        return "The file has changed since it was opened: leave files alone while they are read."


class Ranges:
    """A file that is read in ranges of bytes, and closed when nobody uses it any more."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):  # what follows a range is not needed next
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        weakref.finalize(self, os.close, self._file)

    def read(self, start: int, stop: int) -> bytes:
        data = os.pread(self._file, stop - start, start)
        if len(data) < stop - start:
            raise ValueError("it is shorter than it was")
        return data

    def numbers(self, offset: int, kind: np.dtype, shape: tuple, start: int, stop: int):
        """Records of numbers, of which the first begins at the offset."""
        size = kind.itemsize * math.prod(shape)
        data = self.read(offset + start * size, offset + stop * size)
        return np.frombuffer(data, kind).reshape(-1, *shape)


@functools.lru_cache(OPEN)
def _opened(kind: type[File], path: str, *_: object) -> Any:
    """A handle of one thread of one process; those used last stay open."""
    return kind.open(path)


def _needed(module: str, package: str, files: str) -> Any:
    """A module that reads such files; ImportError that names what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{files} files need {package}: pip install {package}.") from error


class ArrayRecord(File):
    """Bytes, in groups that are packed and have checksums."""

    def index(self) -> int:
        reader = self.open(self.name)
        if not reader.ok():  # such a reader only says that there are no records
            raise ValueError("it is no ArrayRecord file, or a part of one")
        return reader.num_records()

    @staticmethod
    def open(path: str) -> Any:
        module = _needed("array_record.python.array_record_module", "array_record", "ArrayRecord")
        # Blocks are read whole and by several threads: no read-ahead and no threads inside.
        options = "readahead_buffer_size:0,max_parallelism:0"
        return module.ArrayRecordReader(path, options=options)

    def records(self, handle: Any, start: int, stop: int) -> list[bytes]:
        return handle.read(start, stop)


class TFRecord(File):
    """Bytes. A record is its length in 8 bytes, the checksum of the length in 4, the bytes, and
    their checksum in 4."""

    def index(self) -> int:
        size, at, starts, heads = os.path.getsize(self.name), 0, [0], bytearray()
        if not size:
            return 0
        with open(self.name, "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                while at + 16 <= size:
                    heads += data[at : at + 12]
                    at += 16 + struct.unpack_from("<Q", data, at)[0]
                    starts.append(at)
        for first in range(0, len(starts) - 1, 2**16):
            rows = range(12 * first, min(len(heads), 12 * (first + 2**16)), 12)
            lengths, saved = [heads[i : i + 8] for i in rows], [heads[i + 8 : i + 12] for i in rows]
            _check_sums(lengths, saved, first, "length")
        if at != size:
            raise ValueError(f"it ends within record {len(starts) - 1 - (at > size)}")
        self.starts = np.array(starts)
        return len(starts) - 1

    def records(self, handle: Ranges, start: int, stop: int) -> list[bytes]:
        first = int(self.starts[start])
        data = handle.read(first, int(self.starts[stop]))
        ends = (self.starts[start : stop + 1] - first).tolist()
        records = [data[a + 12 : b - 4] for a, b in zip(ends, ends[1:], strict=False)]
        _check_sums(records, [data[b - 4 : b] for b in ends[1:]], start, "bytes")
        return records


def _check_sums(records, saved, first, what):
    """Raises ValueError for the first of the records that has not the checksum that was saved."""
    crc32c = _needed("google_crc32c", "google-crc32c", "TFRecord").value
    found = np.fromiter(map(crc32c, map(bytes, records)), np.uint32, len(records))
    masked = (found >> 15 | found << 17) + np.uint32(0xA282EAD8)  # as TFRecord stores them
    wrong = masked != np.frombuffer(b"".join(saved), "<u4")
    if wrong.any():
        raise ValueError(
            f"the checksum of the {what} of record {first + int(np.argmax(wrong))} is wrong"
        )


class Parquet(File):
    """Rows of a dict of columns; `starts` is where each group of rows begins, int64[G + 1]."""

    @staticmethod
    def open(path: str) -> Any:
        module = _needed("pyarrow.parquet", "pyarrow", "Parquet")
        return module.ParquetFile(path, memory_map=False, page_checksum_verification=True)

    def index(self) -> int:
        file = self.open(self.name)
        data, schema, names = file.metadata, file.schema_arrow, file.schema_arrow.names
        chosen = names if self.columns is None else self.columns
        for name in chosen:
            count = names.count(name)
            if not count:  # a reader would leave it out
                raise Unfit(f"it has no column {name!r}, of {names}: pass those that it has")
            if count > 1:
                raise Unfit(
                    f"it has {count} columns named {name!r}: write it anew with other names"
                )
        if not chosen:
            raise Unfit("it has no columns: leave it out")
        groups = [data.row_group(i) for i in range(data.num_row_groups)]
        self.starts = np.cumsum([0, *(group.num_rows for group in groups)])
        _check_memory(groups, [schema.field(name).type for name in chosen])
        paths = [file.schema.column(i).path for i in range(data.num_columns)]
        flat = [i for i, path in enumerate(paths) if path in chosen]  # not those of lists
        for i, group in enumerate(groups):
            known = [group.column(j).statistics for j in flat]
            if any(found is not None and found.null_count for found in known):
                self.incomplete = int(self.starts[i]), int(self.starts[i + 1])
                break
        return data.num_rows

    def records(self, handle: Any, start: int, stop: int) -> dict[str, np.ndarray]:
        first, last = np.searchsorted(self.starts, (start, stop - 1), side="right") - 1
        groups = list(range(first, last + 1))
        table = handle.read_row_groups(groups, columns=self.columns, use_threads=False)
        table = table.slice(start - int(self.starts[first]), stop - start)
        return {name: _column(table[name].combine_chunks()) for name in table.column_names}


def _check_memory(groups, types):
    """Raises Unfit for a group that cannot be read, as its header says: groups are read whole."""
    import pyarrow as pa

    bits = sum(kind.bit_width for kind in types if pa.types.is_primitive(kind))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for number, group in enumerate(groups):
        size = max(group.total_byte_size, group.num_rows * bits // 8)
        if size > memory:
            raise Unfit(
                f"its row group {number} takes {size / 2**30:.0f} GiB of memory, of "
                f"{memory / 2**30:.0f}: write it anew with smaller groups (row_group_size=)"
            )


def _column(column):
    """An array whose type follows from that of the column: of objects, for texts and the like, and
    where values are missing, which are None, or lists have several lengths."""
    import pyarrow as pa
    import pyarrow.compute

    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return _column(column.dictionary_decode())
    if isinstance(column, pa.FixedShapeTensorArray) and not column.null_count:
        return column.to_numpy_ndarray()
    if isinstance(column, pa.ExtensionArray):
        return _column(column.storage)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    has_size = types.is_fixed_size_binary(kind)
    if column.null_count and (types.is_nested(kind) or has_size or types.is_primitive(kind)):
        present = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        return _objects(len(column), present, _column(column.drop_null()))
    if is_list:
        values = _column(column.flatten())
        sizes = pyarrow.compute.call_function("list_value_length", [column])
        sizes = sizes.to_numpy(zero_copy_only=False)
        if len(set(sizes.tolist())) == 1:
            return values.reshape(len(column), sizes[0], *values.shape[1:])
        ends = np.cumsum(sizes)
        lists = [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        return _objects(len(column), range(len(column)), lists)
    # Of whole numbers beside a missing one, in maps and rows, to_numpy would make floats.
    if types.is_map(kind):
        return _objects(len(column), range(len(column)), column.to_pylist())
    if types.is_struct(kind):
        names = [field.name for field in kind]
        fields = dict(zip(names, map(_column, column.flatten()), strict=True))
        rows = [{name: x[i] for name, x in fields.items()} for i in range(len(column))]
        return _objects(len(column), range(len(column)), rows)
    if has_size and len(column):
        size = kind.byte_width
        data = column.buffers()[1]
        data = np.frombuffer(data, np.uint8, len(column) * size, column.offset * size)
        return data.reshape(-1, size)
    return column.to_numpy(zero_copy_only=False)


def _objects(size, places, values):
    found = np.full(size, None)
    for i, value in zip(places, values, strict=True):  # which keep their types as objects
        found[i] = value
    return found


def plain(name: str, numbers: Int[np.ndarray, "n"], records: PyTree) -> PyTree:
    """Records whose objects are numbers, or lists of one length, become arrays of numbers.

    `numbers` are those of the records in the file of this name. Raises ValueError for a value that
    is missing, and for lists of several lengths.
    """
    return jax.tree_util.tree_map_with_path(functools.partial(_plain, name, numbers), records)


def _plain(name, numbers, path, x):
    if x.dtype != object or not x.size:
        return x
    values, each = x.ravel().tolist(), x.size // len(x)
    column = jax.tree_util.keystr(path, simple=True, separator=".") or "it"
    for i, value in enumerate(values):
        number = numbers[i // each]
        if value is None:
            raise ValueError(
                f"{name}, record {number}: {column} has no value. Fill it in, or leave such "
                "records out by split(keep=), to which a missing value is None."
            )
        if isinstance(value, np.ndarray):
            values[i] = _plain(name, numbers[i // each :][:1], path, value)
    if not isinstance(values[0], np.ndarray | np.number | np.bool_ | np.datetime64):
        return x  # texts and other objects
    shapes = {np.shape(value) for value in values}
    if len(shapes) > 1:
        raise ValueError(
            f"{name}, records {numbers[0]} to {numbers[-1]}: the lists of {column} have several "
            f"lengths, as {sorted(shapes)[:3]}. Make them equal, or leave some out by split(keep=)."
        )
    return np.stack(values).reshape(*x.shape, *shapes.pop())


class Npy(File):
    """An array whose leading axis counts records."""

    def index(self) -> int:
        self.offset, self.kind, self.shape, self.fortran, count = _npy_header(self.name)
        return count

    def records(self, handle: Ranges, start: int, stop: int) -> PyTree:
        if not self.fortran:
            return _fields(handle.numbers(self.offset, self.kind, self.shape, start, stop))
        numbers = np.empty((math.prod(self.shape), stop - start), self.kind)
        for i in range(len(numbers)):  # the numbers i of all records follow each other
            at = self.offset + i * len(self) * self.kind.itemsize
            numbers[i] = handle.numbers(at, self.kind, (), start, stop)
        return _fields(numbers.reshape(*self.shape[::-1], -1).T)


def _npy_header(path):
    """(where the numbers begin, their type, the shape of a record, whether the sequence is that of
    Fortran, the number of records)."""
    with open(path, "rb") as file:
        if file.read(len(NPY)) != NPY:
            raise ValueError("it has no header of np.save (of plain numbers pass np.memmap)")
    try:
        array = np.load(path, mmap_mode="r")
    except ValueError as error:
        if "dtype" not in f"{error}":
            raise
        what = f"{error}".rstrip(".")
        raise Unfit(f"{what}: save numbers of NumPy's types, and of others the bits") from error
    if not array.ndim:
        raise Unfit("it is a single number: save an array whose leading axis counts records")
    dtype = array.dtype
    if dtype == "V2":  # as which NumPy saves it
        dtype = np.dtype(jnp.bfloat16)
    if dtype.type is np.void and not dtype.names:
        raise Unfit(f"its type is {dtype}, plain bytes: save x.view(np.uint8), and view it back")
    if not array.size and len(array):
        raise Unfit(f"its records are empty, of shape {array.shape[1:]}: leave it out")
    return array.offset, dtype, array.shape[1:], not array.flags.c_contiguous, len(array)


def _fields(records):
    """Records of a structured type as a dict."""
    if not records.dtype.names:
        return records
    return {name: _fields(records[name]) for name in records.dtype.names}


ENDINGS = {
    ".array_record": ArrayRecord,
    ".arrayrecord": ArrayRecord,
    ".tfrecord": TFRecord,
    ".tfrecords": TFRecord,
    ".tfrec": TFRecord,
    ".npy": Npy,
    ".parquet": Parquet,
}
OTHERS = (*ENDINGS, ".gz", ".zip", ".bz2", ".xz", ".zst")


# Files.


def files(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    kind: str | None = None,
    columns: Sequence[str] | None = None,
) -> tuple[File, ...]:
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

    Returns:
      One source per file that has records, `len(source)` of which `source.read(start, stop)` gives
      some: bytes from ArrayRecord and TFRecord; rows of a dict of arrays from Parquet, where bytes
      of a fixed size are uint8[size], and from arrays of structured types. Types follow from the
      file, not from the values.

    Raises:
      ValueError: for a file that is missing, empty, damaged or of an unknown kind. A read verifies
        checksums: `.npy` has none, and Parquet not always.
      ImportError: without `array_record`, `google_crc32c` or `pyarrow`, for files that need them.

    Examples:
      >>> import numpy as np, pathlib, tempfile
      >>> from syncopate import ordering
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "numbers.npy"
      >>> np.save(path, np.arange(10))
      >>> (source,) = ordering.blocks.files(path)
      >>> len(source), source.read(2, 5).tolist()
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
        columns = names
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise ValueError(f"kind is {kind!r}: pass one of {', '.join(KINDS)}, or None.")

    def opened(path):
        name = os.path.basename(path).lower() if kind is None else f".{kind}"
        for ending, own in ENDINGS.items():
            if name.endswith(ending) or f"{ending}-" in name:
                return own(path, columns)
        _check_packed(path)
        raise ValueError(
            f"{path} is of no known kind: pass files named {', '.join(ENDINGS)}, or kind=, one of "
            f"{', '.join(KINDS)}; files of tokens go to tokens."
        )

    return _with_records(paths, opened)


def _with_records(paths: Any, opened: Callable[[str], File]) -> tuple[File, ...]:
    """The files of paths and patterns that have records."""
    given: Any = [paths] if isinstance(paths, str | os.PathLike) else paths
    is_list = isinstance(given, Sequence)
    if not is_list or not all(isinstance(path, str | os.PathLike) for path in given):
        raise ValueError(f"paths is {paths!r}: pass a path, a pattern, or a list of them.")
    found = []
    for path in map(os.fspath, given):
        matches = _matches(path)
        for match in [path] if matches is None else matches:
            if os.path.isdir(match) and matches is None:
                raise ValueError(f"{match} is a folder: pass its files, as {match}/*.parquet.")
            if not os.path.isfile(match):
                raise ValueError(f"there is no file {match}: pass paths of files.")
            file = opened(match)
            if len(file):
                found.append(file)
            elif matches is None:
                raise ValueError(f"{path} holds no records: leave it out.")
    if not found:
        raise ValueError(f"paths is {paths!r}: no file holds a record. Pass one that does.")
    return tuple(found)


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


def _digest_of_file(path: str) -> tuple[int, int]:
    size = os.path.getsize(path)
    with open(path, "rb", buffering=0) as file:
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


# Windows of packed text.


def tokens(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    length: int,
    separator: int | None = None,
    separator_at: str = "end",
    dtype: DTypeLike | None = None,
    header_bytes: int | None = None,
) -> tuple[File, ...]:
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

    Returns:
      One source per file, whose records are dicts: "tokens", int32[L + 1]; and with a separator
      "documents", int32[L + 1], which counts the documents of the window from 0. A separator
      belongs to the document that it ends or begins. Mask attention where the documents of two
      tokens differ, and leave out targets whose document is not that of their input.

    Raises:
      ValueError: for a file that is missing or holds no window, an argument out of range, or one
        that is not what the file says; from a read, for a token that int32 does not hold.

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
    given = length, separator, separator_at, kind, header_bytes
    return _with_records(paths, lambda path: Tokens(path, *given))


class Tokens(File):
    """Windows of tokens."""

    def __init__(self, path: str, length, separator, side, kind, header):
        self.length, self.separator, self.side = length, separator, side
        self.kind, self.header = kind, header
        super().__init__(path)

    def index(self) -> int:
        known = count = None
        if self.header is None:
            self.header, known, count = _tokens_header(self.name)
        if self.kind is not None and known is not None and self.kind != known:
            raise Unfit(f"dtype is {self.kind}, and the file says {known}: leave dtype out")
        kinds = (known, self.kind, np.dtype(np.uint16))
        self.kind = dtype = next(kind for kind in kinds if kind is not None)
        if dtype.kind not in "iu":
            raise Unfit(f"it holds {dtype}, and tokens are whole numbers: write it anew")
        most = min(np.iinfo(dtype).max, np.iinfo(np.int32).max)
        if self.separator is not None and self.separator > most:
            raise Unfit(
                f"separator is {self.separator}, and its tokens of {dtype} are at most {most}: "
                "pass the dtype of the file, or the separator that it has"
            )
        size = max(0, os.path.getsize(self.name) - self.header)
        found, rest = divmod(size, dtype.itemsize)
        if count is not None and found != count:
            raise ValueError(f"it has {found} tokens, and its header says {count}")
        if rest:
            raise Unfit(
                f"after header_bytes={self.header} it has {found} tokens of {dtype} and {rest} "
                "bytes more: pass the dtype and the header of the file"
            )
        if 0 < found <= self.length:
            raise Unfit(
                f"it has {found} tokens after header_bytes={self.header}, and a window of length "
                f"{self.length} takes {self.length + 1}: leave it out, or choose another length"
            )
        return max(0, found - 1) // self.length

    def records(self, handle: Ranges, start: int, stop: int) -> dict[str, np.ndarray]:
        length = self.length
        flat = handle.numbers(self.header, self.kind, (), start * length, stop * length + 1)
        count = (len(flat) - 1) // length
        windows = np.lib.stride_tricks.sliding_window_view(flat, length + 1)[::length][:count]
        tokens = windows.astype(np.int32)
        if self.kind.itemsize >= 4 and (tokens != windows).any():
            wrong = windows[tokens != windows][0]
            raise Unfit(f"{wrong} is no token of int32: pass the dtype of the file")
        if self.separator is None:
            return {"tokens": tokens}
        documents = np.cumsum(tokens == self.separator, axis=1, dtype=np.int32)
        if self.side == "start":  # a mark counts from its own place on
            documents -= documents[:, :1]
        else:
            documents = np.pad(documents[:, :-1], ((0, 0), (1, 0)))
        return {"tokens": tokens, "documents": documents}


def _tokens_header(path):
    """(bytes before the tokens, their type, their number), None for what the file does not say."""
    with open(path, "rb") as file:
        start = file.read(1024)
    if start.startswith(MEGATRON):
        raise Unfit("it is an index of Megatron: pass the .bin file beside it")
    if start.startswith(NPY):
        offset, dtype, shape, _, count = _npy_header(path)
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
