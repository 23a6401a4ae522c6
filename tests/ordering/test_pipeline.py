"""The pipeline gives the batches of the plain NumPy loop, and gives them ahead of time."""

import functools
import pathlib
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ordering
from tests import tables
from tests.sources import SOURCES, Examples, ManyExamples, assert_same, data, plain_loop
from tests.waiting import PATIENCE, wait_for

tf = pytest.importorskip("tensorflow")

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("transform", [None, lambda batch, seed: batch])
def test_equals_the_plain_loop(name, transform):
    for kind, size, batch_size in ((lambda x: x, 23, 5), (Examples, 20, 5), (ManyExamples, 1, 7)):
        arrays = SOURCES[name](size)
        order = np.random.default_rng(1).permutation(size)
        found = ordering.input.batches(
            kind(arrays), order, batch_size=batch_size, transform=transform
        )
        assert_same(found, plain_loop(arrays, order, batch_size))


@pytest.mark.parametrize("calls", [1, 4])
def test_the_sequence_does_not_depend_on_how_long_reading_takes(calls):
    class Uneven(Examples):
        def __getitem__(self, index):
            time.sleep(0.002 * (index % 5))
            return super().__getitem__(index)

    arrays, order = data(40), np.random.default_rng(2).permutation(40)
    found = ordering.input.batches(Uneven(arrays), order, batch_size=3, num_parallel_calls=calls)
    assert_same(found, plain_loop(arrays, order, 3))


def test_text_keeps_its_zeros():
    texts = [b"abc\0\0", b"", b"\0x", "é"]
    for transform in (None, lambda batch, seed: batch):
        (found,) = ordering.input.batches(texts, [2, 3, 0, 1], batch_size=4, transform=transform)
        found = [x.encode() if isinstance(x, str) else x for x in found]
        assert found == [texts[2], "é".encode(), texts[0], texts[1]]
        for dtype in ("S3", "U3", object):
            arrays = np.array(["a", "bcd"], dtype)
            (found,) = ordering.input.batches(arrays, [1, 0], batch_size=2, transform=transform)
            assert found.astype("U3").tolist() == ["bcd", "a"]


def test_tfds_source():
    folder = ROOT.parent / "shared" / "data" / "tfds"
    if not folder.is_dir():
        pytest.skip("the prepared data sets are not on this machine")
    tfds = pytest.importorskip("tensorflow_datasets")
    source = tfds.data_source("mnist", split="test", data_dir=folder)
    order = np.random.default_rng(0).permutation(len(source))[:50]
    found = list(ordering.input.batches(source, order, batch_size=20))
    assert [len(b["label"]) for b in found] == [20, 20, 10]
    for key in ("image", "label"):
        expected = np.stack([source[int(i)][key] for i in order])
        np.testing.assert_array_equal(np.concatenate([b[key] for b in found]), expected)


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 3), st.data())
def test_step_indices_are_the_units_of_every_worker(workers, num_units, unit_size, data):
    units_per_step = data.draw(st.integers(1, num_units))
    rng = np.random.default_rng(data.draw(st.integers(0, 100)))
    orders = np.stack([rng.permutation(num_units) for _ in range(workers)])
    indices, batch_size = ordering.input.step_indices(
        orders, units_per_step=units_per_step, unit_size=unit_size
    )
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
        ordering.input.step_indices(
            part, units_per_step=units_per_step, unit_size=unit_size, num_units=num_units
        )[0]
        for part in (orders[:, :cut], orders[:, cut:])
    ]
    np.testing.assert_array_equal(np.concatenate(parts), indices)


def augment(batch, seed):
    if tf.random.stateless_uniform([], seed) < 0.5:  # becomes a tf.cond
        batch = dict(batch, image=batch["image"][:, ::-1])
    noise = tf.random.stateless_normal(tf.shape(batch["image"]), seed)
    return {"x": tf.cast(batch["image"], tf.float32) + noise, "both": [batch["more"][1], seed]}


@pytest.mark.parametrize("kind", [lambda x: x, Examples])
def test_transform_depends_on_seed_and_batch_number_only(kind):
    source, order = kind(data()), np.random.default_rng(0).permutation(23)
    read = functools.partial(ordering.input.batches, source, batch_size=4, transform=augment)
    once = list(read(order, seed=5))
    assert [b["both"][1].tolist() for b in once] == [[5, i] for i in range(6)]
    assert once[0]["x"].shape == (4, 3, 2) and once[-1]["x"].shape == (3, 3, 2)
    assert_same(read(order, seed=5), once)
    for cut in (1, 4):
        head, tail = order[: 4 * cut], order[4 * cut :]
        split = [*read(head, seed=5), *read(tail, seed=5, first_batch=cut)]
        assert_same(split, once)
    other = list(read(order, seed=6))
    assert not np.array_equal(other[0]["x"], once[0]["x"])
    assert once[0]["x"][0, 0, 0] % 1 != once[1]["x"][0, 0, 0] % 1


