"""Columns of Parquet become arrays by their types: missing values are refused, never made up."""

import jax
import numpy as np
import pytest

import ordering
from ordering.blocks import files, read_blocks, split
from ordering.blocks.sources import Shared
from ordering.data import LoadError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

IDS = [2**53 + 1, None, 2**53 + 3, 5]
LABELS = [3, None, 1, 2]
HOLE = np.array([True, False, True, True])


def written(path, columns, **options):
    parquet.write_table(pa.table(columns), path, **options)
    return path


def values_of(column, dtype):
    """[the values that are there], as a block without the record of the hole."""
    return np.array([v for v in column if v is not None], dtype)


COLUMNS = {
    "int64": (pa.array(IDS), values_of(IDS, np.int64)),
    "uint64": (pa.array([2**64 - 1, None, 3, 4], pa.uint64()), [2**64 - 1, 3, 4]),
    "bool": (pa.array([True, None, False, True]), np.array([True, False, True])),
    "float16": (pa.array(np.float16([1, 0, 3, 4]), mask=~HOLE), np.float16([1, 3, 4])),
    "float32 with NaN": (
        pa.array([np.nan, None, 2, 3], pa.float32()), np.float32([np.nan, 2, 3])),
    "text": (pa.array(["a", None, "b", "a"]), np.array(["a", "b", "a"], object)),
    "view of texts": (
        pa.array(["a", None, "b", "a"], pa.string_view()), np.array(["a", "b", "a"], object)),
    "dictionary of texts": (
        pa.array(["a", None, "b", "a"]).dictionary_encode(), np.array(["a", "b", "a"], object)),
    "dictionary of numbers": (
        pa.array([7, None, 2**40, 7]).dictionary_encode(), np.array([7, 2**40, 7])),
    "bytes": (pa.array([b"ab", None, b"\0\0", b"c\0"], pa.binary(2)),
              np.array([[97, 98], [0, 0], [99, 0]], np.uint8)),
    "lists": (pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int16())),
              np.array([[1, 2], [3, 4], [5, 6]], np.int16)),
    "views of lists": (pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_view(pa.int16())),
                       np.array([[1, 2], [3, 4], [5, 6]], np.int16)),
    "a hole in a list": (pa.array([[1, 2], [3, None], [3, 4], [5, 6]], pa.list_(pa.int64())),
                         np.array([[1, 2], [3, 4], [5, 6]])),
    "a longer list": (pa.array([[1, 2], [3], [3, 4], [5, 6]], pa.list_(pa.int64())),
                      np.array([[1, 2], [3, 4], [5, 6]])),
    "lists of lists": (pa.array([[[1], [2]], None, [[3], [4]], [[5], [6]]]),
                       np.array([[[1], [2]], [[3], [4]], [[5], [6]]])),
    "fields": (pa.array([{"a": 2**53 + 1}, None, {"a": None}, {"a": 2}]),
               np.array([{"a": 2**53 + 1}, {"a": None}, {"a": 2}])),
    "maps": (pa.array([[("a", 2**53 + 1)], None, [("b", None)], []], pa.map_("str", "int64")),
             np.array([[("a", 2**53 + 1)], [("b", None)], []], object)),
    "lists of rows": (pa.array([[{"a": 2**53 + 1}], None, [{"a": None}], [{"a": 2}]]),
                      np.array([[{"a": 2**53 + 1}], [{"a": None}], [{"a": 2}]])),
    "empty lists": (pa.array([[], None, [], []], pa.list_(pa.int8())), np.zeros((3, 0), np.int8)),
}  # fmt: skip


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("groups", [4, 1])
def test_a_dropped_record_changes_no_type_of_the_others(name, groups, tmp_path):
    """The record with the hole is left out by bools and by functions; without, it is named."""
    column, wanted = COLUMNS[name]
    wanted = np.asarray(wanted, np.uint64 if name == "uint64" else None)
    path = written(tmp_path / "x.parquet", {"n": [0, 1, 2, 3], "x": column}, row_group_size=groups)
    for keep in (HOLE, lambda record: record["n"] != 1):
        for unit_size in (4, 3, 1):
            blocks = split(files(path), unit_size=unit_size, keep=keep)
            columns = [
                block["x"] for block in (blocks.read([u]) for u in np.flatnonzero(blocks.sizes))
            ]
            assert {x.dtype for x in columns} == {wanted.dtype}
            np.testing.assert_array_equal(np.concatenate(columns), wanted)
    message = r"x.parquet, record 1: x .*keep="
    if "longer" in name:
        message = "x.parquet, records 0 to 3: .* x "
    with pytest.raises(ValueError, match=message):
        split(files(path), unit_size=4)[0]
    kept = [True, True, False, True]  # the hole stays: its number is that in the file
    with pytest.raises(ValueError, match=message):
        split(files(path), unit_size=4, keep=np.array(kept))[0]


