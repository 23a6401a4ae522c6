"""`tf_dataset` gives the examples of an order one by one, in a pipeline as anyone writes it."""

import pathlib
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

import ordering
from ordering.data import datasets, read_epochs, reordered, tf_dataset
from tests.sources import Examples, assert_same

tf = None  # imported where it is used: every process of the tests collects this file


@pytest.fixture(autouse=True, scope="module")
def imported():
    global tf
    tf = pytest.importorskip("tensorflow")


ROOT = pathlib.Path(__file__).resolve().parents[2]


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class ManyExamples(Examples):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


class Slow(Examples):
    def __getitem__(self, index):
        time.sleep(0.0005 * (index % 5))
        return super().__getitem__(index)


def data(size):
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 256, (size, 3, 2), dtype=np.uint8),
        "more": (rng.normal(size=size).astype(np.float32), np.arange(size) % 2 == 0),
    }


SOURCES = {
    "array": lambda size: np.random.default_rng(size).normal(size=(size, 2)),
    "scalars": lambda size: np.arange(size, dtype=np.int32) * 3,
    "tuple": lambda size: (np.arange(size), np.ones((size, 2), np.float16)),
    "named": lambda size: Pair(np.arange(size), np.arange(size) ** 2),
    "dict": data,
}


@pytest.mark.parametrize("name", SOURCES)
def test_equals_the_plain_loop(name):
    """However long reading takes."""
    for kind, size, batch_size in ((lambda x: x, 23, 5), (Slow, 99, 7), (ManyExamples, 1, 7)):
        arrays, order = SOURCES[name](size), np.random.default_rng(1).permutation(size)
        dataset = tf_dataset(kind(arrays), order)
        assert dataset.cardinality() == len(dataset) == size
        result = list(dataset.batch(batch_size).prefetch(2).as_numpy_iterator())
        parts = [order[i : i + batch_size] for i in range(0, size, batch_size)]
        assert_same(result, [jax.tree.map(lambda x, part=part: x[part], arrays) for part in parts])
        shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
        assert shapes == [x.shape[1:] for x in jax.tree.leaves(arrays)]


def test_text_keeps_its_zeros():
    texts = [b"abc\0\0", b"", b"\0x", "é"]
    examples = list(tf_dataset(texts, [2, 3, 0, 1]).as_numpy_iterator())
    assert examples == [texts[2], "é".encode(), texts[0], texts[1]]
    for dtype in ("S3", "U3", object):
        examples = list(tf_dataset(np.array(["a", "bcd"], dtype), [1, 0]).as_numpy_iterator())
        assert examples == [b"bcd", b"a"]


@pytest.mark.slow
@pytest.mark.parametrize("read", ["iter(dataset)", "ordering.data.prefetch_to_device(dataset)"])
def test_the_interpreter_exits_while_a_dataset_is_read(read):
    """Also, TensorFlow is imported only when it is used, and without a read nothing ends late."""
    code = f"""
import sys, time, numpy as np, ordering
print("tensorflow" in sys.modules or ordering.data.datasets._reads.cache_info().currsize)
class Slow:
    def __len__(self): return 10_000
    def __getitem__(self, i):
        time.sleep(0.002)
        return np.zeros(2)
dataset = ordering.data.tf_dataset(Slow(), np.arange(10_000)).batch(2).prefetch(2)
stream = {read}
next(stream)
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "0\nend\n"), done.stderr


def test_a_read_that_hangs_is_left_at_the_end():
    """Its thread ends with the process, and TensorFlow's is free before."""
    reads, hangs, begun, errors = datasets._Reads(), threading.Event(), threading.Event(), []

    def read():
        begun.set()
        hangs.wait()

    def wait():
        with pytest.raises(RuntimeError, match="the program has ended") as raised:
            reads(read)
        errors.append(raised.value)

    waiting = threading.Thread(target=wait)
    waiting.start()
    begun.wait()
    reads.close()
    waiting.join()
    assert len(errors) == 1 and not hangs.is_set()
    with pytest.raises(RuntimeError, match="the program has ended"):
        reads(lambda: 1)
    hangs.set()


