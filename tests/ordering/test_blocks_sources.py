"""People's own files: names, states, checksums and types as they are found on disks."""

import functools
import gc
import gzip
import io
import os
import re
import shutil
import struct
import threading
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

import ordering
from ordering.blocks import files, read_blocks, sources, split, tokens
from ordering.blocks.sources import OPEN
from ordering.data import LoadError, as_source
from tests import record_files
from tests.record_files import KINDS, crc32c, opened

KEY = jax.random.key(0)
of_tokens = functools.partial(tokens, length=3)


def saved(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)
    return path


def in_order(blocks, **options):
    order = ordering.baselines.shuffle_once(len(blocks))
    return read_blocks(blocks, order, KEY, **options)


# Names


@pytest.mark.parametrize("name", ["run[1]", "run*"])
def test_a_path_that_exists_is_no_pattern(name, tmp_path, monkeypatch):
    """Nor is a folder of one, whose files a pattern then names."""
    saved(tmp_path / "run1" / "x.npy", np.arange(10, 12))
    saved(tmp_path / name / "x.npy", np.arange(2))
    for path in (tmp_path / name / "x.npy", tmp_path / name / "?.n*"):
        assert [part.read(0, 2).tolist() for part in files(path)] == [[0, 1]]
    saved(tmp_path / "x[1].npy", np.arange(5))
    saved(tmp_path / "x1.npy", np.arange(6))
    monkeypatch.chdir(tmp_path)
    assert len(files("x[1].npy")[0]) == 5
    assert [len(part) for part in files("x[1-2].npy")] == [6]
    with pytest.raises(ValueError, match="gs://bucket/x.npy.* disk"):
        files("gs://bucket/x.npy")


def test_files_are_read_in_the_sequence_of_the_list_and_each_once(tmp_path):
    """By two patterns, a path beside a pattern, a link, and another way to write a path."""
    for name, first in [("b1.npy", 10), ("a2.npy", 20), ("a1.NPY", 30), ("c.npy-1-of-2", 40)]:
        with open(tmp_path / name, "wb") as file:
            np.save(file, np.arange(first, first + 2))
    (tmp_path / "link.npy").symlink_to(tmp_path / "a2.npy")
    first = [tmp_path / "b*.npy", str(tmp_path / "a*"), tmp_path / "c.npy-1-of-2"]
    for more in ("a*", "link.npy", f"../{tmp_path.name}/b1.npy", "**/c*"):
        blocks = split(files([*first, tmp_path / more]), unit_size=3)
        assert [block.tolist() for block in blocks] == [[10, 11], [30, 31], [20, 21], [40, 41]]


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_pattern_may_be_empty_and_a_kind_can_be_given(kind, tmp_path):
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
    if kind != "bin":
        (tmp_path / f"a.{kind}").rename(tmp_path / "train-00000-of-01024")
        with pytest.raises(ValueError, match="train-00000-of-01024 .*kind=.* array_record"):
            files(tmp_path / "train*")
        blocks = split(files(tmp_path / "train*", kind=kind), unit_size=5, decode=decode)
        assert record_files.ids(kind, blocks[0]) == [30, 31, 32]


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


# Arrays and lists


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
    blocks, some = (split(rows, unit_size=2, keep=k) for k in (None, np.arange(5) != 1))
    for actual, i in ((blocks[0], [0, 1]), (blocks[2], [4]), (some[0], [0])):
        jax.tree.map(np.testing.assert_array_equal, actual, as_source(rows)[np.array(i)])
    assert not np.array_equal(blocks.digests, split(rows[::-1], unit_size=2).digests)


OTHER_ARRAYS = {
    "type": np.arange(10, dtype=np.int64),
    "name": {"z": np.arange(10, dtype=np.int32)},
    "shape": np.arange(10, dtype=np.int32)[:, None],
    "text": np.array([*"abcdefghij"], object),
    "a value": np.arange(10, dtype=np.int32) * (np.arange(10) != 3),
}


@pytest.mark.parametrize("other", OTHER_ARRAYS.values(), ids=OTHER_ARRAYS)
def test_a_digest_of_arrays_has_their_types_names_and_values(other):
    arrays = np.arange(10, dtype=np.int32)
    digests = split(arrays, unit_size=2).digests
    assert np.array_equal(digests, split(arrays.copy(), unit_size=3).digests)
    assert not np.array_equal(digests, split(other, unit_size=2).digests)