def test_a_filter_sees_none_where_a_value_is_missing(tmp_path):
    path = written(tmp_path / "x.parquet", {"id": IDS, "y": pa.array(LABELS, pa.int8())})
    seen = []
    blocks = split(files(path), unit_size=4, keep=lambda r: seen.append(r) or r["y"] is not None)
    assert [r["id"] for r in seen] == IDS and [r["y"] for r in seen] == LABELS
    block = blocks[0]
    assert block["id"].dtype == np.int64 and block["id"].tolist() == [2**53 + 1, 2**53 + 3, 5]
    assert block["y"].dtype == np.int8 and block["y"].tolist() == [3, 1, 2]
    with pytest.raises(TypeError) as error:
        split(files(path), unit_size=4, keep=lambda r: r["y"] > 0)
    assert "record 1" in error.value.__notes__[0]


def test_a_missing_value_is_refused_before_training_where_the_file_tells_of_it(tmp_path):
    """In the group and the file that have it; without statistics from the read."""
    columns = {"id": np.arange(12), "y": pa.array([1] * 9 + [None, 1, 1])}
    written(tmp_path / "a.parquet", {"id": [0], "y": [1]})
    for name, statistics in (("b", True), ("c", False)):
        written(
            tmp_path / f"{name}.parquet", columns, row_group_size=4, write_statistics=statistics
        )
    with pytest.raises(ValueError, match="b.parquet, record 9: y "):
        split(files([tmp_path / "a.parquet", tmp_path / "b.parquet"]), unit_size=2)
    split(files(tmp_path / "b.parquet", columns=["id"]), unit_size=2)
    blocks = split(files(tmp_path / "c.parquet"), unit_size=2)
    assert blocks[3]["y"].tolist() == [1, 1]
    with pytest.raises(ValueError, match="c.parquet, record 9: y "):
        blocks[4]
    order = ordering.baselines.shuffle_once(6, units_per_step=6)
    with read_blocks(blocks, order, jax.random.key(0), batch_size=2) as reads:
        with pytest.raises(LoadError, match="load 0 failed: .*c.parquet, record 9: y "):
            next(reads)


def test_lists_of_lists_and_tensors_are_arrays(tmp_path):
    image = np.arange(30, dtype=np.uint8).reshape(5, 2, 3)
    fixed = pa.FixedShapeTensorArray.from_numpy_ndarray(image.astype(np.float32))
    columns = {"image": image.tolist(), "fixed": fixed, "words": [["a", "b"]] * 5}
    block = split(files(written(tmp_path / "x.parquet", columns)), unit_size=3)[1]
    np.testing.assert_array_equal(block["image"], image[3:])
    np.testing.assert_array_equal(block["fixed"], image[3:])
    assert block["words"].tolist() == [["a", "b"]] * 2


def test_columns_that_have_one_name_or_are_missing_and_files_without_any(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], ["a", "a", "b"])
    parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="x.parquet .* 2 columns .*'a'"):
        files(tmp_path / "x.parquet")
    assert files(tmp_path / "x.parquet", columns=["b"])[0].read(0, 1)["b"].tolist() == [3]
    with pytest.raises(ValueError, match="x.parquet .*'word'"):
        files(tmp_path / "x.parquet", columns=["b", "word"])
    parquet.write_table(pa.table({"a": [1, 2]}).select([]), tmp_path / "y.parquet")
    with pytest.raises(ValueError, match="y.parquet .*columns"):
        files(tmp_path / "y.parquet")


# Row groups


@pytest.fixture
def decoded(monkeypatch):
    """[row group that is decoded]."""
    groups, read = [], parquet.ParquetFile.read_row_group

    def counted(self, i, *args, **options):
        groups.append(i)
        return read(self, i, *args, **options)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    return groups