def test_transform_decodes_text():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 1), dtype=np.uint8)
    encoded = [tf.io.encode_png(image).numpy() for image in images]

    def decode(texts, seed):
        return tf.map_fn(tf.io.decode_png, texts, fn_output_signature=tf.uint8)

    found = ordering.input.batches(encoded, [4, 2, 0], batch_size=2, transform=decode)
    assert_same(found, [images[[4, 2]], images[[0]]])


def test_reading_starts_before_the_first_next():
    source = Examples(np.arange(100))
    stream = ordering.input.batches(source, np.arange(10, 100), batch_size=2, prefetch=3)
    wait_for(lambda: {10, 11, 12, 13, 14, 15} <= set(source.asked))
    assert 99 not in source.asked
    assert next(stream).tolist() == [10, 11]


def test_an_iterator_that_is_given_up_stops_reading():
    started = threading.Event()

    class Slow(Examples):
        def __getitem__(self, index):
            if self.asked:
                started.set()
                time.sleep(0.01)
            return super().__getitem__(index)

    source = Slow(np.arange(1000))
    stream = ordering.input.batches(source, np.arange(1000), batch_size=1)
    assert started.wait(PATIENCE)
    del stream  # waits for the reading threads
    asked = len(source.asked)
    time.sleep(0.1)
    assert len(source.asked) == asked < 1000


