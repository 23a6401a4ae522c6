"""Writes files of records in every format."""

import struct
import sys

import numpy as np
import pytest

from ordering.blocks import files, tokens


def crc32c(data):
    """The checksum of TFRecord, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write_tfrecord(path, records):
    data = b""
    for record in records:
        length = struct.pack("<Q", len(record))
        data += length + crc32c(length) + record + crc32c(record)
    path.write_bytes(data)


def write_array_record(path, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:2")  # records that are stored together
    for record in records:
        writer.write(record)
    writer.close()


def write_parquet(path, columns, row_group_size=4):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = sys.modules["pyarrow"].table({name: list(x) for name, x in columns.items()})
    parquet.write_table(table, path, row_group_size=row_group_size)


KINDS = ["array_record", "tfrecord", "parquet", "npy", "bin"]
WRITERS = {"tfrecord": write_tfrecord, "array_record": write_array_record}


def write(kind, path, size, first=0):
    """Writes `size` records that are the numbers from `first` on; returns their decoder."""
    if kind == "npy":
        np.save(path, np.arange(first, first + size))
        return None
    if kind == "bin":  # windows of one token
        np.arange(first, first + size + 1, dtype=np.uint16).tofile(path)
        return None
    if kind == "parquet":
        write_parquet(path, {"id": np.arange(first, first + size)})
        return None
    WRITERS[kind](path, [str(i).encode() for i in range(first, first + size)])
    return int


def opened(path):
    """The parts of such a file."""
    return tokens(path, length=1) if path.suffix == ".bin" else files(path)


def ids(kind, records):
    """The numbers of one or more records, which `blocks[u]` gives."""
    if kind == "bin":
        return records["tokens"][..., 0].tolist()
    return np.asarray(records["id"] if kind == "parquet" else records).tolist()
