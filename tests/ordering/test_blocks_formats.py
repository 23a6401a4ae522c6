"""Files of every kind give the records that were written, one request for a block."""

import multiprocessing
import os
import pickle
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from ordering.blocks import files, split, tokens
from ordering.blocks.sources import Part, _opened
from ordering.data import as_source
from tests import record_files, reference_blocks
from tests.record_files import KINDS

LETTERS = [b"", b"a", b"\0" * 5, bytes(range(256)) * 40, b"end"]


def opened(kind, path, size=11, first=0):
    """(the parts of a new file of numbers, their decoder)."""
    decode = record_files.write(kind, path, size, first)
    return record_files.opened(path), decode


@pytest.mark.parametrize("kind", record_files.WRITERS)
def test_records_are_the_bytes_that_were_written(kind, tmp_path):
    path = tmp_path / f"text.{kind}-00001-of-00002"
    record_files.WRITERS[kind](path, LETTERS)
    (part,) = files(path)
    assert len(part) == len(LETTERS) and part.name == str(path)
    for start in range(5):
        for stop in range(start + 1, 6):
            assert part.read(start, stop) == LETTERS[start:stop]


def test_a_tfrecord_is_that_of_tensorflow(tmp_path):
    """In both directions: what each writes, the other reads."""
    tf = pytest.importorskip("tensorflow")
    ours, theirs = tmp_path / "ours.tfrecord", tmp_path / "theirs.tfrecord"
    record_files.write_tfrecord(ours, LETTERS)
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        for record in LETTERS:
            writer.write(record)
    assert ours.read_bytes() == theirs.read_bytes()
    assert [x.numpy() for x in tf.data.TFRecordDataset(str(ours))] == LETTERS
    assert files(theirs)[0].read(0, 5) == LETTERS


def test_rows_of_parquet_over_the_borders_of_groups(tmp_path):
    """Groups of 4 rows, and one of 3; numbers, texts, booleans, lists and lists of lists."""
    rng = np.random.default_rng(0)
    columns = {
        "id": np.arange(11),
        "weight": rng.normal(size=11).astype(np.float32),
        "text": np.array([f"row {i}" for i in range(11)], object),
        "right": np.arange(11) % 3 == 0,
        "image": rng.integers(0, 256, (11, 6), dtype=np.uint8),
    }
    record_files.write_parquet(tmp_path / "rows.parquet", columns)
    (part,) = files(tmp_path / "rows.parquet")
    (two,) = files(tmp_path / "*.parquet", columns=["image", "id"])
    for start in range(11):
        for stop in range(start + 1, 12):
            records = part.read(start, stop)
            assert list(records) == list(columns)
            for name, column in columns.items():
                assert records[name].dtype == column.dtype
                np.testing.assert_array_equal(records[name], column[start:stop])
            assert set(two.read(start, stop)) == {"image", "id"}


