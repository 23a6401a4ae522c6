"""Files of every kind give the records that were written, one request for a block."""

import itertools
import multiprocessing
import os
import pickle
import struct
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from ordering.blocks import files, split, tokens
from ordering.blocks.sources import Part
from ordering.data import as_source
from tests import record_files, reference_blocks
from tests.record_files import KINDS

LETTERS = [b"", b"a", b"\0" * 5, bytes(range(256)) * 40, b"end"]
RNG = np.random.default_rng(0)
FIELDS = np.zeros(5, [("id", ">i8"), ("of", [("a", "u1"), ("b", "f2", (2,))])])
FIELDS["id"], FIELDS["of"]["b"][:, 1] = np.arange(5), np.arange(5)
COLUMNS = {
    "id": np.arange(11),
    "weight": RNG.normal(size=11).astype(np.float32),
    "text": np.array([f"row {i}" for i in range(11)], object),
    "right": np.arange(11) % 3 == 0,
    "image": RNG.integers(0, 256, (11, 6), dtype=np.uint8),
}


def array(dtype, shape, order):
    return RNG.integers(0, 99, (7, *shape)).astype(dtype, order)


TYPES = itertools.product(
    [np.float16, ">f8", np.bool_, np.complex64, bfloat16], [(), (2, 1, 4)], "CF"
)
RECORDS = [("tfrecord", LETTERS), ("array_record", LETTERS), ("parquet", COLUMNS)]
RECORDS += [("npy", FIELDS), *(("npy", array(*how)) for how in TYPES)]


def assert_records(actual, expected):
    if isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name in expected:
            assert_records(actual[name], expected[name])
    elif isinstance(expected, list):
        assert actual == expected
    elif expected.dtype.names:
        assert_records(actual, {name: expected[name] for name in expected.dtype.names})
    else:
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("kind,records", RECORDS)
def test_records_are_those_that_were_written(kind, records, tmp_path):
    """From any to any, over the borders of groups of 2 and of 4 rows."""
    path = tmp_path / f"x.{kind}-00001-of-00002"
    if kind == "npy":
        with open(path, "wb") as file:
            np.save(file, records)
    else:
        write = record_files.WRITERS.get(kind, record_files.write_parquet)
        write(path, records)
    (part,) = files(path)
    assert part.name == str(path)
    if kind == "parquet":
        (two,) = files(path, columns=["image", "id"])
        assert set(two.read(2, 9)) == {"image", "id"}
    for start, stop in itertools.combinations(range(len(part) + 1), 2):
        if isinstance(records, dict):
            assert_records(part.read(start, stop), {n: x[start:stop] for n, x in records.items()})
        else:
            assert_records(part.read(start, stop), records[start:stop])


def test_a_tfrecord_is_that_of_tensorflow(tmp_path):
    """In both directions: what each writes, the other reads."""
    tf = pytest.importorskip("tensorflow")
    ours, theirs = tmp_path / "ours.tfrecord", tmp_path / "theirs.tfrecord"
    record_files.write_tfrecord(ours, LETTERS)
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        for record in LETTERS:
            writer.write(record)
    assert ours.read_bytes() == theirs.read_bytes()


# Tokens


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


@pytest.mark.parametrize("dtype,most", [(None, 65535), (np.uint8, 255), ("u4", 2**31 - 1)])
def test_a_separator_that_no_token_can_be_is_refused(dtype, most, tmp_path):
    np.zeros(64, np.uint64).tofile(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=f"separator is {most + 1}, .* {most}"):
        tokens(tmp_path / "x.bin", length=3, separator=most + 1, dtype=dtype)
    tokens(tmp_path / "x.bin", length=3, separator=most, dtype=dtype)


