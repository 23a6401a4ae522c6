"""Loaders of other libraries read the same steps with any number of processes."""

import json
import sys

import jax
import numpy as np
import pytest

from ordering.data import grain_dataset, step_indices
from ordering.indices import Indices
from tests.sources import SIZES, Examples, assert_same, epoch_of

grain = None  # imported where it is used: every process of the tests collects this file


@pytest.fixture(autouse=True, scope="module")
def imported():
    global grain
    grain = pytest.importorskip("grain", reason="Grain is not installed: pip install grain")


pytestmark = pytest.mark.usefixtures("parsed_flags")
MIDDLE = SIZES[2]
# Every process imports JAX, which takes seconds.
IN_PROCESSES = [
    pytest.param(size, count, marks=pytest.mark.slow)
    for size, count in [(SIZES[0], 1), (MIDDLE, 4), (SIZES[3], 4)]
]


@pytest.mark.parametrize("size,count", [(size, 0) for size in SIZES] + IN_PROCESSES)
def test_a_grain_dataset_is_restored_at_every_step(size, count):
    source, orders, sizes, steps = epoch_of(size)
    indices, per_step = step_indices(orders, **sizes)
    wanted = [jax.tree.map(lambda x: x.reshape(-1, *x.shape[orders.ndim :]), b) for b in steps]
    for kind in (lambda x: x, Examples, lambda x: grain.MapDataset.source(Examples(x))):
        dataset = grain_dataset(kind(source), indices).batch(per_step)
        assert_same([dataset[t] for t in range(len(dataset))], wanted)
        assert_same(dataset[1:], wanted[1:])
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    if count:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=count))
    reads, states = iter(dataset), []
    for batch in wanted:
        states.append(reads.get_state())
        assert_same([next(reads)], [batch])
    again = iter(dataset)
    for done, state in enumerate(states):
        again.set_state(json.loads(json.dumps(state)))
        assert_same(again, wanted[done:])


def test_examples_of_a_grain_source_stay_as_they_are():
    """Also such as no batch could hold."""
    rows = [{"text": "a" * i, "tokens": [i] * i} for i in range(4)]
    dataset = grain_dataset(grain.MapDataset.source(rows), jax.numpy.array([2, 0, 3]))
    assert list(dataset) == [rows[2], rows[0], rows[3]]
    x, y = np.arange(4), jax.numpy.arange(4) ** 2
    assert [int(a) + int(b) for a, b in grain_dataset((x, y), [3, 1])] == [12, 2]
    ends = grain_dataset(Examples(x, fail_at=1, error=StopIteration("gone")), [0, 1])
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(ends)
    kept = grain.MapDataset.source(x).filter(lambda i: i % 2 == 0)  # to Grain others are None
    with pytest.raises(ValueError, match="example 1 is None"):
        list(grain_dataset(kept, [0, 1]).batch(2))
    mixed = [{"id": np.int64(5)}, {"id": np.uint64(2**63 + 1)}]  # NumPy would make them float64
    with pytest.raises(ValueError, match="uint64, .* example 0 .*int64"):
        list(grain_dataset(mixed, [0, 1]).batch(2))
    computed = Indices(lambda places: places, 6)
    for beyond in (grain_dataset(x, computed), grain_dataset([*x], computed)):
        with pytest.raises(ValueError, match="out of range: the source has 4 examples"):
            list(beyond)
    with pytest.raises(
        ValueError, match=r"has 9223372036854775807 examples.* leave out repeat\(\)"
    ):
        grain_dataset(grain.MapDataset.source(x).repeat(), [0])


def test_without_grain(monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match="pip install grain"):
        grain_dataset(np.arange(6), [0])