def test_a_digest_of_arrays_takes_no_memory_for_their_numbers():
    """64 samples of their bytes; as texts, 3 million numbers take 200 MiB."""
    images = np.zeros((1000, 32, 32, 3), np.float32)
    tracemalloc.start()
    try:
        split(images, unit_size=64)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_blocks_count_as_lists_do():
    blocks = split(np.arange(10), unit_size=4)
    assert (
        [x.tolist() for x in blocks[1:3]]
        == [[4, 5, 6, 7], [8, 9]]
        == [x.tolist() for x in blocks[-2:]]
    )
    assert blocks[-1].tolist() == blocks[np.int64(2)].tolist() == [8, 9]
    for unit in (3, -4):
        with pytest.raises(IndexError):
            blocks[unit]


def test_a_filter_of_a_sorted_file_leaves_no_batch_of_filling():
    """410 records of 4096, in 7 blocks of 64 or fewer; two windows are 8 + 6 batches."""
    x = np.arange(4096)
    blocks = split(x, unit_size=64, keep=np.sort(x % 10) == 3)
    assert (len(blocks), blocks.num_records) == (7, 410)
    order = ordering.random_reshuffling(7, units_per_step=4)
    with read_blocks(blocks, order, KEY, batch_size=32, num_epochs=1) as reads:
        places = [np.asarray(places) for _, places in reads]
    assert len(places) == 14 and sum((x >= 0).sum() for x in places) == 410


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_blocks_of_a_random_filter_or_of_small_files_are_more_than_half_full(share, tmp_path):
    kept = np.random.default_rng(0).random(4096) < share
    some = split(np.arange(4096), unit_size=64, keep=kept)
    assert np.concatenate([*some]).tolist() == np.flatnonzero(kept).tolist()
    for i in range(40):
        saved(tmp_path / f"{i:02}.npy", np.arange(3 * i, 3 * i + 3))
    small = split(files(tmp_path / "*.npy"), unit_size=16)
    assert np.concatenate([*small]).tolist() == [*range(120)]
    assert small.sizes.tolist() == [15] * 8
    for blocks in (some, small):
        assert blocks.sizes[:-1].min() > blocks.unit_size / 2 - 1


class Plain:
    """A source of one's own that gives arrays, or what it is told to."""

    def __init__(self, records=None):
        self.records = records

    def __len__(self):
        return 8

    def read(self, start, stop):
        return np.arange(start, stop) if self.records is None else self.records


MORE = np.arange(3), np.array(1), "text", [b"1"], {"x": np.arange(2), "y": np.arange(1)}


@pytest.mark.parametrize("records", MORE)
def test_a_source_of_ones_own_that_gives_other_records_than_two_is_named(records):
    with pytest.raises(ValueError, match=r"Plain.read\(0, 2\) .* 2"):
        split([Plain(records)], unit_size=2)[0]


def test_a_decoder_of_arrays_is_refused(tmp_path):
    saved(tmp_path / "x.npy", np.arange(8))
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "x.bin")
    of_files = files(tmp_path / "x.npy"), tokens(tmp_path / "x.bin", length=1)
    for parts in (*of_files, np.arange(8)):
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


OTHERS = {
    "uint64": (np.array([7]), np.array([7], np.uint64)),
    "float64": (np.float32([1]), np.float64([1])),
    "a shape": (np.zeros((1, 2)), np.zeros((1, 3))),
}


