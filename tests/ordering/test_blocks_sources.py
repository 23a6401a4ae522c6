"""People's own files: names, states, checksums and types as they are found on disks."""

import functools
import gzip
import io
import os
import pathlib
import re
import shutil
import struct
import threading

import jax
import ml_dtypes
import numpy as np
import pytest

import ordering
from ordering.blocks import files, read_blocks, sources, split, tokens
from ordering.blocks.sources import OPEN, _opened
from ordering.data import LoadError, as_source
from tests import record_files
from tests.record_files import KINDS, crc32c, opened

RNG, KEY = np.random.default_rng(0), jax.random.key(0)
of_tokens = functools.partial(tokens, length=3)


def saved(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)
    return path


# Names


@pytest.mark.parametrize("name", ["run[1]", "run*"])
def test_a_path_that_exists_is_no_pattern(name, tmp_path, monkeypatch):
    """Nor is a folder of one, whose files a pattern then names."""
    saved(tmp_path / "run1" / "x.npy", np.arange(10, 12))
    saved(tmp_path / name / "x.npy", np.arange(2))
    for path in (tmp_path / name / "x.npy", tmp_path / name / "?.n*"):
        assert [part.read(0, 2).tolist() for part in files(path)] == [[0, 1]]
    (tmp_path / name / "x.npy").unlink()
    with pytest.raises(ValueError, match="x.npy"):
        files(tmp_path / name / "x.npy")
    saved(tmp_path / "x[1].npy", np.arange(5))
    saved(tmp_path / "x1.npy", np.arange(6))
    monkeypatch.chdir(tmp_path)
    assert len(files("x[1].npy")[0]) == 5
    assert [len(part) for part in files("x[1-2].npy")] == [6]


@pytest.mark.parametrize("path", ["gs://bucket/x.npy", pathlib.PurePosixPath("gs://bucket/x.npy")])
def test_paths_of_buckets_are_refused(path):
    with pytest.raises(ValueError, match=f"{path}: .* disk"):
        files(path)


def test_a_file_that_is_named_twice_is_read_once(tmp_path):
    """By two patterns, a path beside a pattern, a link, and another way to write a path."""
    saved(tmp_path / "train-a.npy", np.arange(4))
    saved(tmp_path / "train-b.npy", np.arange(4, 6))
    (tmp_path / "link.npy").symlink_to(tmp_path / "train-a.npy")
    first = [tmp_path / "train-b.npy", tmp_path / "*a.npy"]
    for more in ("train*.npy", "link.npy", f"../{tmp_path.name}/train-a.npy"):
        blocks = split(files([*first, tmp_path / more]), unit_size=4)
        assert [block.tolist() for block in blocks] == [[4, 5], [0, 1, 2, 3]]


@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "parquet", "npy"])
def test_a_kind_can_be_given(kind, tmp_path):
    path = tmp_path / "train-00000-of-01024"
    with open(path, "wb") as file:
        decode = record_files.write(kind, file if kind == "npy" else path, 5)
    blocks = split(files(path, kind=kind), unit_size=5, decode=decode)
    assert record_files.ids(kind, blocks[0]) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="kind is 'text'.* array_record"):
        files(path, kind="text")
    with pytest.raises(ValueError, match="train-00000-of-01024 .*kind=.* array_record"):
        files(path)


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_pattern_may_be_empty(kind, tmp_path):
    for name, size in (("a", 3), ("b", 0), ("c", 2)):
        decode = record_files.write(kind, tmp_path / f"{name}.{kind}", size, first=10 * size)
    if kind == "bin":
        (tmp_path / "b.bin").write_bytes(b"")
    blocks = split(opened(tmp_path / f"*.{kind}"), unit_size=4, decode=decode)
    assert [record_files.ids(kind, block) for block in blocks] == [[30, 31, 32], [20, 21]]
    with pytest.raises(ValueError, match="no file holds a record"):
        opened(tmp_path / f"[b].{kind}")
    with pytest.raises(ValueError, match=f"b.{kind} "):
        opened(tmp_path / f"b.{kind}")


# Checksums


