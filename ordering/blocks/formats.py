"""How files of each kind are indexed and read: ArrayRecord, TFRecord, Parquet, NumPy's arrays."""

import functools
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree


class Unfit(ValueError):
    """A file that is whole, but not what is asked for; says what to do about it."""


class Index(NamedTuple):
    """What is known of a file before it is read.

    Attributes:
      num_records: N >= 0.
      place: what `Format.read` needs to know.
      incomplete: a range of records of which one lacks a value, if the file says so.
    """

    num_records: int
    place: Any = None
    incomplete: tuple[int, int] | None = None


class Format(NamedTuple):
    """How files of a kind are read.

    Attributes:
      index: `path -> Index`.
      open: `path -> handle`, which one thread uses at a time.
      read: `(handle, place, start, stop) -> records`.
    """

    index: Callable[[str], Index]
    open: Callable[[str], Any]
    read: Callable[[Any, Any, int, int], PyTree]


def _array_record_index(path):
    reader = _array_record_open(path)
    if not reader.ok():  # such a reader only says that there are no records
        raise ValueError("it is no ArrayRecord file, or a part of one")
    return Index(reader.num_records())


def _array_record_open(path):
    try:
        from array_record.python import array_record_module  # pyright: ignore
    except ImportError as error:
        raise ImportError(
            "ArrayRecord files need array_record: pip install array_record."
        ) from error
    # Blocks are read whole and by several threads: no read-ahead and no threads inside.
    return array_record_module.ArrayRecordReader(
        path, options="readahead_buffer_size:0,max_parallelism:0"
    )


def _array_record_read(file, index, start, stop):
    return file.read(start, stop)


def _tfrecord_index(path):
    """Where each record begins, int64[N + 1]. A record is its length in 8 bytes, the checksum of
    the length in 4, the bytes, and their checksum in 4."""
    size, at, starts, heads = os.path.getsize(path), 0, [0], bytearray()
    if not size:
        return Index(0)
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
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
    return Index(len(starts) - 1, np.array(starts))


def _tfrecord_read(file, starts, start, stop):
    first, last = int(starts[start]), int(starts[stop])
    data = file.read(first, last)
    if len(data) != last - first:
        raise ValueError("it is shorter than it was")
    ends = (starts[start : stop + 1] - first).tolist()
    records = [data[a + 12 : b - 4] for a, b in zip(ends, ends[1:], strict=False)]
    saved = [data[b - 4 : b] for b in ends[1:]]
    _check_sums(records, saved, start, "bytes")
    return records


def _check_sums(records, saved, first, what):
    """Raises ValueError for the first of the records that has not the checksum that was saved."""
    try:
        from google_crc32c import value as crc32c
    except ImportError as error:
        raise ImportError(
            "TFRecord files need google-crc32c: pip install google-crc32c."
        ) from error
    found = np.fromiter(map(crc32c, map(bytes, records)), np.uint32, len(records))
    masked = (found >> 15 | found << 17) + np.uint32(0xA282EAD8)  # as TFRecord stores them
    wrong = masked != np.frombuffer(b"".join(saved), "<u4")
    if wrong.any():
        raise ValueError(
            f"the checksum of the {what} of record {first + int(np.argmax(wrong))} is wrong"
        )


def parquet(columns: tuple[str, ...] | None) -> Format:
    """The format of Parquet files, of which only some columns are read."""
    read = functools.partial(_parquet_read, columns)
    return Format(functools.partial(_parquet_index, columns), _parquet_open, read)


def _parquet_open(path):
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install pyarrow.") from error
    return pyarrow.parquet.ParquetFile(path, memory_map=False, page_checksum_verification=True)


