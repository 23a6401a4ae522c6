"""People's own files: names, states, checksums and types as they are found on disks."""

import gzip
import os
import pathlib
import struct
import sys
import threading
import zipfile

import jax
import ml_dtypes
import numpy as np
import pytest

import ordering
from ordering.blocks import files, read_blocks, split, tokens
from ordering.blocks.files import OPEN
from ordering.input import LoadError
from tests import record_files
from tests.record_files import KINDS, opened

RNG = np.random.default_rng(0)


def saved(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)
    return path


# Names


@pytest.mark.parametrize("name", ["run[1]", "run*", "run?", "run[!2]", "[ab]"])
def test_a_path_that_exists_is_no_pattern(name, tmp_path, monkeypatch):
    """Nor is a folder of one, whose files a pattern then names."""
    for other, first in (("run1", 10), ("run2", 20), ("a", 30)):
        saved(tmp_path / other / "x.npy", np.arange(first, first + 2))
    saved(tmp_path / name / "x.npy", np.arange(2))
    for path in (tmp_path / name / "x.npy", tmp_path / name / "*.npy", tmp_path / name / "?.n*"):
        assert [part.read(0, 2).tolist() for part in files(path)] == [[0, 1]]
    (tmp_path / name / "x.npy").unlink()
    with pytest.raises(ValueError, match="there is no file .*x.npy: pass paths of files"):
        files(tmp_path / name / "x.npy")
    saved(tmp_path / "x[1].npy", np.arange(5))
    saved(tmp_path / "x1.npy", np.arange(6))
    assert files(tmp_path / "x[1].npy")[0].num_records == 5
    monkeypatch.chdir(tmp_path)
    assert files("x[1].npy")[0].num_records == 5
    assert [part.num_records for part in files("x[1-2].npy")] == [6]


def test_stars_stand_for_folders_at_any_depth(tmp_path):
    for i, folder in enumerate((".", "a", "a/b", "c")):
        saved(tmp_path / folder / "x.npy", np.array([i]))
    found = files(tmp_path / "**" / "*.npy")
    assert sorted(part.read(0, 1).tolist() for part in found) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "path, message",
    [
        ("gs://bucket/x.npy", "gs://bucket/x.npy is an address, .*: copy it, or mount its bucket"),
        ("s3://bucket/*.npy", "is an address"),
        (pathlib.PurePosixPath("gs://bucket/x.npy"), "is an address"),
        ("folder", "folder is a folder: pass its files, as .*folder/"),
        ("train-00000-of-01024", r"is of no known kind: .*kind=, one of array_record, tfrecord, "),
    ],
)
def test_names_that_are_no_files_say_what_to_pass(path, message, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "train-00000-of-01024").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        files(path if ":/" in str(path) else tmp_path / path)


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "parquet", "npy"])
def test_a_kind_can_be_said(kind, tmp_path):
    path = tmp_path / "train-00000-of-01024"
    with open(path, "wb") as file:
        decode = record_files.write(kind, file if kind == "npy" else path, 5)
    blocks = split(files(path, kind=kind), unit_size=5, decode=decode)
    assert record_files.ids(kind, blocks[0]) == [0, 1, 2, 3, 4]
    for wrong in ("text", "", ".npy", 3, ["npy"]):
        with pytest.raises(ValueError, match="kind is .*: pass one of array_record, tfrecord, par"):
            files(path, kind=wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_pattern_may_be_empty(kind, tmp_path):
    for name, size in (("a", 3), ("b", 0), ("c", 2)):
        decode = record_files.write(kind, tmp_path / f"{name}.{kind}", size, first=10 * size)
    if kind == "bin":
        (tmp_path / "b.bin").write_bytes(b"")
    blocks = split(opened(tmp_path / f"*.{kind}"), unit_size=4, decode=decode)
    assert [record_files.ids(kind, block) for block in blocks] == [[30, 31, 32], [20, 21]]
    with pytest.raises(ValueError, match="no file holds a record. Pass one that does"):
        opened(tmp_path / f"[b].{kind}")
    with pytest.raises(ValueError, match=f"b.{kind} holds no records: leave it out"):
        opened(tmp_path / f"b.{kind}")


def test_a_short_name_of_tfrecord(tmp_path):
    record_files.write_tfrecord(tmp_path / "x.tfrec", [b"a"])
    assert files(tmp_path / "x.tfrec")[0].read(0, 1) == [b"a"]


# Checksums


@pytest.mark.parametrize("place", range(16 * 3 + 6))
def test_a_flipped_bit_is_named_wherever_it_is(place, tmp_path):
    """Records of 1, 0 and 5 bytes: in a length at once, in the bytes when they are read."""
    path, starts = tmp_path / "x.tfrecord", [0, 17, 33]
    record_files.write_tfrecord(path, [b"a", b"", b"hello"])
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << place % 8
    path.write_bytes(data)
    number = max(i for i, start in enumerate(starts) if start <= place)
    message = f"the checksum of the {{}} of record {number} is wrong"
    if place - starts[number] < 12:
        with pytest.raises(ValueError, match=message.format("length") + "[.] Replace the file, or"):
            files(path)
        return
    blocks = split(files(path), unit_size=1)
    for other in {0, 1, 2} - {number}:
        assert blocks[other].tolist() == [[b"a", b"", b"hello"][other]]
    with pytest.raises(ValueError, match=message.format("bytes") + "[.] The file is damaged: repl"):
        blocks[number]
    with pytest.raises(ValueError, match=message.format("bytes")):
        blocks.read([0, 1, 2])


def test_a_hole_of_zeros_is_no_row_of_empty_records(tmp_path):
    path = tmp_path / "x.tfrecord"
    record_files.write_tfrecord(path, [b"a" * 16] * 9)
    data = bytearray(path.read_bytes())
    data[64:160] = bytes(96)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="the checksum of the length of record 2 is wrong"):
        files(path)


