"""How files of each kind are indexed and read: ArrayRecord, TFRecord, Parquet, NumPy's arrays."""

import functools
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import PyTree


class Format(NamedTuple):
    """How files of a kind are read.

    Attributes:
      index: `path -> (number of records, index)`; the index is what `read` needs to know.
      open: `path -> handle`, once for each thread.
      read: `(handle, index, start, stop) -> records`.
    """

    index: Callable[[str], tuple[int, Any]]
    open: Callable[[str], Any]
    read: Callable[[Any, Any, int, int], PyTree]


def _array_record_index(path):
    reader = _array_record_open(path)
    if not reader.ok():  # such a reader only says that there are no records
        raise ValueError("it is no ArrayRecord file, or a part of one")
    return reader.num_records(), None


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


def _tfrecord_index(path):
    """(N, int64[N + 1]): where each record begins. A record is its length in 8 bytes, the
    checksum of the length in 4, the bytes, and their checksum in 4."""
    size, at, starts = os.path.getsize(path), 0, [0]
    if not size:
        return 0, None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = struct.Struct("<Q").unpack_from
        while at < size:
            if size - at < 16:
                raise ValueError(f"it ends within record {len(starts) - 1}")
            at += 16 + length(data, at)[0]
            starts.append(at)
    if at != size:
        raise ValueError(f"it ends within record {len(starts) - 2}")
    return len(starts) - 1, np.array(starts)


def _tfrecord_read(file, starts, start, stop):
    first, last = int(starts[start]), int(starts[stop])
    data = file.read(first, last)
    if len(data) != last - first:
        raise ValueError("it is shorter than it was")
    begins = (starts[start : stop + 1] - first).tolist()
    records = [data[a + 12 : b - 4] for a, b in zip(begins, begins[1:], strict=False)]
    for a, record in zip(begins, records, strict=False):
        if struct.unpack_from("<Q", data, a)[0] != len(record):
            raise ValueError("a record has another length")
    return records


def parquet(columns: tuple[str, ...] | None) -> Format:
    read = functools.partial(_parquet_read, columns)
    return Format(functools.partial(_parquet_index, columns), _parquet_open, read)


def _parquet_open(path):
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install pyarrow.") from error
    return pyarrow.parquet.ParquetFile(path, memory_map=False)


def _parquet_index(columns, path):
    """(N, int64[G + 1]): where each group of rows begins."""
    file = _parquet_open(path)
    data, names = file.metadata, file.schema_arrow.names
    missing = [name for name in columns or () if name not in names]
    if missing:  # a reader would leave them out
        raise ValueError(f"it has no column {missing[0]!r}, of {names}")
    rows = [data.row_group(i).num_rows for i in range(data.num_row_groups)]
    return data.num_rows, np.cumsum([0, *rows])


def _parquet_read(columns, file, starts, start, stop):
    first, last = np.searchsorted(starts, (start, stop - 1), side="right") - 1
    table = file.read_row_groups(list(range(first, last + 1)), columns=columns, use_threads=False)
    table = table.slice(start - int(starts[first]), stop - start)
    return {name: _column(name, table[name]) for name in table.column_names}


def _column(name, column):
    column = column.combine_chunks()
    if str(column.type).startswith("fixed_size_binary") and not column.null_count:
        size = column.type.byte_width
        data = np.frombuffer(
            column.buffers()[1], np.uint8, len(column) * size, column.offset * size
        )
        return data.reshape(-1, size)
    array = column.to_numpy(zero_copy_only=False)
    if array.dtype == object and len(array) and isinstance(array[0], np.ndarray):
        if len({np.shape(values) for values in array}) > 1:
            raise ValueError(f"the lists of the column {name!r} have several lengths")
        return np.stack(array)
    return array


def _npy_index(path):
    """(N, (where the numbers begin, their type, the shape of a record))."""
    array = np.load(path, mmap_mode="r")
    if not array.ndim or not array.flags.c_contiguous:
        raise ValueError("it is not an array of records, one after the other")
    return len(array), (array.offset, array.dtype, array.shape[1:])


def read_numbers(file: "Ranges", index: tuple, start: int, stop: int) -> np.ndarray:
    """Records of a file of numbers, of which the index holds the place, the type and the shape."""
    offset, dtype, shape = index
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


def _array_record_read(file, index, start, stop):
    return file.read(start, stop)


ARRAY_RECORD = Format(_array_record_index, _array_record_open, _array_record_read)
TFRECORD = Format(_tfrecord_index, Ranges, _tfrecord_read)
FORMATS = {
    ".array_record": ARRAY_RECORD,
    ".arrayrecord": ARRAY_RECORD,
    ".tfrecord": TFRECORD,
    ".tfrecords": TFRECORD,
    ".npy": Format(_npy_index, Ranges, read_numbers),
}
