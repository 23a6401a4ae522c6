"""Files of records, which are read in ranges."""

import math
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ordering.blocks.parquet import Parquet
from ordering.blocks.sources import File, Ranges, Unfit, files_of, needed, types_of

KINDS = ["array_record", "tfrecord", "parquet", "npy"]
NPY = b"\x93NUMPY"


class ArrayRecord(File):
    """Records of bytes, in compressed groups with checksums."""

    is_bytes = True

    def index(self) -> int:
        reader = self.open(self.name)
        if not reader.ok():  # it would only report that there are no records
            raise ValueError("it is not a whole ArrayRecord file")
        return reader.num_records()

    @staticmethod
    def open(path: str) -> Any:
        module = needed("array_record.python.array_record_module", "array_record", "ArrayRecord")
        # Several threads read whole blocks, so the reader needs no read-ahead and no threads.
        options = "readahead_buffer_size:0,max_parallelism:0"
        return module.ArrayRecordReader(path, options=options)

    def records(self, handle: Any, start: int, stop: int) -> list[bytes]:
        return handle.read(start, stop)


class TFRecord(File):
    """Records of bytes, stored as length (8 bytes), its checksum (4), content, its checksum (4)."""

    is_bytes = True

    def index(self) -> int:
        size, at, starts = os.path.getsize(self.name), 0, []
        unpack = struct.Struct("<Q").unpack_from
        if not size:
            return 0
        with open(self.name, "rb") as file:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                while at + 16 <= size:
                    starts.append(at)
                    at += 16 + unpack(data, at)[0]
                self.starts = np.array([*starts, min(at, size)])
                for first in range(0, len(starts), 2**20):
                    places = self.starts[:-1][first : first + 2**20, None] + np.arange(12)
                    heads = np.frombuffer(data, np.uint8)[places]
                    _check_sums(_sums_of_lengths(heads[:, :8]), heads[:, 8:], first, "length")
        if at != size:
            raise ValueError(f"it ends within record {len(starts) - (at > size)}")
        return len(starts)

    def records(self, handle: Ranges, start: int, stop: int) -> list[bytes]:
        first, last = self.starts[[start, stop]].tolist()
        data, ends = handle.read(first, last), (self.starts[start : stop + 1] - first).tolist()
        records = [data[a + 12 : b - 4] for a, b in zip(ends, ends[1:], strict=False)]
        saved = b"".join(data[b - 4 : b] for b in ends[1:])
        _check_sums(list(map(_crc32c(), records)), np.frombuffer(saved, np.uint8), start, "bytes")
        return records


def _crc32c():
    return needed("google_crc32c", "google-crc32c", "TFRecord").value


def _sums_of_lengths(lengths):
    """The checksums of many rows of 8 bytes, summed over the bytes, since they are linear."""
    crc32c = _crc32c()
    tables = [[crc32c(bytes(i) + bytes([b]) + bytes(7 - i)) for b in range(256)] for i in range(8)]
    tables = np.array(tables, np.uint32)
    return np.bitwise_xor.reduce(tables[np.arange(8), lengths], axis=1) ^ tables[0, 0]


def _check_sums(sums, saved, first, what):
    """Raises ValueError for the first record whose checksum differs from the saved one."""
    computed = np.array(sums, np.uint32)
    masked = (computed >> 15 | computed << 17) + np.uint32(0xA282EAD8)  # as TFRecord stores them
    wrong = masked != np.ascontiguousarray(saved).view("<u4").ravel()
    if wrong.any():
        number = first + int(np.argmax(wrong))
        raise ValueError(f"the checksum of the {what} of record {number} is wrong")


class Npy(File):
    """An array whose leading axis counts records."""

    def index(self) -> int:
        header = npy_header(self.name)
        self.offset, self.dtype, self.shape, self.fortran, count = header
        self.types = types_of(_fields(np.empty((0, *self.shape), self.dtype)))
        return count

    def records(self, handle: Ranges, start: int, stop: int) -> PyTree:
        if self.fortran:  # the numbers of a record are far apart in the file
            return _fields(np.array(np.load(self.name, mmap_mode="r")[start:stop]).view(self.dtype))
        size = self.dtype.itemsize * math.prod(self.shape)
        data = handle.read(self.offset + start * size, self.offset + stop * size)
        return _fields(np.frombuffer(data, self.dtype).reshape(-1, *self.shape))


def npy_header(path: str) -> tuple[int, np.dtype, tuple[int, ...], bool, int]:
    """(offset of the numbers, dtype, shape of a record, whether in Fortran order, record count)."""
    with open(path, "rb") as file:
        if file.read(len(NPY)) != NPY:
            raise ValueError("it has no header of np.save (of plain numbers pass np.memmap)")
    array = np.load(path, mmap_mode="r")
    if not array.ndim:
        raise Unfit("it is a single number: save an array whose leading axis counts records")
    dtype = array.dtype
    if dtype == "V2":  # NumPy saves bfloat16 as this type
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


def files(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    kind: str | None = None,
    columns: Sequence[str] | None = None,
) -> tuple[File, ...]:
    """Files of records, for `split`.

    The format follows from the name: `.array_record`, `.arrayrecord`, `.tfrecord`, `.tfrecords`,
    `.tfrec`, `.parquet`, or `.npy` for an array whose leading axis counts records. Names such as
    `train.tfrecord-00001-of-00008` are understood, too. The call indexes the files, and records are
    read on demand; a file that changes after the call is refused.

    Args:
      paths: a path, a pattern such as `data/*.parquet`, or a list of these; `**` stands for folders
        at any depth. Files are in the order of the list, and alphabetical within a pattern. A path
        that exists is not taken as a pattern. Files that match a pattern may have no records.
      kind: "array_record", "tfrecord", "parquet" or "npy", for files with other names, such as
        `train-00001-of-01024`; None to use the names.
      columns: the columns to read from Parquet; None for all.

    Returns:
      One source per file that has records. It has `len(source)` records, and
      `source.read(start, stop)` reads a range of them. ArrayRecord and TFRecord give bytes. Parquet
      and arrays of structured types give rows of a dict of arrays, where bytes of a fixed size are
      uint8[size]. Types follow from the file, not from the values.

    Raises:
      ValueError: for a file that is missing, empty, damaged or of an unknown kind. Reading verifies
        checksums, which `.npy` never has and Parquet has only sometimes.
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
        is_list = isinstance(columns, list | tuple) and all(isinstance(x, str) for x in columns)
        if not is_list or not columns or len(set(columns)) < len(columns):
            raise ValueError(f"columns is {columns!r}: pass a list of names, each once, or None.")
        columns = list(columns)
    if kind is not None and (not isinstance(kind, str) or kind not in KINDS):
        raise ValueError(f"kind is {kind!r}: pass one of {', '.join(KINDS)}, or None.")

    def opened(path, shared):
        name = os.path.basename(path).lower() if kind is None else f".{kind}"
        for ending, kind_of in ENDINGS.items():
            if name.endswith(ending) or f"{ending}-" in name:
                return kind_of(path, shared, columns)
        raise ValueError(
            f"{path} is of no known kind: pass kind=, one of {', '.join(KINDS)}, or read tokens."
        )

    return files_of(paths, opened)
