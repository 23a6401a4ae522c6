"""Tables in the formats of Hugging Face are read right, or refused with what to do."""

import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.input.sources import Steps

COLUMNS = {
    "x": [[i, i + 1.5] for i in range(6)],
    "label": list(range(6)),
    "text": [f"t{i}" for i in range(6)],
}
FORMATS = [None, "numpy", "torch", "jax"]


class Table:
    """A stand-in with the interface of `datasets.Dataset`: rows of lists or of a format's arrays.

    As there, floats of a format are 32 bits wide, and texts stay what they are.
    """

    def __init__(self, columns, kind=None):
        self.columns_, self.format = columns, {"type": kind}

    def with_format(self, kind):
        return Table(self.columns_, kind)

    @property
    def column_names(self):
        return list(self.columns_)

    @property
    def shape(self):
        return len(self), len(self.columns_)

    def __len__(self):
        return len(next(iter(self.columns_.values())))

    def __getitem__(self, i):
        return {name: self._value(column[i]) for name, column in self.columns_.items()}

    def __getitems__(self, indices):
        return [self[i] for i in indices]

    def _value(self, value):
        kind = self.format["type"]
        if kind is None or isinstance(value, str):
            return value
        array = np.asarray(value, np.float32 if isinstance(value, list) else None)
        if kind == "torch":
            torch = pytest.importorskip("torch", reason="pip install torch")
            return torch.asarray(array)
        return jnp.asarray(array) if kind == "jax" else array


def real(columns):
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    return datasets.Dataset.from_dict(columns)


TABLES = pytest.mark.parametrize("table", [Table, real])
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@TABLES
@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_read_right(table, kind):
    source = table(COLUMNS).with_format(kind)
    steps = Steps(source, [[2, 0, 1], [1, 0, 2]], units_per_step=3)
    batch = steps[0]
    assert batch["x"].tolist() == [[COLUMNS["x"][i] for i in row] for row in ([2, 0, 1], [4, 3, 5])]
    assert batch["label"].tolist() == [[2, 0, 1], [4, 3, 5]]
    assert batch["text"].tolist() == [[f"t{i}" for i in row] for row in ([2, 0, 1], [4, 3, 5])]
    assert batch["x"].dtype == (np.float64 if kind is None else np.float32)
    assert all(type(leaf) is np.ndarray for leaf in batch.values())


@TABLES
def test_zeros_at_the_end_of_bytes_stay_without_a_format(table):
    _, read = ordering.input.reader(table({"file": [b"a\0\0", b"\0"]}))
    assert read(np.array([1, 0]))["file"].tolist() == [b"\0", b"a\0\0"]


@TABLES
@pytest.mark.parametrize("kind", ["arrow", "pandas"])
def test_formats_whose_rows_are_tables(table, kind):
    with pytest.raises(ValueError, match=rf"format '{kind}'.*with_format\(None\)"):
        ordering.input.reader(table(COLUMNS).with_format(kind))


@TABLES
def test_a_dict_of_splits(table):
    for splits in ({"train": table(COLUMNS)}, dict.fromkeys(("a", "b"), table(COLUMNS))):
        with pytest.raises(ValueError, match="of a dict of splits, pass one split"):
            ordering.input.reader(splits)


@TABLES
def test_missing_values_and_lists_of_unequal_lengths(table):
    _, read = ordering.input.reader(table({"x": [1, None, 3]}))
    assert read(np.array([2, 0]))["x"].tolist() == [3, 1]
    with pytest.raises(ValueError, match="1 of 2 examples of a batch have None"):
        read(np.array([0, 1]))
    _, read = ordering.input.reader(table({"x": [[1], [1, 2]]}))
    with pytest.raises(ValueError, match="lists of one length"):
        read(np.array([0, 1]))


def test_lists_of_lists_in_the_numpy_format():
    source = real({"x": [[[1], [1, 2]], [[1], [2]]], "t": [["a", "b"], ["c", "d\0"]]})
    _, read = ordering.input.reader(source.select([1]).with_format("numpy"))
    found = read(np.array([0]))
    assert found["x"].tolist() == [[[1], [2]]] and found["t"].tolist() == [["c", "d\0"]]
    _, read = ordering.input.reader(source.with_format("numpy"))
    with pytest.raises(ValueError, match="of one length on every level"):
        read(np.array([0]))


def test_streams_are_refused():
    with pytest.raises(ValueError, match="load_dataset without streaming"):
        ordering.input.reader(real(COLUMNS).to_iterable_dataset())


class Frame:
    """A stand-in of a table whose source[i] is a column."""

    columns = ("x",)

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return np.arange(3)


def test_tables_of_columns():
    with pytest.raises(ValueError, match="pass a dict of its columns as NumPy arrays"):
        ordering.input.reader(Frame())


@pytest.mark.parametrize("make", ["pandas", "arrow", "series"])
def test_real_tables_of_columns(make):
    if make == "arrow":
        table = pytest.importorskip("pyarrow").table({"x": [1, 2, 3]})
    else:
        table = pytest.importorskip("pandas").DataFrame({"x": [1, 2, 3]})
        table = table["x"] if make == "series" else table
    with pytest.raises(ValueError, match="pass a dict of its columns as NumPy arrays"):
        ordering.input.reader(table)
