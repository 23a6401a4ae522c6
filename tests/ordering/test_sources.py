"""The examples that an order names, the steps of an epoch, and sources of other libraries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ordering
from ordering.input import read_epochs, reader, step_indices
from tests import tables
from tests.refused import refuses
from tests.sources import SIZES, Examples, epoch_of


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 3), st.data())
def test_step_indices_are_the_units_of_every_worker(workers, num_units, unit_size, data):
    units_per_step = data.draw(st.integers(1, num_units))
    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    orders = np.stack([rng.permutation(num_units) for _ in range(workers)])
    sizes = {"units_per_step": units_per_step, "unit_size": unit_size}
    indices, batch_size = step_indices(orders, **sizes)
    assert indices.dtype == np.int64
    assert sorted(indices) == list(range(workers * num_units * unit_size))
    for step, (start, stop) in enumerate(tables.steps(num_units, units_per_step)):
        expected = [
            (w * num_units + unit) * unit_size + example
            for w in range(workers)
            for unit in orders[w, start:stop]
            for example in range(unit_size)
        ]
        assert indices[step * batch_size : (step + 1) * batch_size].tolist() == expected
    cut = units_per_step * data.draw(st.integers(0, num_units // units_per_step))
    parts = [
        step_indices(part, num_units=num_units, **sizes)[0]
        for part in (orders[:, :cut], orders[:, cut:])
    ]
    np.testing.assert_array_equal(np.concatenate(parts), indices)
    own = (orders + num_units * np.arange(workers)[:, None]).tolist()  # named like dealt units
    dealt, _ = step_indices(own, total=workers * num_units, **sizes)
    np.testing.assert_array_equal(dealt, indices)


def epoch_in(source, orders, **sizes):
    """The batches of one epoch in these orders."""
    orders = jnp.asarray(orders)
    state = STATE._replace(current=orders, next=orders)
    return read_epochs(source, lambda: state, num_epochs=1, **sizes)


@pytest.mark.parametrize("size", SIZES)
def test_the_steps_of_an_epoch(size):
    source, orders, sizes, wanted = epoch_of(size)
    for data in (source, jax.tree.map(jnp.asarray, source), Examples(source)):
        found = [*epoch_in(data, orders, **sizes)]
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


COLUMNS = {
    "x": [[i, i + 1.5] for i in range(6)],
    "label": list(range(6)),
    "text": [f"t{i}" for i in range(6)],
}


class Table:
    """A stand-in for `datasets.Dataset`: its rows hold lists, or arrays of a format.

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
            return pytest.importorskip("torch", reason="pip install torch").asarray(array)
        return jnp.asarray(array) if kind == "jax" else array


def real(columns):
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    return datasets.Dataset.from_dict(columns)


TABLES = pytest.mark.parametrize("table", [Table, real])
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@TABLES
@pytest.mark.parametrize("kind", [None, "numpy", "torch", "jax"])
def test_formats_of_tables_are_read_right(table, kind):
    source = table(COLUMNS).with_format(kind)
    batch = read(source, 2, 0, 4)
    for name, column in COLUMNS.items():
        assert batch[name].tolist() == [column[i] for i in (2, 0, 4)]
    assert batch["x"].dtype == (np.float64 if kind is None else np.float32)
    assert all(type(leaf) is np.ndarray for leaf in batch.values())


@TABLES
def test_tables_that_cannot_be_read_are_refused(table):
    assert read(table({"file": [b"a\0\0", b"\0"]}), 1, 0)["file"].tolist() == [b"\0", b"a\0\0"]
    for splits in ({"train": table(COLUMNS)}, dict.fromkeys(("a", "b"), table(COLUMNS))):
        with pytest.raises(ValueError, match="of a dict of splits, pass one split"):
            reader(splits)
    missing = table({"x": [1, None, 3]})
    assert read(missing, 2, 0)["x"].tolist() == [3, 1]
    with pytest.raises(ValueError, match="1 of 2 examples of a batch have None"):
        read(missing, 0, 1)
    with pytest.raises(ValueError, match="need one shape"):
        read(table({"x": [[1], [1, 2]]}), 0, 1)


def read(source, *indices):
    return reader(source)[1](np.array(indices))


def test_lists_of_lists_in_the_numpy_format():
    source = real({"x": [[[1], [1, 2]], [[1], [2]]], "t": [["a", "b"], ["c", "d\0"]]})
    found = read(source.select([1]).with_format("numpy"), 0)
    assert found["x"].tolist() == [[[1], [2]]] and found["t"].tolist() == [["c", "d\0"]]
    with pytest.raises(ValueError, match="equal lengths on every level"):
        read(source.with_format("numpy"), 0)
    with pytest.raises(ValueError, match="load_dataset without streaming"):
        reader(source.to_iterable_dataset())


