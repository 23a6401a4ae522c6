"""A set of records on a disk in several formats, and the system's cache of its files."""

import concurrent.futures
import functools
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

BATCH, PIXELS, FILES = 256, 3072, 16
RECORD = PIXELS + 8  # bytes: random ones, and the record's number
BYTES = 2**23  # of a piece of a plain read
PIECE, ROW_GROUP, MANY = 4096, 1024, 64  # records: written at a time, of a row group, of a group


def records_in(gigabytes: float) -> int:
    """Records of a set of at least so many gigabytes: the same number of batches in every file."""
    step = FILES * BATCH
    return -(-int(gigabytes * 1e9) // RECORD // step) * step


def pieces(first: int, stop: int) -> Iterator[np.ndarray]:
    """uint8[n, 3080], the records of a range of whole batches, the same in each format."""
    for start in range(first, stop, PIECE):
        batches = range(start, min(start + PIECE, stop), BATCH)
        yield np.concatenate([_records(number) for number in batches])


def _records(first: int) -> np.ndarray:
    """uint8[256, 3080]: random bytes, seeded by the first number, then the record's number."""
    words = np.random.SFC64(first).random_raw(BATCH * PIXELS // 8)
    numbers = np.arange(first, first + BATCH, dtype="<i8")
    parts = (words.view(np.uint8).reshape(BATCH, -1), numbers.view(np.uint8).reshape(BATCH, -1))
    return np.concatenate(parts, axis=1)


def _arrays(folder, count):
    header = np.lib.format.header_data_from_array_1_0(np.empty((0, RECORD), np.uint8))
    with open(folder / "records.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, header | {"shape": (count, RECORD)})
        for piece in pieces(0, count):
            piece.tofile(file)


def _array_record(group, folder, first, stop, name):
    from array_record.python import array_record_module

    options = f"group_size:{group},uncompressed"
    writer = array_record_module.ArrayRecordWriter(str(folder / f"{name}.array_record"), options)
    for piece in pieces(first, stop):
        for row in piece:
            writer.write(row.tobytes())
    writer.close()


def _tfrecord(folder, first, stop, name):
    import tensorflow as tf

    with tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord")) as writer:
        for piece in pieces(first, stop):
            for row in piece:
                writer.write(row.tobytes())


def _parquet(folder, first, stop, name):
    import pyarrow as pa
    import pyarrow.parquet

    schema = pa.schema({"record": pa.binary(RECORD)})
    words = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    path = folder / f"{name}.parquet"
    with pyarrow.parquet.ParquetWriter(path, schema, **words) as writer:
        for piece in pieces(first, stop):
            buffers = [None, pa.py_buffer(piece.tobytes())]
            column = pa.Array.from_buffers(schema.field(0).type, len(piece), buffers)
            writer.write_table(pa.table([column], schema), row_group_size=ROW_GROUP)


def _mds(folder, count):
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"record": f"ndarray:uint8:{RECORD}"}) as out:
        for piece in pieces(0, count):
            for row in piece:
                out.write({"record": row})


def _in_files(write: Callable, folder: pathlib.Path, count: int) -> None:
    for number in range(FILES):
        first, stop = (count * n // FILES for n in (number, number + 1))
        write(folder, first, stop, f"{number:02d}")


FORMATS = {  # {name: writer of a folder}; files of tokens are the bytes of the array
    "array": _arrays,
    "ArrayRecord": functools.partial(_in_files, functools.partial(_array_record, 1)),
    "ArrayRecord, groups": functools.partial(_in_files, functools.partial(_array_record, MANY)),
    "TFRecord": functools.partial(_in_files, _tfrecord),
    "Parquet": functools.partial(_in_files, _parquet),
    "MDS": _mds,
}


def write(folder: pathlib.Path, count: int) -> list[str]:
    """Writes the formats that are missing; returns those whose packages are installed."""
    names = []
    folder.mkdir(parents=True, exist_ok=True)
    missing = sum(not (folder / f"{count}" / f"{name}.done").exists() for name in FORMATS)
    free, needed = shutil.disk_usage(folder).free, 1.1 * missing * count * RECORD
    if free < needed:
        raise ValueError(
            f"{folder} has {free / 1e9:.1f} GB, and the set takes {needed / 1e9:.1f}: pass another "
            "--folder, or fewer --gigabytes."
        )
    for name, write_format in FORMATS.items():
        place, done = folder / f"{count}" / name, folder / f"{count}" / f"{name}.done"
        if not done.exists():
            place.mkdir(parents=True, exist_ok=True)
            try:
                write_format(place, count)
            except ImportError as error:
                print(f"{name} is left out: {error}")
                continue
            done.touch()
        names.append(name)
    return names


def files_of(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def drop(folder: pathlib.Path) -> None:
    """Drops these files from the system's cache."""
    for path in files_of(folder):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def plain_rate(folder: pathlib.Path, threads: int, most: int = 2**30) -> float:
    """Bytes/s of the first GiB from the disk, in pieces of 8 MiB, one after the other."""
    drop(folder)
    size, into, start = 0, threading.local(), time.perf_counter()

    def piece(at):
        if not hasattr(into, "bytes"):
            into.bytes = bytearray(BYTES)
        return os.preadv(file.fileno(), [into.bytes], at)

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for path in files_of(folder):
            with open(path, "rb", buffering=0) as file:
                end = min(path.stat().st_size, most - size)
                size += sum(pool.map(piece, range(0, end, BYTES)))
    return size / (time.perf_counter() - start)