@pytest.mark.parametrize(
    "order,shape", [("C", ()), ("F", (3,)), ("C", (2, 1, 4)), ("F", (2, 1, 4))]
)
@pytest.mark.parametrize("dtype", [np.float16, ">f8", np.bool_, np.complex64, bfloat16])
def test_arrays_are_read_with_any_type_shape_and_order(dtype, shape, order, tmp_path):
    array = np.random.default_rng(0).integers(0, 99, (7, *shape)).astype(dtype, order)
    np.save(tmp_path / "x.npy", array)
    (part,) = files(tmp_path / "x.npy")
    for start, stop in [(0, 7), (0, 1), (2, 6), (6, 7)]:
        records = part.read(start, stop)
        assert records.dtype == array.dtype
        np.testing.assert_array_equal(records, array[start:stop])


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=40),
    st.integers(1, 9),
    st.sampled_from([np.uint16, np.uint32, np.int64]),
    st.integers(0, 7),
    st.sampled_from([None, 0, 2]),
    st.sampled_from(["end", "start"]),
)
def test_windows_of_tokens_equal_the_slow_loop(text, length, dtype, header, separator, side):
    expected = reference_blocks.packed(text, length, separator, side)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"h" * header + np.array(text, dtype).tobytes())
        file.flush()
        given = {"dtype": dtype, "header_bytes": header}
        given |= {"separator": separator, "separator_at": side}
        if not expected:
            with pytest.raises(ValueError, match=f"has {len(text)} tokens .* takes {length + 1}"):
                tokens(file.name, length=length, **given)
            return
        (part,) = tokens(file.name, length=length, **given)
        assert len(part) == len(expected)
        for start in range(len(expected)):
            for stop in {start + 1, len(expected)}:
                records = part.read(start, stop)
                assert all(x.dtype == np.int32 for x in records.values())
                assert records["tokens"].tolist() == [w for w, _ in expected[start:stop]]
                if separator is not None:
                    assert records["documents"].tolist() == [d for _, d in expected[start:stop]]
                assert set(records) == {"tokens", "documents"} - {separator is None and "documents"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_block_is_one_request(kind, tmp_path, monkeypatch):
    """Also one call of the system, where the files are ours to read."""
    (first,), decode = opened(kind, tmp_path / f"a.{kind}", 11)
    (second,), _ = opened(kind, tmp_path / f"b.{kind}", 7, first=11)
    asked, calls, pread = [], [], os.pread

    def counted(part):
        def read(start, stop):
            asked.append((part.name, start, stop))
            return part.read(start, stop)

        return Part(part.name, len(part), part.digest, read)

    blocks = split([counted(first), counted(second)], unit_size=4, decode=decode, multiple_of=6)
    monkeypatch.setattr(os, "pread", lambda *args: calls.append(args) or pread(*args))
    assert [record_files.ids(kind, blocks[u]) for u in range(5)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10],
        [11, 12, 13, 14],
        [15, 16, 17],
    ]
    places = [(0, 4), (4, 8), (8, 11)], [(0, 4), (4, 7)]
    assert asked == [(first.name, *x) for x in places[0]] + [(second.name, *x) for x in places[1]]
    assert len(calls) == (5 if kind in ("tfrecord", "npy", "bin") else 0)
    assert len(blocks) == 6 and blocks.sizes.tolist() == [4, 4, 3, 4, 3, 0]
    assert (blocks.num_records, blocks.unit_size) == (18, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_filters_and_other_readers(kind, tmp_path):
    parts, decode = opened(kind, tmp_path / f"a.{kind}", 11)
    kept = np.arange(11) % 4 != 1
    for keep in (kept, lambda example: record_files.ids(kind, example) % 4 != 1):
        blocks = split(parts, unit_size=3, decode=decode, keep=keep)
        numbers = [record_files.ids(kind, block) for block in blocks]
        assert numbers == [[0, 2], [3, 4], [6, 7, 8], [10]]
        assert blocks.sizes.tolist() == [2, 2, 3, 1]
    whole = split(parts, unit_size=1, decode=decode)
    source = as_source(whole)
    assert len(source) == 11
    assert record_files.ids(kind, source[[3, 10]]) == [[3], [10]]


def test_structured_arrays_are_dicts(tmp_path):
    array = np.zeros(5, [("id", ">i8"), ("of", [("a", "u1"), ("b", "f2", (2,))])])
    array["id"], array["of"]["b"][:, 1] = np.arange(5), np.arange(5)
    np.save(tmp_path / "x.npy", array)
    records = split(files(tmp_path / "**" / "*.npy"), unit_size=3)[1]
    assert records["id"].tolist() == [3, 4] and records["of"]["b"].tolist() == [[0, 3], [0, 4]]


def test_patterns_are_read_in_the_sequence_of_the_list(tmp_path):
    for name, first in [("b1.npy", 10), ("a2.npy", 20), ("a1.NPY", 30), ("c.npy-1-of-2", 40)]:
        with open(tmp_path / name, "wb") as file:
            np.save(file, np.arange(first, first + 2))
    paths = [tmp_path / "b*.npy", str(tmp_path / "a*"), tmp_path / "c.npy-1-of-2"]
    blocks = split(files(paths), unit_size=2)
    assert [block.tolist() for block in blocks] == [[10, 11], [30, 31], [20, 21], [40, 41]]
    together = split(files(tmp_path / "b1.npy") + files(tmp_path / "a2.npy"), unit_size=3)
    assert [block.tolist() for block in together] == [[10, 11], [20, 21]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_sent_to_another_process(kind, tmp_path):
    (part,), decode = opened(kind, tmp_path / f"a.{kind}", 50)
    sent = pickle.loads(pickle.dumps(part))
    assert (sent.name, len(sent), sent.digest) == (part.name, len(part), part.digest)
    actual, wanted = (split([p], unit_size=50, decode=decode)[0] for p in (sent, part))
    assert record_files.ids(kind, actual) == record_files.ids(kind, wanted)


@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_process_reads_with_a_handle_of_its_own(kind, tmp_path):
    (part,), decode = opened(kind, tmp_path / f"a.{kind}", 9)
    blocks = split([part], unit_size=4, decode=decode)
    wanted = record_files.ids(kind, blocks[1])
    opened_here = _opened.cache_info().misses
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child():
        numbers = record_files.ids(kind, blocks[1])
        theirs.send((numbers, _opened.cache_info().misses == opened_here + 1))

    process = context.Process(target=child)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == (wanted, True)
    process.join()
    assert record_files.ids(kind, blocks[1]) == wanted


def test_a_digest_tells_that_bytes_have_changed(tmp_path):
    """64 samples see all of a small file."""
    path, digests = tmp_path / "x.npy", set()
    small = np.zeros(250_000, np.uint8)
    for place in range(0, 250_000, 25_003):
        small[place] += 1
        np.save(path, small)
        digests.add(files(path)[0].digest)
    assert len(digests) == 10
