"""`batches` equals the plain NumPy loop, and reads ahead."""

import functools
import pathlib
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest

from ordering.input import batches
from tests.refused import refuses
from tests.sources import Examples, assert_same
from tests.waiting import wait_for

tf = pytest.importorskip("tensorflow")

ROOT = pathlib.Path(__file__).resolve().parents[2]
WAYS = pytest.mark.parametrize("transform", [None, lambda batch, seed: batch])


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class ManyExamples(Examples):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


def data(size=23, seed=0):
    rng = np.random.default_rng(seed)
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


def plain_loop(arrays, indices, batch_size):
    return [
        jax.tree.map(lambda x, part=indices[i : i + batch_size]: x[part], arrays)
        for i in range(0, len(indices), batch_size)
    ]


@pytest.mark.parametrize("name", SOURCES)
@WAYS
def test_equals_the_plain_loop(name, transform):
    for kind, size, batch_size in ((lambda x: x, 23, 5), (Examples, 20, 5), (ManyExamples, 1, 7)):
        arrays = SOURCES[name](size)
        order = np.random.default_rng(1).permutation(size)
        found = batches(kind(arrays), order, batch_size=batch_size, transform=transform)
        assert_same(found, plain_loop(arrays, order, batch_size))


class Slow(Examples):
    def __getitem__(self, index):
        time.sleep(0.002 * (index % 5))
        return super().__getitem__(index)


def test_the_sequence_does_not_depend_on_how_long_reading_takes():
    arrays, order = data(40), np.random.default_rng(2).permutation(40)
    found = batches(Slow(arrays), order, batch_size=3, num_parallel_calls=4)
    assert_same(found, plain_loop(arrays, order, 3))


@WAYS
def test_text_keeps_its_zeros(transform):
    texts = [b"abc\0\0", b"", b"\0x", "é"]
    (found,) = batches(texts, [2, 3, 0, 1], batch_size=4, transform=transform)
    found = [x.encode() if isinstance(x, str) else x for x in found]
    assert found == [texts[2], "é".encode(), texts[0], texts[1]]
    for dtype in ("S3", "U3", object):
        arrays = np.array(["a", "bcd"], dtype)
        (found,) = batches(arrays, [1, 0], batch_size=2, transform=transform)
        assert found.astype("U3").tolist() == ["bcd", "a"]


def augment(batch, seed):
    if tf.random.stateless_uniform([], seed) < 0.5:  # becomes a tf.cond
        batch = dict(batch, image=batch["image"][:, ::-1])
    noise = tf.random.stateless_normal(tf.shape(batch["image"]), seed)
    return {"x": tf.cast(batch["image"], tf.float32) + noise, "both": [batch["more"][1], seed]}


def test_transform_depends_on_seed_and_batch_number_only():
    order = np.random.default_rng(0).permutation(23)
    read = functools.partial(batches, data(), batch_size=4, transform=augment)
    once = list(read(order, seed=5))
    assert [b["both"][1].tolist() for b in once] == [[5, i] for i in range(6)]
    assert once[0]["x"].shape == (4, 3, 2) and once[-1]["x"].shape == (3, 3, 2)
    for cut in (0, 1, 4):
        head, tail = order[: 4 * cut], order[4 * cut :]
        assert_same([*read(head, seed=5), *read(tail, seed=5, first_batch=cut)], once)
    other = list(read(order, seed=6))
    assert not np.array_equal(other[0]["x"], once[0]["x"])
    assert once[0]["x"][0, 0, 0] % 1 != once[1]["x"][0, 0, 0] % 1


def test_transform_decodes_text():
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 1), dtype=np.uint8)
    encoded = [tf.io.encode_png(image).numpy() for image in images]

    def decode(texts, seed):
        return tf.map_fn(tf.io.decode_png, texts, fn_output_signature=tf.uint8)

    found = batches(encoded, [4, 2, 0], batch_size=2, transform=decode)
    assert_same(found, [images[[4, 2]], images[[0]]])


def test_reading_starts_at_the_call_and_stops_with_the_iterator():
    source = Examples(np.arange(100))
    stream = batches(source, np.arange(10, 100), batch_size=2, prefetch=3)
    wait_for(lambda: {10, 11, 12, 13, 14, 15} <= set(source.asked))
    assert 99 not in source.asked
    assert next(stream).tolist() == [10, 11]
    source = Slow(np.arange(1000))
    stream = batches(source, np.arange(1000), batch_size=1)
    wait_for(lambda: source.asked)
    del stream  # waits for the reading threads
    asked = len(source.asked)
    time.sleep(0.1)
    assert len(source.asked) == asked < 1000


@pytest.mark.slow
def test_the_interpreter_exits_while_an_iterator_reads():
    """Also, TensorFlow is imported only when it is used."""
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
@WAYS
@pytest.mark.parametrize("error", [OSError("disk 7 is gone"), StopIteration("disk 7 is gone")])
def test_a_source_that_fails(kind, transform, error):
    source = kind(np.arange(20), fail_at=13, error=error)
    stream = batches(source, [1, 2, 13, 4, 5], batch_size=2, first_batch=6, transform=transform)
    assert next(stream).tolist() == [1, 2]
    with pytest.raises(RuntimeError, match=r"batch 7, examples \[13  4\].*disk 7") as caught:
        next(stream)
    assert caught.value.__cause__ is error


class Short(ManyExamples):
    def __getitems__(self, indices):
        return super().__getitems__(indices[:1])


def at_most_three(batch, seed):
    tf.debugging.assert_less(batch, 3, message="three is too much")
    return batch


RAGGED, KEPT = [np.zeros(2), np.zeros(2), np.zeros(3)], lambda batch, seed: batch
FAILING = {  # the second batch of two examples
    "shapes in a batch": (RAGGED, None, r"examples \[2 0\]: ValueError.*one shape"),
    "shapes in a tensor": (RAGGED, KEPT, r"examples \[2 0\]: ValueError.*one shape"),
    "types": ([1, 2, 2.5], KEPT, r"examples \[2 0\]: .* differ in structure"),
    "structures": ([(1, 2), (1, 2), {"a": 1}], KEPT, r"examples \[2 0\]: ValueError"),
    "a transform": (
        np.int32([0, 0, 3]),
        at_most_three,
        r"batch 1, examples \[2 0\].*three is too much",
    ),
}


@pytest.mark.parametrize("source,transform,message", FAILING.values(), ids=FAILING)
def test_examples_that_do_not_fit_together(source, transform, message):
    stream = batches(source, [0, 1, 2, 0], batch_size=2, transform=transform)
    next(stream)
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        next(stream)


def test_a_source_that_returns_too_few_examples():
    with pytest.raises(RuntimeError, match="gave 1 examples for 2"):
        next(batches(Short(np.arange(4)), [0, 1], batch_size=2))


def of(indices, **sizes):
    return lambda: batches(np.arange(3), indices, **{"batch_size": 1} | sizes)


test_bad_input = refuses({
    "no batch": (of([0], batch_size=0), "batch_size is 0"),
    "transform": (of([0], transform={}), "transform is a dict: pass a function"),
    "no result": (of([0], transform=lambda batch, seed: None), "transform returns no tensors"),
    "too large": (of([0, 3]), "index 3 is out of range: the source has 3"),
})  # fmt: skip


def test_without_tensorflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(ImportError, match=r"pip install 'syncopate\[data\]'"):
        batches(np.arange(3), [0], batch_size=1)