@pytest.mark.parametrize("dtype,token", [("<i8", -(2**31) - 1), (np.int16, -100), (">u4", 2**31)])
def test_a_token_below_0_or_beyond_int32_is_refused(dtype, token, tmp_path):
    text = np.array([5, token, 3, 1, 2], dtype)
    np.save(tmp_path / "x.npy", text)
    text.tofile(tmp_path / "x.bin")
    for path in (tmp_path / "x.bin", tmp_path / "x.npy"):
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
    for how in ({}, {"dtype": dtype, "header_bytes": 1024}):
        (part,) = tokens(path, length=10, **how)
        assert part.read(0, 3)["tokens"][:, 0].tolist() == [50000, 50010, 50020]
    with pytest.raises(ValueError, match=f"dtype is int64, .*{dtype[1:][0]}int"):
        tokens(path, length=10, dtype=np.int64)
    assert len(tokens(path, length=10, header_bytes=0, dtype=dtype)[0]) > 3
    path.write_bytes(header.tobytes() + text[:-1].tobytes())
    with pytest.raises(ValueError, match="30 tokens, .* 31"):
        tokens(path, length=10)
    path.write_bytes(header.tobytes()[:500])
    with pytest.raises(ValueError, match="x.bin .*within its header"):
        tokens(path, length=10)


def test_the_index_of_megatron_names_the_type(tmp_path):
    """The magic bytes, version 1 in 8 bytes, the code of the type; here 4, int32."""
    np.arange(100000, 100021, dtype=np.int32).tofile(tmp_path / "x_document.bin")
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 1, 2) + struct.pack("<iqqq", 21, 0, 0, 1)
    (tmp_path / "x_document.idx").write_bytes(index)
    (part,) = tokens(tmp_path / "x_document.bin", length=10)
    assert part.read(0, 2)["tokens"][:, 0].tolist() == [100000, 100010]
    with pytest.raises(ValueError, match="dtype is uint16, .* int32"):
        tokens(tmp_path / "x_document.bin", length=10, dtype="uint16")
    with pytest.raises(ValueError, match="x_document.idx"):
        tokens(tmp_path / "x_document.*", length=10)
    for content, word in ((0, "code 0"), (9, "code 9"), (255, "code 255"), (None, "no code")):
        start = index[:9] if content is None else index[:17] + bytes([content]) + index[18:]
        (tmp_path / "x_document.idx").write_bytes(start)
        with pytest.raises(ValueError, match=f"x_document.idx .*{word}.* dtype="):
            tokens(tmp_path / "x_document.bin", length=10)
        (part,) = tokens(tmp_path / "x_document.bin", length=10, dtype=np.int32)
        assert part.read(0, 2)["tokens"][:, 0].tolist() == [100000, 100010]


# Blocks of all kinds


@pytest.mark.parametrize("kind", KINDS)
def test_each_block_is_one_request(kind, tmp_path, monkeypatch):
    """Also one call of the system, where the files are ours to read; and with a filter."""
    decode = record_files.write(kind, tmp_path / f"a.{kind}", 11)
    record_files.write(kind, tmp_path / f"b.{kind}", 7, first=11)
    first, second = record_files.opened(tmp_path / f"?.{kind}")
    asked, calls, pread = [], [], os.pread

    def counted(part):
        def read(start, stop):
            asked.append((part.name, start, stop))
            return part.read(start, stop)

        return Part(part.name, len(part), part.digest, read)

    blocks = split([counted(first), counted(second)], unit_size=4, decode=decode, multiple_of=6)
    monkeypatch.setattr(os, "pread", lambda *args: calls.append(args) or pread(*args))
    ends = [0, 4, 8, 11, 15, 18]
    for u, (start, stop) in enumerate(itertools.pairwise(ends)):
        assert record_files.ids(kind, blocks[u]) == [*range(start, stop)]
    places = [(0, 4), (4, 8), (8, 11)], [(0, 4), (4, 7)]
    assert asked == [(first.name, *x) for x in places[0]] + [(second.name, *x) for x in places[1]]
    assert len(calls) == (5 if kind in ("tfrecord", "npy", "bin") else 0)
    assert blocks.sizes.tolist() == [4, 4, 3, 4, 3, 0]
    assert (blocks.num_records, blocks.unit_size) == (18, 4)
    kept = np.arange(11) % 4 != 1
    for keep in (kept, lambda example: record_files.ids(kind, example) % 4 != 1):
        some = split([first], unit_size=3, decode=decode, keep=keep)
        numbers = [record_files.ids(kind, block) for block in some]
        assert numbers == [[0, 2], [3, 4], [6, 7, 8], [10]]
        assert some.sizes.tolist() == [2, 2, 3, 1]
    source = as_source(split([first], unit_size=1, decode=decode))
    assert len(source) == 11 and record_files.ids(kind, source[[3, 10]]) == [[3], [10]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_outside_of_the_records_is_refused(kind, tmp_path):
    """Negative numbers would be bytes of the header, or count from the end."""
    record_files.write(kind, tmp_path / f"a.{kind}", 9)
    (part,) = record_files.opened(tmp_path / f"a.{kind}")
    for start, stop in ((-2, 2), (-3, -1), (8, 10), (9, 12), (3, 1)):
        with pytest.raises(ValueError, match=f"{start} to {stop} .*a.{kind}: .* stop <= 9"):
            part.read(start, stop)


@pytest.mark.parametrize("kind", ["tfrecord", "npy", "bin"])
def test_a_system_that_gives_fewer_bytes_is_asked_again(kind, tmp_path, monkeypatch):
    """As Linux does above 2 GiB."""
    decode = record_files.write(kind, tmp_path / f"a.{kind}", 9)
    (part,) = record_files.opened(tmp_path / f"a.{kind}")
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 5), at))
    blocks = split([part], unit_size=9, decode=decode)
    assert record_files.ids(kind, blocks[0]) == [*range(9)]