def epoch_of(blocks, window=4, readers=4):
    order = ordering.baselines.shuffle_once(len(blocks))
    options = {"window": window, "batch_size": 8, "num_epochs": 1, "readers": readers}
    with read_blocks(blocks, order, jax.random.key(0), **options) as reads:
        records = [int(i) for batch, places in reads for i in batch["id"][places >= 0]]
    assert sorted(records) == list(range(96))


@pytest.mark.parametrize("rows", [96, 64, 7])
def test_a_row_group_that_blocks_share_is_decoded_once(rows, decoded, tmp_path):
    """Also by four threads at once, in two epochs, and beside a filter."""
    path = written(tmp_path / "x.parquet", {"id": np.arange(96)}, row_group_size=rows)
    (part,) = files(path)
    assert part.group_sizes.tolist() == [
        len(x) for x in np.split(np.arange(96), range(rows, 96, rows))
    ]
    for _ in range(2):
        epoch_of(split([part], unit_size=4))
    assert sorted(decoded) == list(range(-(-96 // rows)))
    assert len(split([part], unit_size=4, keep=lambda row: row["id"] % 2 == 0)[1]["id"]) == 4
    assert len(decoded) == -(-96 // rows)


def test_row_groups_that_do_not_fit_are_decoded_once_in_a_window(decoded, tmp_path, monkeypatch):
    """Four groups of 24 rows, of which memory holds one."""
    path = written(tmp_path / "x.parquet", {"id": np.arange(96)}, row_group_size=24)
    for module in ("parquet", "sources"):
        monkeypatch.setattr(f"ordering.blocks.{module}.MOST", 200)
    with pytest.warns(UserWarning, match="24 rows, .*again.*row_group_size=4"):
        blocks = split(files(path), unit_size=4)
    epoch_of(blocks, window=24, readers=1)
    assert decoded == [0, 1, 2, 3]


def test_row_groups_that_blocks_do_not_share_are_not_kept(decoded, tmp_path):
    path = written(tmp_path / "x.parquet", {"id": np.arange(96)}, row_group_size=8)
    blocks = split(files(path), unit_size=16)
    epoch_of(blocks), epoch_of(blocks)
    assert len(decoded) == 24


def test_decoded_groups_go_with_their_files(tmp_path):
    path = written(tmp_path / "x.parquet", {"id": np.arange(96)})
    before = pa.total_allocated_bytes()
    blocks = split(files(path), unit_size=4)
    epoch_of(blocks)
    assert pa.total_allocated_bytes() >= before + 96 * 8
    del blocks
    assert pa.total_allocated_bytes() == before


TYPES = {
    "wider": (pa.array([1], pa.int32()), pa.array([1], pa.int64()), "int64, .* int32"),
    "lists": (pa.array([[1.0]]), pa.array([[1]]), "int64, .* float64"),
    "texts": (pa.array(["a"]), pa.array([1]), "int64, .* object"),
    "a text of more bytes": (pa.array(["a"]), pa.array(["a"], pa.large_string()), None),
    "codes": (pa.array([7]).dictionary_encode(), pa.array([7]), None),
    "longer lists": (pa.array([[1]]), pa.array([[1, 2]]), None),  # the file does not tell
}


@pytest.mark.parametrize("first, second, message", TYPES.values(), ids=TYPES)
def test_files_with_columns_of_other_types_are_refused_before_training(
    first, second, message, tmp_path
):
    for name, column in (("a", first), ("b", second)):
        written(tmp_path / f"{name}.parquet", {"x": column})
    if message is None:
        split(files(tmp_path / "*.parquet"), unit_size=1)
        return
    with pytest.raises(ValueError, match=f"x of .*b.parquet is {message}"):
        split(files(tmp_path / "*.parquet"), unit_size=1)


def test_a_group_that_cannot_be_decoded_is_tried_again():
    groups, calls = Shared(), []

    def decode():
        calls.append(1)
        if len(calls) == 1:
            raise OSError("late")
        return pa.table({"x": [1]})

    with pytest.raises(OSError, match="late"):
        groups.group("a", decode)
    assert groups.group("a", decode) is groups.group("a", decode) and len(calls) == 2
