"""The examples that an order names, the steps of an epoch, and sources of other libraries."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ordering
from ordering import Indices
from ordering.blocks.sources import Part
from ordering.data import as_source, step_indices
from tests import tables
from tests.bad_values import Foreign
from tests.sources import Examples


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
    by_worker = orders + num_units * np.arange(workers)[:, None]  # named as of a global order
    of_all, _ = step_indices(by_worker.tolist(), total=workers * num_units, **sizes)
    np.testing.assert_array_equal(of_all, indices)


TENS = Indices(lambda places: 10 * places, 10**10)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32, np.uint32, np.uint64, jnp.int32])
def test_places_of_any_integers_are_units_of_64_bits(kind):
    units = TENS[10**9 :][np.array([3, 0, 2]).astype(kind)]
    assert units.dtype == np.int64 and units.tolist() == [10**10 + x for x in (30, 0, 20)]


@pytest.mark.parametrize("places", [[], np.array([], np.int32), np.zeros((0, 2), int)])
def test_no_places_have_no_units(places):
    """Also of a function that cannot take none."""
    computed = Indices(lambda places: np.split(places, 0), 9)
    for units in (computed[places], np.asarray(computed[9:]), computed[4:4][places]):
        assert units.dtype == np.int64 and not units.size
    assert computed.__getitems__([]) == computed[9:].tolist() == []
    indices, size = step_indices(computed[9:], units_per_step=2, unit_size=3)
    assert (len(indices), size) == (0, 6)


def test_indices_are_computed_one_by_one_or_with_their_neighbours():
    """A place that is far from the one before is computed alone."""
    counts = []
    indices = Indices(lambda places: counts.append(len(places)) or places, 10**10)
    assert [indices[i] for i in (10**9, 5, -1, 10**8)] == [10**9, 5, 10**10 - 1, 10**8]
    assert counts == [1] * 4
    assert [indices[10**8 + i] for i in range(1, 200)] == list(range(10**8 + 1, 10**8 + 200))
    assert len(counts) < 10 and max(counts) < 100
    steps = [indices[i : i + 4].tolist() for i in range(0, 10, 4)]
    assert steps == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def read(source, *indices):
    return as_source(source)[np.array(indices)]


def objects(values):
    """An array of objects, in which data sets give nested lists as NumPy."""
    array = np.empty(len(values), object)
    array[:] = values
    return array


@pytest.mark.parametrize("make", [list, np.asarray, jnp.asarray])
def test_a_list_in_an_example_is_one_array(make):
    """As in the rows of a Hugging Face dataset, without a format or with one."""
    table = [
        {"x": make([i, 2.5]), "y": [[i, 1.5]], "words": ["a", str(i)], "label": i, "file": b"a\0"}
        for i in range(4)
    ]
    batch = read(table, 2, 0)
    for name, column in batch.items():
        assert type(column) is np.ndarray
        assert column.tolist() == [np.asarray(table[i][name]).tolist() for i in (2, 0)] or (
            name == "file" and column.tolist() == [b"a\0"] * 2
        )
    pairs = [[np.zeros(2), np.ones(3)], [np.zeros(2), np.ones(3)]]  # structure, not data
    assert [x.shape for x in read(pairs, 1)] == [(1, 2), (1, 3)]
    nested = [{"x": objects([np.array([i]), np.array([2])])} for i in range(2)]
    assert read(nested, 1, 0)["x"].tolist() == [[[1], [2]], [[0], [2]]]


def test_no_indices_and_slices():
    rows = [{"x": np.full(2, i, np.int8), "y": f"{i}"} for i in range(5)]
    for source in (rows, {"x": np.repeat(np.arange(5, dtype=np.int8), 2).reshape(5, 2)}):
        data = as_source(source)
        assert data[[]]["x"].shape == (0, 2) and data[[]]["x"].dtype == np.int8
        assert data[1:3]["x"].tolist() == data[[1, 2]]["x"].tolist() == [[1, 1], [2, 2]]
        assert as_source(data) is data and data.example(3)["x"].tolist() == [3, 3]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Item:
    x: jax.Array
    image: jax.Array | None = None


class Pair(NamedTuple):
    x: np.ndarray
    image: np.ndarray | None = None


@pytest.mark.parametrize("make", [Item, Pair, lambda x: {"x": x, "image": None}])
def test_a_field_that_is_none_everywhere_stays_none(make):
    """In examples, and in a tree of arrays, which may be any tree of JAX."""
    array = np.arange(8.0).reshape(4, 2)
    for source in ([make(x) for x in array], make(array)):
        batch = as_source(source)[[2, 0]]
        assert jax.tree.structure(batch) == jax.tree.structure(make(array))
        np.testing.assert_array_equal(jax.tree.leaves(batch)[0], array[[2, 0]])
        order = ordering.random_reshuffling(4, units_per_step=2)
        reads = ordering.data.read_epochs(source, order, jax.random.key(0), num_epochs=1)
        assert sum(jax.tree.leaves(batch)[0].sum() for batch in reads) == array.sum()
    for some in ([Item(1), Item(2, 3)], [Item(1, 3), Item(2)]):
        with pytest.raises(ValueError, match="example 1.* None"):
            as_source(some)[[0, 1]]


class ArrayRecordDataSource(Examples):
    """As that of tfds, whose splits come as a dict."""


FILE = Part("a file", 3, (0, 0), lambda start, stop: np.arange(start, stop))
SPLITS = dict.fromkeys(["train", "test"], ArrayRecordDataSource(np.arange(3)))
REFUSED = {
    "splits": (SPLITS, r"source\['test'\] is a ArrayRecord.*: pass source\['test'\] alone"),
    "files": ((FILE, FILE), r"write ordering.blocks.split\(source, unit_size=1\)"),
    "no numbers": (
        ArrayRecordDataSource({"x": np.arange(3)}, 0, KeyError(0)),
        r"source\[0\] fails",
    ),
    "an array of texts": ({"x": ["a\0", "b"]}, r"np.array\(source\['x'\], object\)"),
    "a stream": (iter([1, 2]), r"write list\(source\)"),
    "an array of another library": ({"x": Foreign(3, 2)}, r"write np.asarray\(source\['x'\]\)"),
    "a masked array": (np.ma.array([1, 2]), r"write source.filled\(value\)"),
}


@pytest.mark.parametrize("source,message", REFUSED.values(), ids=REFUSED)
def test_what_is_no_source_is_refused_with_what_to_write(source, message):
    with pytest.raises(ValueError, match=message):
        as_source(source)


def test_a_data_set_that_may_be_called_is_a_source():
    source = type("Callable", (Examples,), {"__call__": lambda self: None})(np.arange(4))
    order = ordering.random_reshuffling(4, units_per_step=2)
    reads = ordering.data.read_epochs(source, order, jax.random.key(0), num_epochs=1)
    assert sorted(np.concatenate(list(reads)).tolist()) == [0, 1, 2, 3]


def test_a_random_map_of_grain_is_warned_of():
    """It is the same in every epoch, as its numbers follow from a seed and the example's number."""
    grain = pytest.importorskip("grain")
    plain = grain.MapDataset.range(4).shuffle(seed=0).map(lambda x: x)
    draw = lambda x, rng: (x, int(rng.integers(10**6)))  # noqa: E731
    for source in (plain.random_map(draw, seed=1), plain.seed(1).random_map(draw).map(lambda x: x)):
        with pytest.warns(UserWarning, match="source has a random_map, .* grain_dataset"):
            as_source(source)

    def read(indices, first_step, epoch):
        return ordering.data.grain_dataset(plain, indices).seed(epoch).random_map(draw).batch(2)

    order = ordering.random_reshuffling(4, units_per_step=2)
    batches = ordering.data.read_epochs(read, order, jax.random.key(0), num_epochs=2)
    noise = [value for _, values in batches for value in values.tolist()]
    assert len(set(noise)) == 8