@pytest.mark.slow
def test_the_interpreter_ends_while_an_iterator_reads():
    """And TensorFlow is imported only where it is used."""
    code = """
import sys, time, numpy as np, ordering
print("tensorflow" in sys.modules)
class Slow:
    def __len__(self): return 1000
    def __getitem__(self, i):
        time.sleep(0.02)
        return np.zeros(2)
stream = ordering.input.batches(Slow(), np.arange(1000), batch_size=2)
next(stream)
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "False\nend\n"), done.stderr


@pytest.mark.parametrize("kind", [Examples, ManyExamples])
@pytest.mark.parametrize("transform", [None, lambda batch, seed: batch])
@pytest.mark.parametrize("error", [OSError("disk 7 is gone"), StopIteration("disk 7 is gone")])
def test_a_source_that_fails(kind, transform, error):
    source = kind(np.arange(20), fail_at=13, error=error)
    stream = ordering.input.batches(
        source, [1, 2, 13, 4, 5], batch_size=2, first_batch=6, transform=transform
    )
    assert next(stream).tolist() == [1, 2]
    with pytest.raises(RuntimeError, match=r"batch 7, examples \[13  4\].*disk 7") as caught:
        next(stream)
    assert caught.value.__cause__ is error


def test_examples_that_do_not_fit_together():
    ragged = [np.zeros(2), np.zeros(3), np.zeros(2)]
    for transform in (None, lambda batch, seed: batch):
        stream = ordering.input.batches(ragged, [0, 2, 1, 0], batch_size=2, transform=transform)
        assert next(stream).shape == (2, 2)
        with pytest.raises(RuntimeError, match=r"examples \[1 0\]: ValueError.*same shape"):
            next(stream)
    for examples in ([1, 2.5], [np.zeros(2), np.zeros(3)], [(1, 2), {"a": 1}]):
        stream = ordering.input.batches(examples, [0, 1], batch_size=1, transform=lambda b, seed: b)
        next(stream)
        with pytest.raises(RuntimeError, match=r"(?s)examples \[1\]: .* differ from the first"):
            next(stream)

    class Short(ManyExamples):
        def __getitems__(self, indices):
            return super().__getitems__(indices[:1])

    with pytest.raises(RuntimeError, match="gave 1 examples for 2"):
        next(ordering.input.batches(Short(np.arange(4)), [0, 1], batch_size=2))


def test_a_list_in_an_example_is_one_array():
    """A table in plain Python, as a Hugging Face dataset gives it."""
    table = [
        {"x": [i, 2, 3], "y": [[i, 1.5]], "words": ["a", str(i)], "label": i, "files": [b"a\0"]}
        for i in range(4)
    ]
    _, read = ordering.input.reader(table)
    batch = read(np.array([2, 0]))
    assert batch["x"].tolist() == [[2, 2, 3], [0, 2, 3]]
    assert batch["y"].tolist() == [[[2, 1.5]], [[0, 1.5]]]
    assert batch["words"].tolist() == [["a", "2"], ["a", "0"]]
    assert batch["label"].tolist() == [2, 0]
    assert batch["files"].tolist() == [[b"a\0"], [b"a\0"]]
    pairs = [[np.zeros(2), np.ones(3)], [np.zeros(2), np.ones(3)]]  # structure, not data
    found = ordering.input.reader(pairs)[1](np.array([1]))
    assert [x.shape for x in found] == [(1, 2), (1, 3)]


@pytest.mark.parametrize(
    "columns,word",
    [
        ([[1, 2], [1, 2, 3]], r"shapes \[\(2,\), \(3,\)\]: .* one length"),
        ([[[1], [1, 2]]], r"the list \[\[1\], \[1, 2\]\]: a list is read as one"),
        ([[1, None]], "none missing"),
        ([[1, "a"]], "numbers or texts"),
    ],
)
def test_lists_that_are_no_array(columns, word):
    _, read = ordering.input.reader([{"x": column} for column in columns])
    with pytest.raises(ValueError, match=word):
        read(np.arange(len(columns)))


def test_a_transform_that_fails():
    def transform(batch, seed):
        tf.debugging.assert_less(batch, 3, message="three is too much")
        return batch

    source = np.arange(5, dtype=np.int32)
    stream = ordering.input.batches(source, np.arange(5), batch_size=2, transform=transform)
    assert next(stream).tolist() == [0, 1]
    with pytest.raises(RuntimeError, match=r"(?s)batch 1, examples \[2 3\].*three is too much"):
        next(stream)


@pytest.mark.parametrize(
    "source,indices,sizes,word",
    [
        (np.arange(3), [0], {"batch_size": 0}, "batch_size is 0"),
        (np.arange(3), [0], {"batch_size": 1.5}, "batch_size is 1.5"),
        (np.arange(3), [0], {"prefetch": 0}, "prefetch is 0"),
        (np.arange(3), [0], {"first_batch": -1}, "first_batch is -1"),
        (np.arange(3), [0], {"num_parallel_calls": 0}, "num_parallel_calls is 0"),
        (np.arange(3), [0, 3], {}, "index 3 is out of range: the source has 3"),
        (Examples(np.arange(3)), [-1], {}, "index -1 is out of range"),
        (np.arange(3), [0.0, 1.0], {}, r"indices is float64\[2\]"),
        (np.arange(3), [True], {}, r"indices is bool\[1\]"),
        (np.arange(3), [[0]], {}, r"indices is int64\[1, 1\]"),
        ({"x": np.zeros((3, 1)), "y": np.zeros(2)}, [0], {}, r"\(3, 1\), \(2,\)"),
        ((np.zeros(3), 3), [0], {}, "leading axis"),
        ({"train": Examples(np.arange(3))}, [0], {}, "pass one split"),
        (np.array(3), [0], {}, "leading axis"),
        ({}, [0], {}, "leading axis"),
        (np.zeros((0, 2)), [], {}, "source is empty"),
        ([], [], {}, "source is empty"),
        (iter([1]), [0], {}, "source is a list_iterator"),
    ],
)
def test_bad_input(source, indices, sizes, word):
    with pytest.raises(ValueError, match=word):
        ordering.input.batches(source, indices, **{"batch_size": 1, **sizes})


@pytest.mark.parametrize(
    "orders,sizes,word",
    [
        ([0, 2, 2], {}, r"orders of shape \(1, 3\) do not name each unit of 0 .. 2 at most"),
        ([1, 2, 3], {}, "at most once"),
        ([[0, 1], [0, -1]], {}, "at most once"),
        ([0, 1, 2], {"num_units": 2}, "each unit of 0 .. 1 at most once"),
        ([3, 3], {"num_units": 5}, "at most once"),
        ([0.0, 1.0], {}, r"orders is float64\[2\]"),
        ([[[0]]], {}, r"orders is int64\[1, 1, 1\]"),
        ([], {}, "num_units is 0"),
        ([0, 1], {"units_per_step": 3}, "units_per_step is 3"),
        ([0, 1], {"unit_size": 0}, "unit_size is 0"),
    ],
)
def test_bad_orders(orders, sizes, word):
    with pytest.raises(ValueError, match=word):
        ordering.input.step_indices(orders, **{"units_per_step": 1, **sizes})


def test_without_tensorflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"pip install 'syncopate\[data\]'"):
        ordering.input.batches(np.arange(3), [0], batch_size=1)
