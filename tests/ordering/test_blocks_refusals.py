"""Files that are missing or damaged and arguments that do not fit end with their name, in time."""

import os
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

import ordering
from ordering.blocks import files, read_blocks, split
from ordering.input import LoadError
from tests import record_files
from tests.record_files import KINDS, opened


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_named_before_training(kind, tmp_path):
    path = tmp_path / f"data.{kind}"
    with pytest.raises(ValueError, match=f"there is no file .*data.{kind}: pass paths of files"):
        opened(path)
    record_files.write(kind, path, 40)
    data = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=f"data.{kind} (holds no records: leave|cannot be read: )"):
        opened(path)
    if kind == "bin":  # which is shorter, but whole
        return
    for size in (1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=f"data.{kind} cannot be read: .*Replace the file"):
            opened(path)
    path.write_bytes(bytes(reversed(data)))
    with pytest.raises(ValueError, match=f"data.{kind} cannot be read: .*Replace the file"):
        opened(path)


@pytest.mark.parametrize("kind", KINDS)
def test_files_without_records_are_refused(kind, tmp_path):
    path = tmp_path / f"data.{kind}"
    record_files.write(kind, path, 0)
    message = (
        "holds no records: leave it out" if kind != "bin" else "cannot be read: it has 1 token"
    )
    with pytest.raises(ValueError, match=f"data.{kind} {message}"):
        opened(path)


def broken_off(path, blocks):
    """What a reader says of a file that becomes half as long, or goes, while it is read."""
    order = ordering.shuffle_once(len(blocks))
    state = order.init(jax.random.key(0), None)
    reads = read_blocks(
        blocks, lambda: state, window=1, batch_size=1, num_epochs=1, readers=1, depth=1
    )
    try:
        for _ in reads:
            pass
    except LoadError as error:
        return str(error)
    finally:
        reads.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_changes_while_it_is_read_is_named(kind, tmp_path):
    path = tmp_path / f"data.{kind}"
    decode = record_files.write(kind, path, 400)
    blocks = split(opened(path), unit_size=4, decode=decode)
    blocks[1]  # this thread keeps the file open; those of the reader open it
    os.truncate(path, path.stat().st_size // 2)
    found = broken_off(path, blocks)
    assert "failed: ValueError" in found and f"data.{kind}, records " in found, found
    assert "has changed since it was opened: leave files alone while they are read. Resu" in found
    for unit in (0, 99):  # also what is still as it was
        with pytest.raises(ValueError, match=f"data.{kind}, records .* cannot be read"):
            blocks[unit]
    path.unlink()
    assert f"data.{kind}, records " in broken_off(path, blocks)


def moved(kind, tmp_path, change):
    """A position from before `change(path)`, used after it."""
    paths = [tmp_path / f"{name}.{kind}" for name in ("first", "second")]
    decoders = [record_files.write(kind, path, 40, first=10) for path in paths]
    state = ordering.shuffle_once(20).init(jax.random.key(0), None)

    def reads(position=None):
        parts = sum((opened(path) for path in paths), ())
        blocks = split(parts, unit_size=4, decode=decoders[0])
        return read_blocks(blocks, lambda: state, window=2, batch_size=4, position=position)

    with reads() as before:
        next(before)
        position = before.position()
    with reads(position) as after:
        next(after)
    change(paths[1])
    return reads(position)


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_of_other_files_names_the_file(kind, tmp_path):
    with pytest.raises(ValueError, match=f"second.{kind} has 39 records, and had 40 when"):
        moved(kind, tmp_path, lambda path: record_files.write(kind, path, 39))
    with pytest.raises(ValueError, match=f"second.{kind} is not the file with which .*bytes diff"):
        moved(kind, tmp_path, lambda path: record_files.write(kind, path, 40, first=990))

    def exchange(path):
        size = path.stat().st_size
        record_files.write(kind, path, 40, first=50)
        assert path.stat().st_size == size or kind in ("array_record", "parquet")

    with pytest.raises(ValueError, match=f"second.{kind} is not the file .*or begin anew"):
        moved(kind, tmp_path, exchange)


def test_columns_that_are_missing_or_have_lists_of_several_lengths(tmp_path):
    path = tmp_path / "rows.parquet"
    record_files.write_parquet(path, {"id": [1, 2, 3], "text": [[1], [2, 3], [4]]})
    with pytest.raises(
        ValueError, match="rows.parquet cannot be read: it has no column 'word', of"
    ):
        files(path, columns=["id", "word"])
    for columns in ("id", 3, [], ["id", "id"], ["id", 3]):
        with pytest.raises(ValueError, match="columns is .*: pass a list of names, each once"):
            files(path, columns=columns)
    blocks = split(files(path), unit_size=2)
    assert blocks[1]["text"].tolist() == [[4]]
    with pytest.raises(
        ValueError, match="rows.parquet, records 0 to 1: the lists of text have several lengths"
    ):
        blocks[0]


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros(()), "it is a single number: save an array whose leading axis"),
        (np.array([None, 1]), "Python objects in dtype: save numbers of NumPy's types"),
        (np.zeros(3, ml_dtypes.float8_e5m2), "descriptor: '<f1': save numbers of NumPy's types"),
        (np.zeros(3, ml_dtypes.int4), r"its type is \|V1, plain bytes: save x.view\(np.uint8\)"),
        (np.zeros((3, 0)), r"its records are empty, of shape \(0,\): leave it out"),
    ],
)
def test_arrays_that_are_no_records(array, message, tmp_path):
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=f"x.npy cannot be read: .*{message}[^.]*[.]$"):
        files(tmp_path / "x.npy")


def test_files_in_another_place_or_sequence(tmp_path):
    """The names do not count; the sequence does."""
    for name, first in (("a", 0), ("b", 50)):
        np.save(tmp_path / f"{name}.npy", np.arange(first, first + 8))

    def reads(pattern, position=None):
        blocks = split(files(pattern), unit_size=4)
        state = ordering.shuffle_once(len(blocks)).init(jax.random.key(0), None)
        return read_blocks(blocks, lambda: state, window=1, batch_size=4, position=position)

    position = reads(tmp_path / "*.npy").position()
    shutil.copytree(tmp_path, tmp_path / "copy")
    reads(tmp_path / "copy" / "*.npy", position).close()
    with pytest.raises(ValueError, match="b.npy is not the file"):
        reads([tmp_path / "b.npy", tmp_path / "a.npy"], position)
    with pytest.raises(ValueError, match="saved with 2 files, now there are 1: pass the same file"):
        reads([tmp_path / "a.npy"], position)