def test_a_flipped_bit_in_a_page_of_parquet_that_has_a_checksum(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    table = pa.table({"x": np.arange(1000)})
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(table, tmp_path / "x.parquet", **options)
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[4000] ^= 1
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(ValueError, match="records 0 to 999, cannot be read: .*is damaged: replace"):
        files(tmp_path / "x.parquet")[0].read(0, 1000)


# Arrays


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3), (4, 1, 1), (1, 7), (6, 2, 1, 3)])
@pytest.mark.parametrize("dtype", [np.int16, ">f8", ml_dtypes.bfloat16])
def test_arrays_in_the_order_of_fortran(shape, dtype, tmp_path):
    array = np.asfortranarray(RNG.integers(0, 99, shape).astype(dtype))
    (part,) = files(saved(tmp_path / "x.npy", array))
    for start in range(len(array)):
        for stop in range(start + 1, len(array) + 1):
            found = part.read(start, stop)
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array[start:stop])


def test_bfloat16_is_read_as_what_it_was(tmp_path):
    array = np.array([[1.5, -2.0], [3e38, 1e-3]], ml_dtypes.bfloat16)
    found = split(files(saved(tmp_path / "x.npy", array)), unit_size=2)[0]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_structured_arrays_are_dicts(tmp_path):
    kind = [("id", ">i8"), ("x", "f4", (2,)), ("of", [("a", "u1"), ("b", "f2")])]
    array = np.zeros(5, kind)
    array["id"], array["x"], array["of"]["b"] = np.arange(5), RNG.normal(size=(5, 2)), np.arange(5)
    found = split(files(saved(tmp_path / "x.npy", array)), unit_size=3)[1]
    assert found["id"].tolist() == [3, 4] and found["of"]["b"].tolist() == [3, 4]
    np.testing.assert_array_equal(found["x"], array["x"][3:])


def test_a_header_that_claims_more_than_the_file_has(tmp_path):
    path = saved(tmp_path / "x.npy", np.zeros(3))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"(3,), }" + b" " * 12, b"(300000000000,), } "))
    assert np.lib.format.open_memmap  # a header of 2.4 TB
    with pytest.raises(ValueError, match="x.npy cannot be read: .*size.* Replace the file"):
        files(path)
    path.write_bytes(struct.pack("<Q", 2**62) + record_files.crc32c(struct.pack("<Q", 2**62)) * 2)
    with pytest.raises(ValueError, match="it ends within record 0"):
        files(path, kind="tfrecord")