@pytest.mark.slow
def test_the_interpreter_exits_while_a_read_hangs():
    code = """
import threading, numpy as np, ordering
class Hangs(list):
    def __getitem__(self, i):
        return i if i < 64 else threading.Event().wait()
stream = iter(ordering.data.tf_dataset(Hangs(range(128)), np.arange(128)).batch(2).prefetch(2))
print([next(stream).shape for _ in range(3)])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.count("2") == 3, done.stderr


@pytest.mark.parametrize("kind", [Examples, ManyExamples])
@pytest.mark.parametrize("error", [OSError("disk 7 is gone"), StopIteration("disk 7 is gone")])
def test_a_source_that_fails(kind, error):
    source = kind(np.arange(100), fail_at=80, error=error)
    stream = tf_dataset(source, np.arange(100)).batch(2).as_numpy_iterator()
    for i in range(32):  # the examples of the first read
        assert next(stream).tolist() == [2 * i, 2 * i + 1]
    with pytest.raises(tf.errors.OpError, match=r"(?s)examples \[64 65 .* 99\].*disk 7"):
        next(stream)


RAGGED = [np.zeros(2), np.zeros(2), np.zeros(3)]
FAILING = {
    "shapes of others": (
        64 * RAGGED[:1] + RAGGED[2:],
        range(65),
        "differ from example 0: pad",
    ),
    "types": (64 * [1] + [2.5], range(65), "is of float64, and that of example 0 of int64"),
}


@pytest.mark.parametrize("source,indices,message", FAILING.values(), ids=FAILING)
def test_examples_that_do_not_fit_together(source, indices, message):
    with pytest.raises(tf.errors.OpError, match=f"(?s)examples .*{message}"):
        list(tf_dataset(source, indices))


def test_without_tensorflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    for name, make in ("tf_dataset", tf_dataset), ("reordered", reordered):
        with pytest.raises(ImportError, match=rf"{name} .*pip install 'syncopate-jax\[data\]'"):
            make(np.arange(3), [0])


def finite(size):
    """A dataset of nested examples of many types, some of which its maps make."""
    rng = np.random.default_rng(0)
    texts = [rng.bytes(i % 4) + b"\0" for i in range(size)]
    arrays = {"image": rng.normal(size=(size, 2, 3)), "pair": (np.arange(size) % 3 == 0, texts)}
    numbers = tf.data.Dataset.range(size).map(lambda i: Pair(i, tf.cast(i, tf.bfloat16)))
    return tf.data.Dataset.zip((tf.data.Dataset.from_tensor_slices(arrays), numbers))


@pytest.mark.parametrize("size", [1, 64, 150])
def test_a_finite_dataset_in_another_order(size):
    """More or fewer examples than are taken at once, some of them twice."""
    dataset, indices = finite(size), np.random.default_rng(1).integers(0, size, size + 3)
    examples = list(dataset.as_numpy_iterator())
    result = reordered(dataset, indices)
    assert result.element_spec == dataset.element_spec and result.cardinality() == size + 3
    assert_same_or_texts(list(result.as_numpy_iterator()), [examples[i] for i in indices])
    assert list(reordered(dataset, [])) == []


def assert_same_or_texts(actual, wanted):
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert type(x) is type(y) and getattr(x, "dtype", None) == getattr(y, "dtype", None)
        assert np.array_equal(x, y)


def test_it_takes_the_place_of_a_shuffle_in_a_pipeline():
    """It is read once when it is made, and a pipeline goes on from any step."""
    order, values, begun = ordering.random_reshuffling(14, units_per_step=4), [], []

    def examples():
        begun.append(len(begun))
        yield from range(14)

    counted = tf.data.Dataset.from_generator(examples, output_signature=tf.TensorSpec((), tf.int32))
    counted = counted.apply(tf.data.experimental.assert_cardinality(14))

    def pipeline(indices, first_step, epoch):
        return reordered(counted, indices).map(lambda x: 10 * x).batch(4)

    with read_epochs(pipeline, order, jax.random.key(0), num_epochs=1) as reads:
        orders = np.asarray(reads.order_state.current)
        values += next(reads).tolist()
        saved = reads.state()
    assert len(begun) == 2, "all examples, and the first ones again"
    with read_epochs(pipeline, order, jax.random.key(0), num_epochs=1, state=saved) as reads:
        values += [x for batch in reads for x in batch.tolist()]
    assert values == (10 * orders).tolist()


REFUSED = {
    "ragged": (
        lambda: tf.data.Dataset.from_tensors({"x": tf.ragged.constant([[1], []])}),
        r"dataset\['x'\] is a RaggedTensorSpec.*to_tensor",
    ),
    "nested": (lambda: tf.data.Dataset.range(4).window(2), "DatasetSpec"),
    "none": (lambda: tf.data.Dataset.from_tensors((1, None)), r"dataset\[1\] is a NoneTensorSpec"),
    "shuffled": (lambda: tf.data.Dataset.range(99).shuffle(99), "shuffle"),
    "random": (lambda: tf.data.Dataset.range(3).map(lambda i: tf.random.uniform([3])), "random"),
    "batches": (lambda: tf.data.Dataset.range(6).batch(3), "index 2 .* 2 examples"),
}


@pytest.mark.parametrize("make,message", REFUSED.values(), ids=REFUSED)
def test_datasets_without_an_order(make, message):
    with pytest.raises(ValueError, match=message):
        reordered(make(), [2, 0])


def test_errors_of_a_dataset_stay_its_own():
    with pytest.raises(tf.errors.InvalidArgumentError, match="different shapes"):
        reordered(tf.data.Dataset.range(3).map(tf.range), [0])
    checked = tf.data.Dataset.range(3).map(lambda i: tf.debugging.check_numerics(1 / i, "no rate"))
    with pytest.raises(tf.errors.InvalidArgumentError, match="no rate"):
        reordered(checked, [0])