def test_a_flipped_bit_is_named_wherever_it_is(tmp_path):
    """Records of 1, 0 and 5 bytes: in a length at once, in the bytes when they are read."""
    path, starts, records = tmp_path / "x.tfrec", [0, 17, 33], [b"a", b"", b"hello"]
    record_files.write_tfrecord(path, records)
    whole = path.read_bytes()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        number = max(i for i, start in enumerate(starts) if start <= place)
        message = f"x.tfrec.* {{}} of record {number} "
        if place - starts[number] < 12:
            with pytest.raises(ValueError, match=message.format("length")):
                files(path)
            continue
        blocks = split(files(path), unit_size=1)
        for other in {0, 1, 2} - {number}:
            assert blocks[other].tolist() == [records[other]]
        with pytest.raises(ValueError, match=message.format("bytes")):
            blocks.read([0, 1, 2])


def test_a_flipped_bit_in_a_page_of_parquet_that_has_a_checksum(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    table = pa.table({"x": np.arange(1000)})
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    parquet.write_table(table, tmp_path / "x.parquet", **options)
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[4000] ^= 1
    (tmp_path / "x.parquet").write_bytes(data)
    with pytest.raises(ValueError, match="x.parquet, records 0 to 999"):
        files(tmp_path / "x.parquet")[0].read(0, 1000)


# Arrays


DATA = {  # what split takes as other readers do, or refuses with the line to write
    "masks": ({"x": np.ma.array([1, 2], mask=[0, 1])}, r"parts\['x'\]"),
    "missing": ({"x": np.array(["a", None], object)}, r"parts\['x'\]"),
    "types": ([np.uint64(2**63 + 1), np.int64(5)], "example 1 .*int64.* example 0"),
    "a column": ({"x": [1, 2]}, r"parts\['x'\] .*np.array\(parts\['x'\]\)"),
}


@pytest.mark.parametrize("data, message", DATA.values(), ids=DATA)
def test_data_that_other_readers_refuse_is_refused(data, message):
    with pytest.raises(ValueError, match=message):
        split(data, unit_size=2)


def test_frames_are_refused_with_the_conversion():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"id": [2**53 + 1, 2**53 + 3], "x": [0.5, 1.0]})
    with pytest.raises(ValueError, match=r"parts .*DataFrame.*\.to_numpy"):
        split(frame, unit_size=2)
    parts = {name: column.to_numpy() for name, column in frame.items()}
    assert split(parts, unit_size=2)[0]["id"].tolist() == [2**53 + 1, 2**53 + 3]


@pytest.mark.parametrize(
    "rows",
    [
        [np.arange(3) + i for i in range(5)],
        [[i, i + 1, i + 2] for i in range(5)],
        [{"x": (i, "a")} for i in range(5)],
    ],
    ids=["arrays", "lists", "trees"],
)
def test_a_list_of_examples_is_its_rows(rows):
    keep = np.arange(5) != 1
    blocks, some = split(rows, unit_size=2), split(rows, unit_size=2, keep=keep)
    for u, i in ((0, [0, 1]), (2, [4])):
        expected, actual = as_source(rows)[np.array(i)], blocks[u]
        assert jax.tree.map(lambda x: x.tolist(), actual) == jax.tree.map(
            lambda x: x.tolist(), expected
        )
    assert jax.tree.leaves(some[0])[0].tolist() == jax.tree.leaves(as_source(rows)[:1])[0].tolist()
    assert not np.array_equal(blocks.digests, split(rows[::-1], unit_size=2).digests)


# Files that are open, and files that change


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts handles as Linux lists them")
@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "parquet", "npy"])
def test_a_bounded_number_of_files_is_open(kind, tmp_path):
    """100 files, five threads: those that are read, and OPEN more."""
    for i in range(100):
        decode = record_files.write(kind, tmp_path / f"{i:03}.{kind}", 4, first=10 * i)
    blocks = split(files(tmp_path / f"*.{kind}"), unit_size=2, decode=decode)
    _opened.cache_clear()
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