@pytest.mark.parametrize("kind", ["tfrecord", "parquet", "npy", "array_record"])
def test_packed_files_are_to_be_unpacked(kind, tmp_path):
    path = tmp_path / f"x.{kind}"
    record_files.write(kind, path, 5)
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match=f"x.{kind} is packed by gzip: unpack it first"):
        files(path)
    with zipfile.ZipFile(tmp_path / "y.npy", "w") as archive:
        archive.writestr("x", "text")
    with pytest.raises(ValueError, match="y.npy is packed by zip: unpack it first"):
        files(tmp_path / "y.npy")


def test_numbers_without_a_header(tmp_path):
    np.arange(99.0).tofile(tmp_path / "x.npy")
    with pytest.raises(
        ValueError, match=r"it has no header of np.save \(of plain numbers pass np.m"
    ):
        files(tmp_path / "x.npy")


def test_arrays_with_masks_are_refused():
    with pytest.raises(ValueError, match="a masked array: fill its missing values in, by filled"):
        split({"x": np.ma.array([1, 2], mask=[0, 1])}, unit_size=1)
    with pytest.raises(ValueError, match="the arrays, record 1: x has no value"):
        split({"x": np.array(["a", None], object)}, unit_size=2)[0]


# Files that are open, and files that change


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts handles as Linux lists them")
@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "parquet", "npy"])
def test_a_bounded_number_of_files_is_open(kind, tmp_path):
    """150 files, five threads: those that are read, and OPEN more."""
    for i in range(150):
        decode = record_files.write(kind, tmp_path / f"{i:03}.{kind}", 4, first=10 * i)
    blocks = split(files(tmp_path / f"*.{kind}"), unit_size=2, decode=decode)
    before, most, wrong = len(os.listdir("/proc/self/fd")), [], []

    def work(thread):
        for unit in np.random.default_rng(thread).permutation(len(blocks)).tolist():
            first = unit // 2 * 10 + unit % 2 * 2
            if record_files.ids(kind, blocks[unit]) != [first, first + 1]:
                wrong.append(unit)
            most.append(len(os.listdir("/proc/self/fd")))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert max(most) - before <= OPEN + 2 * len(threads)  # a thread lists a folder, too
    assert max(most) - before > len(threads)  # files do stay open
    del blocks
    assert len(os.listdir("/proc/self/fd")) <= before


def test_files_that_are_open_are_read_again_without_opening(tmp_path, monkeypatch):
    paths = [saved(tmp_path / f"{i}.npy", np.arange(4) + i) for i in range(3)]
    blocks, opens, real = split(files(paths), unit_size=2), [], os.open
    monkeypatch.setattr(os, "open", lambda *args: opens.append(args[0]) or real(*args))
    for _ in range(3):
        assert [block[0] for block in blocks] == [0, 2, 1, 3, 2, 4]
    assert opens == [str(path) for path in paths]


def rewritten(kind, path):
    record_files.write(kind, path, 40, first=50)


def replaced(kind, path):
    record_files.write(kind, path.with_name(f"new.{kind}"), 40, first=50)
    os.replace(path.with_name(f"new.{kind}"), path)


@pytest.mark.parametrize("change", [rewritten, replaced])
@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_what_it_was_when_it_was_indexed(kind, read_before, change, tmp_path):
    """Rewritten in place or replaced, with the same size, before or after the first read."""
    path = tmp_path / f"data.{kind}"
    decode = record_files.write(kind, path, 40, first=10)
    blocks = split(opened(path), unit_size=4, decode=decode)
    if read_before:
        assert record_files.ids(kind, blocks[1]) == [14, 15, 16, 17]
    change(kind, path)
    for unit in (0, 1):
        with pytest.raises(ValueError, match=f"data.{kind}, records .*The file has changed since"):
            blocks[unit]
    blocks = split(opened(path), unit_size=4, decode=decode)
    assert record_files.ids(kind, blocks[1]) == [54, 55, 56, 57]