def _parquet_index(columns, path):
    """Where each group of rows begins, int64[G + 1]."""
    file = _parquet_open(path)
    data, schema = file.metadata, file.schema_arrow
    chosen = schema.names if columns is None else columns
    for name in chosen:
        count = schema.names.count(name)
        if not count:  # a reader would leave it out
            raise Unfit(f"it has no column {name!r}, of {schema.names}: pass those that it has")
        if count > 1:
            raise Unfit(f"it has {count} columns named {name!r}: write it anew with other names")
    if not chosen:
        raise Unfit("it has no columns: leave it out")
    groups = [data.row_group(i) for i in range(data.num_row_groups)]
    starts = np.cumsum([0, *(group.num_rows for group in groups)])
    _check_memory(groups, [schema.field(name).type for name in chosen])
    paths = [file.schema.column(i).path for i in range(len(file.schema.names))]
    flat = [i for i, path in enumerate(paths) if path in chosen]  # not those of lists
    for i, group in enumerate(groups):
        known = [group.column(j).statistics for j in flat]
        if any(found is not None and found.null_count for found in known):
            return Index(data.num_rows, starts, (int(starts[i]), int(starts[i + 1])))
    return Index(data.num_rows, starts)


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


def _parquet_read(columns, file, starts, start, stop):
    first, last = np.searchsorted(starts, (start, stop - 1), side="right") - 1
    table = file.read_row_groups(list(range(first, last + 1)), columns=columns, use_threads=False)
    table = table.slice(start - int(starts[first]), stop - start)
    return {name: _column(table[name].combine_chunks()) for name in table.column_names}


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
    if column.null_count and (is_list or has_size or types.is_primitive(kind)):
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

    Args:
      name: of the file.
      numbers: those of the records in the file.
      records: as `Format.read` gives them, or some of them.

    Raises:
      ValueError: for a value that is missing, and lists of several lengths.
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


def _npy_index(path):
    """(Where the numbers begin, their type, the shape of a record, and N in Fortran's order)."""
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
    fortran = 0 if array.flags.c_contiguous else len(array)
    return Index(len(array), (array.offset, dtype, array.shape[1:], fortran))


def _npy_read(file, place, start, stop):
    offset, dtype, shape, fortran = place
    if not fortran:
        return _fields(read_numbers(file, (offset, dtype, shape), start, stop))
    numbers = np.empty((math.prod(shape), stop - start), dtype)
    for i in range(len(numbers)):  # the numbers i of all records follow each other
        at = offset + i * fortran * dtype.itemsize
        numbers[i] = read_numbers(file, (at, dtype, ()), start, stop)
    return _fields(numbers.reshape(*shape[::-1], -1).T)


def _fields(records):
    """Records of a structured type as a dict."""
    if not records.dtype.names:
        return records
    return {name: _fields(records[name]) for name in records.dtype.names}


def read_numbers(file: "Ranges", place: tuple, start: int, stop: int) -> np.ndarray:
    """Records of a file of numbers, of which the place is the first byte, the type and shape."""
    offset, dtype, shape = place
    size = dtype.itemsize * math.prod(shape)
    data = file.read(offset + start * size, offset + stop * size)
    return np.frombuffer(data, dtype).reshape(-1, *shape)


class Ranges:
    """A file that is read in ranges of bytes, and closed when nobody uses it any more."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_RDONLY)
        if hasattr(os, "posix_fadvise"):  # what follows a range is not needed next
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        weakref.finalize(self, os.close, self._file)

    def read(self, start: int, stop: int) -> bytes:
        return os.pread(self._file, stop - start, start)


ARRAY_RECORD = Format(_array_record_index, _array_record_open, _array_record_read)
TFRECORD = Format(_tfrecord_index, Ranges, _tfrecord_read)
FORMATS = {
    ".array_record": ARRAY_RECORD,
    ".arrayrecord": ARRAY_RECORD,
    ".tfrecord": TFRECORD,
    ".tfrecords": TFRECORD,
    ".tfrec": TFRECORD,
    ".npy": Format(_npy_index, Ranges, _npy_read),
}
NPY = b"\x93NUMPY"