def truncated(kind, path):
    os.truncate(path, path.stat().st_size // 2)


def removed(kind, path):
    path.unlink()


def rewritten(kind, path):
    record_files.write(kind, path, 40, first=50)


def replaced(kind, path):
    record_files.write(kind, path.with_name(f"new.{kind}"), 40, first=50)
    os.replace(path.with_name(f"new.{kind}"), path)


@pytest.mark.parametrize("change", [rewritten, replaced, truncated, removed])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_what_it_was_when_it_was_indexed(kind, change, tmp_path):
    """With the same size or half of it, before or after the first read."""
    path = tmp_path / f"data.{kind}"
    decode = record_files.write(kind, path, 40, first=10)
    unread, blocks = (split(opened(path), unit_size=4, decode=decode) for _ in range(2))
    assert record_files.ids(kind, blocks[1]) == [14, 15, 16, 17]
    change(kind, path)
    for unit, changed in ((0, unread), (0, blocks), (1, blocks)):
        with pytest.raises(ValueError, match=f"data.{kind} .*changed"):
            changed[unit]


def test_a_file_is_looked_at_once_in_a_window(tmp_path, monkeypatch):
    """Its size and time of change, not beside every block."""
    for name in "ab":
        saved(tmp_path / f"{name}.npy", np.arange(64))
    blocks = split(files(tmp_path / "?.npy"), unit_size=4)
    order = ordering.baselines.shuffle_once(len(blocks))
    seen, stat = [], os.stat

    def counted(path, *args, **options):
        seen.append(os.fspath(path)) if str(path).endswith(".npy") else None
        return stat(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", counted)
        with read_blocks(blocks, order, KEY, window=16, batch_size=64, num_epochs=1) as reads:
            assert len(list(reads)) == 2
    assert len(seen) <= 2 * 2 * 2  # files, windows, and whether one is there


def test_a_file_that_changes_in_an_epoch_is_refused(tmp_path):
    path = saved(tmp_path / "x.npy", np.arange(64))
    blocks = split(files(path), unit_size=4)
    order = ordering.baselines.shuffle_once(len(blocks))
    with read_blocks(blocks, order, KEY, window=2, batch_size=8, depth=1) as reads:
        next(reads)
        saved(path, np.arange(64, 128))
        with pytest.raises(LoadError, match="x.npy .*changed"):
            assert max(int(x) for _ in range(8) for x in next(reads)[0]) < 64


# Bytes and arrays


class Plain:
    """A source of one's own that gives arrays."""

    def __len__(self):
        return 8

    def read(self, start, stop):
        return np.arange(start, stop)


def test_a_decoder_of_arrays_is_refused(tmp_path):
    saved(tmp_path / "x.npy", np.arange(8))
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "x.bin")
    of_files = files(tmp_path / "x.npy"), tokens(tmp_path / "x.bin", length=1)
    for parts in (*of_files, np.arange(8), {"x": np.arange(8)}):
        with pytest.raises(ValueError, match="decode "):
            split(parts, unit_size=2, decode=lambda record: record)
    for keep in (None, lambda record: True):
        with pytest.raises(ValueError, match="decode .*Plain"):
            split([Plain()], unit_size=2, decode=lambda record: record, keep=keep)[0]


def test_a_decoder_that_raises_stop_iteration_loses_no_record():
    """`map` would take it for the end of the records."""
    decode = lambda record: next(iter(())) if record == b"2" else int(record)  # noqa: E731
    part = sources.Part("bytes", 4, (0, 0), lambda start, stop: [b"0", b"1", b"2", b"3"])
    with pytest.raises(RuntimeError, match="the source raised StopIteration"):
        split([part], unit_size=4, decode=decode)[0]


def types_of(tmp_path, kind, *arrays):
    """Blocks of one record each, of files of a kind; records that are decoded for bytes."""
    for i, x in enumerate(arrays):
        if kind == "npy":
            saved(tmp_path / f"{i}.npy", x)
        else:
            record_files.WRITERS[kind](tmp_path / f"{i}.{kind}", [b"%d" % i])
    decode = None if kind == "npy" else lambda record: arrays[int(record)][0]
    return split(files(tmp_path / f"*.{kind}"), unit_size=1, decode=decode)


OTHERS = {
    "uint64": (np.array([7]), np.array([7], np.uint64)),
    "float64": (np.float32([1]), np.float64([1])),
    "a shape": (np.zeros((1, 2)), np.zeros((1, 3))),
}


@pytest.mark.parametrize("arrays", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("kind", ["npy", "tfrecord"])
def test_types_of_another_window_are_refused(kind, arrays, tmp_path):
    blocks = types_of(tmp_path, kind, *arrays)
    order = ordering.baselines.shuffle_once(2)
    with read_blocks(blocks, order, KEY, window=1, batch_size=1, num_epochs=1) as reads:
        with pytest.raises(LoadError, match=r"load 1 .*unit \d .*unit"):
            list(reads)
    blocks = types_of(tmp_path, kind, *arrays)
    assert blocks[0].dtype == arrays[0].dtype
    with pytest.raises(ValueError, match="unit 1 .*unit 0"):
        blocks[1]


# Files that are written


def test_a_file_that_is_being_written_is_refused(tmp_path, monkeypatch):
    """Its index, digest and state are of one moment."""
    path, digest_of = saved(tmp_path / "x.npy", np.zeros(8)), sources.digest_of

    def late(*args):
        saved(path, np.ones(8))
        return digest_of(*args)

    monkeypatch.setattr(sources, "digest_of", late)
    with pytest.raises(ValueError, match="x.npy changes"):
        files(path)


# Tokens


@pytest.mark.parametrize(
    "separator, dtype, most",
    [
        (70000, None, 65535),
        (256, np.uint8, 255),
        (2**31, "u4", 2**31 - 1),
        (40000, np.int16, 32767),
    ],
)
def test_a_separator_that_no_token_can_be_is_refused(separator, dtype, most, tmp_path):
    np.zeros(64, np.uint64).tofile(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=f"separator is {separator}, .* {most}"):
        tokens(tmp_path / "x.bin", length=3, separator=separator, dtype=dtype)
    tokens(tmp_path / "x.bin", length=3, separator=most, dtype=dtype)


@pytest.mark.parametrize(
    "dtype, token",
    [("i4", -1), ("<i8", -(2**31) - 1), (np.int16, -100), ("u8", 2**63), (">u4", 2**31)],
)
def test_a_token_below_0_or_beyond_int32_is_refused(dtype, token, tmp_path):
    text = np.array([5, token, 3, 1, 2], dtype)
    for path in (tmp_path / "x.bin", saved(tmp_path / "x.npy", text)):
        text.tofile(path) if path.suffix == ".bin" else None
        (part,) = tokens(path, length=2, dtype=dtype)
        assert part.read(1, 2)["tokens"].tolist() == [[3, 1, 2]]
        with pytest.raises(ValueError, match=f"records 0 to 0, .* {token} .*int32"):
            part.read(0, 1)


@pytest.mark.parametrize("magic, version, dtype", [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_the_header_of_llm_c_is_known(magic, version, dtype, tmp_path):
    """256 numbers of int32: a magic one, the version, how many tokens follow."""
    path, text = tmp_path / "x.bin", np.arange(50000, 50031).astype(dtype)
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(text)
    path.write_bytes(header.tobytes() + text.tobytes())
    for given in ({}, {"dtype": dtype}, {"dtype": dtype, "header_bytes": 1024}):
        (part,) = tokens(path, length=10, **given)
        assert len(part) == 3
        assert part.read(0, 3)["tokens"][:, 0].tolist() == [50000, 50010, 50020]
    with pytest.raises(ValueError, match=f"dtype is int64, .*{dtype[1:][0]}int"):
        tokens(path, length=10, dtype=np.int64)
    assert len(tokens(path, length=10, header_bytes=0, dtype=dtype)[0]) > 3
    path.write_bytes(header.tobytes() + text[:-1].tobytes())
    with pytest.raises(ValueError, match="30 tokens, .* 31"):
        tokens(path, length=10)


def test_the_index_of_megatron_names_the_type(tmp_path):
    """The magic bytes, version 1 in 8 bytes, the code of the type; here 4, int32."""
    text = np.arange(100000, 100021, dtype=np.int32)
    text.tofile(tmp_path / "x_document.bin")
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 2) + struct.pack("<iqqq", 21, 0, 0, 1)
    (tmp_path / "x_document.idx").write_bytes(index)
    (part,) = tokens(tmp_path / "x_document.bin", length=10)
    assert part.read(0, 2)["tokens"][:, 0].tolist() == [100000, 100010]
    with pytest.raises(ValueError, match="dtype is uint16, .* int32"):
        tokens(tmp_path / "x_document.bin", length=10, dtype="uint16")
    with pytest.raises(ValueError, match="x_document.idx"):
        tokens(tmp_path / "x_document.*", length=10)


# Files that are damaged, empty or others


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_before_training(kind, tmp_path):
    path = tmp_path / f"data.{kind}"
    with pytest.raises(ValueError, match=f"data.{kind}"):
        opened(path)
    record_files.write(kind, path, 40)
    data = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=f"data.{kind} "):
        opened(path)
    if kind == "bin":  # which is shorter, but whole
        return
    for size in (1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=f"data.{kind} cannot be read"):
            opened(path)
    path.write_bytes(bytes(reversed(data)))
    with pytest.raises(ValueError, match=f"data.{kind} cannot be read"):
        opened(path)


def test_columns_that_are_missing_or_have_lists_of_several_lengths(tmp_path):
    path = tmp_path / "rows.parquet"
    record_files.write_parquet(path, {"id": [1, 2, 3], "text": [[1], [2, 3], [4]]})
    with pytest.raises(ValueError, match="rows.parquet .*'word'"):
        files(path, columns=["id", "word"])
    for columns in ("id", ["id", "id"]):
        with pytest.raises(ValueError, match="columns is "):
            files(path, columns=columns)
    blocks = split(files(path), unit_size=2)
    assert blocks[1]["text"].tolist() == [[4]]
    with pytest.raises(ValueError, match="rows.parquet, records 0 to 1: .* text "):
        blocks[0]


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


PACKED = gzip.compress(bytes(64))
NO_RECORDS = {  # how they are read, their name and bytes, and what the refusal names
    "one number": (files, "x.npy", npy(np.zeros(())), "single number"),
    "objects": (files, "x.npy", npy(np.array([None, 1])), "dtype"),
    "eight bits": (files, "x.npy", npy(np.zeros(3, ml_dtypes.float8_e5m2)), "'<f1'"),
    "four bits": (files, "x.npy", npy(np.zeros(3, ml_dtypes.int4)), "|V1"),
    "no numbers": (files, "x.npy", npy(np.zeros((3, 0))), "(0,)"),
    "no header": (files, "x.npy", bytes(99), "header"),
    "a zip": (files, "x.npy", b"PK\3\4" * 9, "packed"),
    "packed records": (files, "x.tfrecord", PACKED, "packed"),
    "a long record": (
        files,
        "x.tfrecord",
        struct.pack("<Q", 2**62) + crc32c(struct.pack("<Q", 2**62)) * 2,
        "record 0",
    ),
    "packed tokens": (of_tokens, "x.bin.gz", PACKED, "packed"),
    "no tokens": (of_tokens, "x.tfrecord", bytes(64), "files"),
    "a byte": (of_tokens, "x.bin", bytes(33), "16 tokens of uint16 and 1 bytes"),
    "floats": (of_tokens, "x.npy", npy(np.zeros(9)), "float64"),
    "an axis": (of_tokens, "x.npy", npy(np.zeros((1, 9))), "(9,)"),
}


@pytest.mark.parametrize("read, name, data, word", NO_RECORDS.values(), ids=NO_RECORDS)
def test_files_that_hold_no_records_of_the_kind(read, name, data, word, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"{name} .*{re.escape(word)}"):
        read(tmp_path / name)


def test_files_in_another_place_or_sequence(tmp_path):
    """The names do not count; the sequence does."""
    for name, first in (("a", 0), ("b", 50)):
        np.save(tmp_path / f"{name}.npy", np.arange(first, first + 8))

    def reads(pattern, state=None):
        blocks = split(files(pattern), unit_size=4)
        order = ordering.baselines.shuffle_once(len(blocks))
        return read_blocks(blocks, order, KEY, window=1, batch_size=4, state=state)

    state = reads(tmp_path / "*.npy").state()
    shutil.copytree(tmp_path, tmp_path / "copy")
    reads(tmp_path / "copy" / "*.npy", state).close()
    with pytest.raises(ValueError, match="b.npy "):
        reads([tmp_path / "b.npy", tmp_path / "a.npy"], state)