def test_a_change_is_seen_while_blocks_are_read(tmp_path):
    """Of the one file that is written to; what was read before is of one state."""
    path = saved(tmp_path / "x.npy", np.zeros(800, np.int32))
    blocks = split(files(path), unit_size=4)
    state = ordering.shuffle_once(200).init(jax.random.key(0), None)
    found = []
    with read_blocks(
        blocks, lambda: state, window=1, batch_size=4, num_epochs=1, depth=1, readers=1
    ) as reads:
        with pytest.raises(LoadError, match="x.npy, records .*The file has changed since it was"):
            for batch, _ in reads:
                found.append(np.asarray(batch))
                if len(found) == 20:
                    with open(path, "r+b") as file:
                        file.seek(128)
                        file.write(np.ones(800, np.int32).tobytes())
    assert len(found) >= 20 and not np.concatenate(found).any()


def test_a_file_that_is_being_written_is_refused(tmp_path, monkeypatch):
    """Its index, digest and state are of one moment."""
    module = sys.modules["ordering.blocks.files"]  # the package has a function of this name
    path, digest = saved(tmp_path / "x.npy", np.zeros(8)), module._digest_of_file

    def late(name, whole):
        saved(path, np.ones(8))
        return digest(name, whole)

    monkeypatch.setattr(module, "_digest_of_file", late)
    with pytest.raises(ValueError, match="x.npy changes: wait until it is written"):
        files(path)


# Tokens


def documents(text, separator, side):
    """In a plain loop: a mark at the end belongs to the document before it, else to the next."""
    found, number = [], 0
    for i, token in enumerate(text):
        if side == "start" and token == separator and i:
            number += 1
        found.append(number)
        if side == "end" and token == separator:
            number += 1
    return found


@pytest.mark.parametrize("side", ["start", "end"])
def test_marks_stand_on_the_side_that_is_said(side, tmp_path):
    """With a mark in front, a document's first token is trained, by the mark, and no token of a
    document but the mark's own sees it across the border."""
    text = RNG.integers(0, 4, 301)
    text.astype(np.uint16).tofile(tmp_path / "x.bin")
    (part,) = tokens(tmp_path / "x.bin", length=20, separator=0, separator_at=side)
    found = part.read(0, 15)
    for i in range(15):
        window = text[20 * i : 20 * i + 21]
        assert found["tokens"][i].tolist() == window.tolist()
        assert found["documents"][i].tolist() == documents(window.tolist(), 0, side)
    trained = found["documents"][:, 1:] == found["documents"][:, :-1]
    marks = found["tokens"] == 0
    if side == "start":  # no target is a mark, and each mark has a target
        assert not (trained & marks[:, 1:]).any()
        assert (trained | ~marks[:, :-1] | marks[:, 1:]).all()
    with pytest.raises(ValueError, match="separator_at is 'front': pass one of end, start"):
        tokens(tmp_path / "x.bin", length=20, separator=0, separator_at="front")


@pytest.mark.parametrize(
    "separator, dtype, most",
    [(70000, None, 65535), (128001, np.uint16, 65535), (256, np.uint8, 255),
     (2**31, "u4", 2**31 - 1), (40000, np.int16, 32767), (2**31, "i8", 2**31 - 1)],
)  # fmt: skip
def test_a_separator_that_no_token_can_be_is_refused(separator, dtype, most, tmp_path):
    np.zeros(64, np.uint64).tofile(tmp_path / "x.bin")
    with pytest.raises(
        ValueError, match=f"separator is {separator}, and .* are at most {most}: pas"
    ):
        tokens(tmp_path / "x.bin", length=3, separator=separator, dtype=dtype)
    tokens(tmp_path / "x.bin", length=3, separator=most, dtype=dtype)


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "<i8", "<u8"])
def test_a_token_beyond_int32_is_refused(dtype, tmp_path):
    text = np.arange(31).astype(dtype)
    text[20] = 2**31
    text.tofile(tmp_path / "x.bin")
    (part,) = tokens(tmp_path / "x.bin", length=10, dtype=dtype)
    assert part.read(0, 1)["tokens"].tolist() == [list(range(11))]
    with pytest.raises(
        ValueError, match="records 1 to 2, .* 2147483648 is no token of int32: pass"
    ):
        part.read(1, 3)