@pytest.mark.parametrize("arrays", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("kind", ["npy", "tfrecord"])
def test_types_of_another_window_are_refused(kind, arrays, tmp_path):
    """Of arrays, and of what is decoded: NumPy would make float64 of int64 and uint64."""

    def blocks():
        decode = None if kind == "npy" else lambda record: arrays[int(record)][0]
        return split(files(tmp_path / f"*.{kind}"), unit_size=1, decode=decode)

    for i, x in enumerate(arrays):
        saved(tmp_path / f"{i}.npy", x)
        record_files.write_tfrecord(tmp_path / f"{i}.tfrecord", [b"%d" % i])
    if kind == "npy":  # the headers tell
        with pytest.raises(ValueError, match=r"1.npy is .*, and of .*0.npy .*same types"):
            blocks()
        return
    with in_order(blocks(), window=1, batch_size=1, num_epochs=1) as reads:
        with pytest.raises(LoadError, match=r"load 1 .*unit \d .*unit"):
            list(reads)
    for read in (lambda new: (new[0], new[1]), lambda new: new.read([0, 1])):
        with pytest.raises(ValueError, match="(unit|example) 1 .*(unit|example) 0|in one batch"):
            read(blocks())


# Files that are open, and files that change


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts handles as Linux lists them")
@pytest.mark.parametrize("kind", ["array_record", "tfrecord", "parquet", "npy"])
def test_a_bounded_number_of_files_is_open(kind, tmp_path):
    """More than stay open, by five threads: those that are read, and OPEN more."""
    for i in range(OPEN + 36):
        decode = record_files.write(kind, tmp_path / f"{i:03}.{kind}", 4, first=10 * i)
    blocks = split(files(tmp_path / f"*.{kind}"), unit_size=2, decode=decode)
    gc.collect()
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
    blocks = None
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("kind", ["array_record", "parquet", "npy"])
def test_a_file_is_opened_once_whichever_thread_reads_it(kind, tmp_path, monkeypatch):
    for i in range(40):
        decode = record_files.write(kind, tmp_path / f"{i:02}.{kind}", 8, first=8 * i)
    parts, opens = files(tmp_path / f"*.{kind}"), []
    open_ = type(parts[0]).open
    monkeypatch.setattr(
        type(parts[0]), "open", staticmethod(lambda path: opens.append(path) or open_(path))
    )
    blocks = split(parts, unit_size=4, decode=decode)
    order = ordering.random_reshuffling(len(blocks), units_per_step=8)
    with read_blocks(blocks, order, KEY, batch_size=32, num_epochs=3) as reads:
        assert len(list(reads)) == 30
    assert len(opens) <= 40 + 4 * 3  # two threads may read one file at once


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
    """Its size and time of change, not beside every block; a change in an epoch is refused."""
    for name in "ab":
        saved(tmp_path / f"{name}.npy", np.arange(64))
    blocks = split(files(tmp_path / "?.npy"), unit_size=4)
    seen, stat = [], os.stat

    def counted(path, *args, **options):
        seen.append(os.fspath(path)) if str(path).endswith(".npy") else None
        return stat(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", counted)
        with in_order(blocks, window=16, batch_size=64, num_epochs=1) as reads:
            assert len(list(reads)) == 2
    assert len(seen) <= 2 * 2 * 2  # files, windows, and whether one is there
    with in_order(blocks, window=2, batch_size=8, depth=1) as reads:
        next(reads)
        for name in "ab":
            saved(tmp_path / f"{name}.npy", np.arange(64, 128))
        with pytest.raises(LoadError, match=".npy .*changed"):
            assert max(int(x) for _ in range(16) for x in next(reads)[0]) < 64


def test_a_file_that_is_being_written_is_refused(tmp_path, monkeypatch):
    """Its index, digest and state are of one moment."""
    path, digest_of = saved(tmp_path / "x.npy", np.zeros(8)), sources.digest_of

    def late(*args):
        saved(path, np.ones(8))
        return digest_of(*args)

    monkeypatch.setattr(sources, "digest_of", late)
    with pytest.raises(ValueError, match="x.npy changes"):
        files(path)


# Files that are damaged, empty or others


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_before_training(kind, tmp_path):
    path = tmp_path / f"data.{kind}"
    record_files.write(kind, path, 40)
    data = path.read_bytes()
    damaged = [b""]  # tokens that are fewer are whole
    if kind != "bin":
        damaged += [data[:1], data[: len(data) // 2], data[:-1], bytes(reversed(data))]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"data.{kind} "):
            opened(path)


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


PACKED, LONG = gzip.compress(bytes(64)), struct.pack("<Q", 2**62)
NO_RECORDS = {  # how they are read, their name and bytes, and what the refusal names
    "one number": (files, "x.npy", npy(np.zeros(())), "single number"),
    "objects": (files, "x.npy", npy(np.array([None, 1])), "dtype"),
    "eight bits": (files, "x.npy", npy(np.zeros(3, ml_dtypes.float8_e5m2)), "'<f1'"),
    "four bits": (files, "x.npy", npy(np.zeros(3, ml_dtypes.int4)), "|V1"),
    "no numbers": (files, "x.npy", npy(np.zeros((3, 0))), "(0,)"),
    "no header": (files, "x.npy", bytes(99), "header"),
    "a zip": (files, "x.npy", b"PK\3\4" * 9, "packed"),
    "packed records": (files, "x.tfrecord", PACKED, "packed"),
    "a long record": (files, "x.tfrecord", LONG + crc32c(LONG) * 2, "record 0"),
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
        return in_order(split(files(pattern), unit_size=4), window=1, batch_size=4, state=state)

    state = reads(tmp_path / "*.npy").state()
    shutil.copytree(tmp_path, tmp_path / "copy")
    reads(tmp_path / "copy" / "*.npy", state).close()
    with pytest.raises(ValueError, match="b.npy "):
        reads([tmp_path / "b.npy", tmp_path / "a.npy"], state)