@pytest.mark.parametrize("make", ["pandas", "arrow", "series"])
def test_tables_of_columns_are_refused(make):
    if make == "arrow":
        table = pytest.importorskip("pyarrow").table({"x": [1, 2, 3]})
    else:
        table = pytest.importorskip("pandas").DataFrame({"x": [1, 2, 3]})
        table = table["x"] if make == "series" else table
    with pytest.raises(ValueError, match="pass a dict of its columns as NumPy arrays"):
        reader(table)


def test_a_list_in_an_example_is_one_array():
    """As in the plain Python rows of a Hugging Face dataset."""
    table = [
        {"x": [i, 2, 3], "y": [[i, 1.5]], "words": ["a", str(i)], "label": i, "files": [b"a\0"]}
        for i in range(4)
    ]
    batch = read(table, 2, 0)
    for name, column in batch.items():
        assert column.tolist() == [table[2][name], table[0][name]]
    pairs = [[np.zeros(2), np.ones(3)], [np.zeros(2), np.ones(3)]]  # structure, not data
    assert [x.shape for x in read(pairs, 1)] == [(1, 2), (1, 3)]


def rows(*columns):
    return lambda: read([{"x": column} for column in columns], *range(len(columns)))


test_examples_that_are_no_batch = refuses({
    "shapes": (rows(np.zeros(2), np.zeros(3)), r"shapes \[\(2,\), \(3,\)\].* Pad or cut"),
    "keys": (lambda: read([{"x": 1}, {"y": 1}], 0, 1), r"\{'x': \*\} and \{'y': \*\}: .* same"),
    "lengths": (rows([1, 2], [1, 2, 3]), r"shapes \[\(2,\), \(3,\)\]: .* one shape"),
    "inner lengths": (rows([[1], [1, 2]]), r"the list \[\[1\], \[1, 2\]\]: lists become arrays"),
    "of floats": (lambda: read([0, 1], 0.5), "indices is .*: pass whole numbers with 1 axes"),
    "a pair": (lambda: reader([0, 1])[1]((np.zeros(1, int), 2)), "indices is a tuple: .* step_ind"),
    "negative": (lambda: read([0, 1], -1), "index -1 is out of range"),
    "no example": (lambda: read([0, 1], 2), "is out of range: the source has 2 examples"),
    "missing": (rows([1, None]), "no missing values"),
    "mixed": (rows([1, "a"]), "numbers or texts"),
    "texts and numbers": (rows("a", 1), r"texts and numbers, as \('a', 1\): give all"),
})  # fmt: skip

test_no_source = refuses({
    "other lengths": (
        lambda: reader({"x": np.zeros((3, 1)), "y": np.zeros(2)}), r"\(3, 1\), \(2,\)"
    ),
    "a number": (lambda: reader((np.zeros(3), 3)), "leading axis"),
    "a dict of sources": (lambda: reader({"train": Examples(np.arange(3))}), "pass one split"),
    "no rows": (lambda: reader(np.zeros((0, 2))), "source is empty"),
    "an iterator": (lambda: reader(iter([1])), "source is a list_iterator"),
    "a path": (lambda: reader("images/train"), "source is a str"),
})  # fmt: skip


STATE = ordering.random_reshuffling(4).init(jax.random.key(0), None)


def indices(orders, **sizes):
    return lambda: step_indices(orders, **{"units_per_step": 1} | sizes)


test_bad_orders = refuses({
    "twice": (indices([0, 2, 2]), r"shape \(1, 3\) name a unit twice, or outside 0 .. 2"),
    "a slice too large": (indices([0, 1, 2], num_units=2), "or more .* also num_units"),
    "a long dealt slice": (indices([0, 1, 2], num_units=2, total=9), "or more than 2 units"),
    "floats": (indices([0.0, 1.0]), r"orders is float64\[2\]"),
    "a state": (indices(STATE), "orders is a ShuffleState: .* such as state.current"),
    "an order": (indices(ordering.random_reshuffling(4)), "orders is a Ordering: .* state.current"),
    "unequal lengths": (indices([[0, 1], [0]]), "orders is a list: "),
    "axes": (indices([[[0]]]), r"orders is int64\[1, 1, 1\]"),
    "empty": (indices([]), "num_units is 0"),
    "no unit": (indices([0, 1], unit_size=0), "unit_size is 0"),
})  # fmt: skip