@pytest.mark.parametrize("magic, version, dtype", [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_the_header_of_llm_c_is_known(magic, version, dtype, tmp_path):
    """256 numbers of int32: a magic one, the version, how many tokens follow."""
    path, text = tmp_path / "x.bin", np.arange(50000, 50031).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(text)
    path.write_bytes(header.tobytes() + text.tobytes())
    for given in ({}, {"dtype": dtype}, {"dtype": dtype, "header_bytes": 1024}):
        (part,) = tokens(path, length=10, **given)
        assert part.num_records == 3
        assert part.read(0, 3)["tokens"][:, 0].tolist() == [50000, 50010, 50020]
    with pytest.raises(ValueError, match=f"dtype is int64, and the file says .*{dtype[1:][0]}int"):
        tokens(path, length=10, dtype=np.int64)
    assert tokens(path, length=10, header_bytes=0, dtype=dtype)[0].num_records > 3
    path.write_bytes(header.tobytes() + text[:-1].tobytes())
    with pytest.raises(
        ValueError, match="it has 30 tokens, and its header says 31. Replace the fil"
    ):
        tokens(path, length=10)


def test_the_index_of_megatron_names_the_type(tmp_path):
    """The magic bytes, version 1 in 8 bytes, the code of the type; here 4, int32."""
    text = np.arange(100000, 100021, dtype=np.int32)
    text.tofile(tmp_path / "x_document.bin")
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 2) + struct.pack("<iqqq", 21, 0, 0, 1)
    (tmp_path / "x_document.idx").write_bytes(index)
    (part,) = tokens(tmp_path / "x_document.bin", length=10)
    assert part.read(0, 2)["tokens"][:, 0].tolist() == [100000, 100010]
    with pytest.raises(ValueError, match="dtype is uint16, and the file says int32: leave dtype"):
        tokens(tmp_path / "x_document.bin", length=10, dtype="uint16")
    with pytest.raises(
        ValueError, match="it is an index of Megatron: pass the .bin file beside it"
    ):
        tokens(tmp_path / "x_document.*", length=10)


def test_tokens_of_npy_are_read_by_its_header(tmp_path):
    text = np.arange(100000, 100021, dtype=np.uint32)
    (part,) = tokens(saved(tmp_path / "x.npy", text), length=10)
    assert part.read(0, 2)["tokens"].tolist() == [
        list(range(100000 + i, 100011 + i)) for i in (0, 10)
    ]
    for array, message in (
        (text.astype(float), "it holds float64, and tokens are whole numbers"),
        (text[None], r"its records have the shape \(21,\): read it by files"),
    ):
        with pytest.raises(ValueError, match=message):
            tokens(saved(tmp_path / "y.npy", array), length=10)


def test_bytes_that_make_no_token_are_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(33))
    with pytest.raises(
        ValueError, match="it has 16 tokens of uint16 and 1 bytes more: pass the dt"
    ):
        tokens(tmp_path / "x.bin", length=3)
    (tmp_path / "x.bin.gz").write_bytes(gzip.compress(bytes(64)))
    with pytest.raises(ValueError, match="x.bin.gz is packed by gzip: unpack it first"):
        tokens(tmp_path / "x.bin.gz", length=3)
    with pytest.raises(ValueError, match="x.bin.gz is packed by gzip: unpack it first"):
        files(tmp_path / "x.bin.gz")
    (tmp_path / "x.tfrecord").write_bytes(bytes(64))
    with pytest.raises(ValueError, match="named as a file of another kind: read it by files"):
        tokens(tmp_path / "x.tfrecord", length=3)