@pytest.mark.parametrize("make", [lambda: OSError(5, "disk"), lambda: MemoryError("full")])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_system_does_not_say_that_the_file_is_damaged(
    kind, make, tmp_path, monkeypatch
):
    """A disk's error has the file's name, and the next read is one by a new handle."""
    decode = record_files.write(kind, tmp_path / f"a.{kind}", 9)
    (part,) = record_files.opened(tmp_path / f"a.{kind}")
    error = make()

    def fails(*args):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(type(part), "records", fails)
        with pytest.raises(type(error)) as info:
            part.read(2, 4)
    assert info.value is error and "damaged" not in str(error)
    assert isinstance(error, MemoryError) or f"a.{kind}" in str(error)
    assert f"2 to 3 of {part.name}" in error.__notes__[-1]
    assert record_files.ids(kind, split([part], unit_size=4, decode=decode)[0]) == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_goes_to_other_processes(kind, tmp_path):
    """By pickle; and a forked one reads with a handle of its own."""
    decode = record_files.write(kind, tmp_path / f"a.{kind}", 9)
    (part,) = record_files.opened(tmp_path / f"a.{kind}")
    blocks = split([part], unit_size=4, decode=decode)
    wanted = record_files.ids(kind, blocks[1])
    sent = pickle.loads(pickle.dumps(part))
    assert (sent.name, len(sent), sent.digest) == (part.name, len(part), part.digest)
    assert record_files.ids(kind, split([sent], unit_size=4, decode=decode)[1]) == wanted
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child():
        numbers = record_files.ids(kind, blocks[1])
        theirs.send((numbers, part.shared._process == os.getpid()))

    process = context.Process(target=child)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == (wanted, True)
    process.join()
    assert record_files.ids(kind, blocks[1]) == wanted


def test_a_digest_tells_how_a_text_is_cut(tmp_path):
    """Windows of equally many tokens, of other bytes."""
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "x.bin")
    options = {"length": 7}, {"dtype": "u1", "length": 14}, {"length": 7, "header_bytes": 2}
    parts = [tokens(tmp_path / "x.bin", **how)[0] for how in options]
    assert [len(part) for part in parts] == [9, 9, 8] and len({x.digest for x in parts}) == 3


def test_a_digest_tells_that_bytes_have_changed(tmp_path):
    """64 samples see all of a small file."""
    path, digests = tmp_path / "x.npy", set()
    small = np.zeros(250_000, np.uint8)
    for place in range(0, 250_000, 25_003):
        small[place] += 1
        np.save(path, small)
        digests.add(files(path)[0].digest)
    assert len(digests) == 10
