"""Samplers, datasets and epochs read what `step_indices` says, however many processes read."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import ordering
from ordering.input.sources import Steps
from tests import tables

grain = pytest.importorskip("grain", reason="Grain is not installed: pip install grain")

PROCESSES = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
# (workers or None for one order without an axis, units, units per step, unit size)
SIZES = [(None, 13, 3, 1), (1, 12, 4, 2), (4, 13, 3, 2), (4, 16, 2, 1), (4, 5, 5, 1)]
# Every process imports JAX: seconds each.
IN_PROCESSES = [
    pytest.param(size, count, marks=pytest.mark.slow)
    for size, count in [(SIZES[0], 1), (SIZES[2], 1), (SIZES[2], 4), (SIZES[4], 4)]
]


@pytest.fixture(autouse=True)
def parsed_flags():
    """Grain's processes ask for flags, which `absl.app.run` parses in a program."""
    before = flags.FLAGS.is_parsed()
    flags.FLAGS.mark_as_parsed()
    yield
    if not before:
        flags.FLAGS.unparse_flags()


def orders_of(workers, num_units, seed=0):
    rng = np.random.default_rng(seed)
    orders = np.stack([rng.permutation(num_units) for _ in range(workers or 1)])
    return orders if workers else orders[0]


def source_of(workers, num_units, unit_size):
    n = (workers or 1) * num_units * unit_size
    return {"x": np.arange(2 * n).reshape(n, 2), "y": np.arange(n) * 10}


def expected(source, orders, units_per_step, unit_size=1, first_step=0):
    """The steps by hand, from the definition of a unit."""
    workers, num_units = np.atleast_2d(orders).shape
    found = []
    for start, stop in tables.steps(num_units, units_per_step)[first_step:]:
        units = np.atleast_2d(orders)[:, start:stop] + num_units * np.arange(workers)[:, None]
        examples = units[..., None] * unit_size + np.arange(unit_size)
        shape = (workers, -1) if np.ndim(orders) == 2 else (-1,)
        examples = examples.reshape(shape)
        found.append(jax.tree.map(lambda x, chosen=examples: x[chosen], source))
    return found


def assert_equal(found, wanted):
    found = list(found)
    assert len(found) == len(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def case(size):
    workers, num_units, units_per_step, unit_size = size
    source, orders = source_of(workers, num_units, unit_size), orders_of(workers, num_units)
    sizes = {"units_per_step": units_per_step, "unit_size": unit_size}
    return source, orders, sizes, expected(source, orders, units_per_step, unit_size)


def in_processes(dataset, count):
    read = dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    return read.mp_prefetch(grain.MultiprocessingOptions(num_workers=count)) if count else read


@pytest.mark.parametrize("size", SIZES)
def test_steps_by_number(size):
    source, orders, sizes, wanted = case(size)
    steps = Steps(source, jnp.asarray(orders), **sizes)
    assert_equal([steps[t] for t in range(len(steps))], wanted)
    assert_equal([steps[t] for t in range(len(steps))[::-1]], wanted[::-1])
    for again in (pickle.loads(pickle.dumps(steps)), jax.tree.map(jnp.asarray, source)):
        if isinstance(again, dict):  # arrays on a device, which no other process may have
            again = Steps(again, orders, **sizes)
            assert type(again.source["x"]) is np.ndarray
        assert_equal([again[t] for t in range(len(steps))], wanted)
    for behind in (-1, len(steps)):
        with pytest.raises(IndexError, match="the next epoch has another order"):
            steps[behind]


def test_a_slice_of_orders_and_units_that_are_dealt():
    source, orders = source_of(4, 12, 1), orders_of(4, 12)
    steps = Steps(source, orders[:, 6:], units_per_step=3, num_units=12)
    assert_equal([steps[0], steps[1]], expected(source, orders, 3, first_step=2))
    dealt = np.random.default_rng(0).permutation(48).reshape(4, 12)
    steps = Steps(source, dealt, units_per_step=12, total=48)
    np.testing.assert_array_equal(steps[0]["y"], dealt * 10)


@pytest.mark.parametrize("size,count", [(size, 0) for size in SIZES] + IN_PROCESSES)
def test_a_dataset_in_several_processes(size, count):
    source, orders, sizes, wanted = case(size)
    dataset = ordering.input.map_dataset(source, orders, **sizes)
    assert_equal([dataset[t] for t in range(len(dataset))], wanted)
    assert_equal(in_processes(dataset, count), wanted)


def test_a_dataset_reads_a_dataset_with_maps_of_its_own():
    examples = grain.MapDataset.source(np.arange(12)).map(lambda i: {"i": i, "square": i * i})
    dataset = ordering.input.map_dataset(examples, orders_of(2, 6), units_per_step=4)
    arrays = {"i": np.arange(12), "square": np.arange(12) ** 2}
    assert_equal(dataset, expected(arrays, orders_of(2, 6), 4))


@pytest.mark.parametrize("count", PROCESSES)
def test_a_dataset_is_restored_at_every_element(count):
    source, orders, sizes, wanted = case((4, 13, 3, 2))
    dataset = in_processes(ordering.input.map_dataset(source, orders, **sizes), count)
    reads, states = iter(dataset), []
    for batch in wanted:
        states.append(reads.get_state())
        assert_equal([next(reads)], [batch])
    states.append(reads.get_state())
    again = iter(dataset)
    for done, state in enumerate(states):
        again.set_state(json.loads(json.dumps(state)))
        assert_equal(again, wanted[done:])


def test_an_epoch_has_an_end():
    dataset = ordering.input.map_dataset(np.arange(6), np.arange(6), units_per_step=2)
    with pytest.raises(ValueError, match="an order is of one epoch"):
        dataset.repeat(2)
    with pytest.raises(ValueError, match="the order is the shuffle"):
        dataset.shuffle(seed=0)
    with pytest.raises(ValueError, match="element 3 of an epoch of 3"):
        list(dataset.map(lambda x: x).repeat(2))


@pytest.mark.parametrize("size", SIZES)
def test_a_torch_sampler_is_a_list_per_step(size):
    source, orders, sizes, wanted = case(size)
    sampler = ordering.input.torch_sampler(orders, **sizes)
    assert len(sampler) == len(wanted)
    for _ in range(2):
        found = [source["y"][np.array(i)] for i in sampler]
        assert_equal(found, [b["y"].reshape(-1) for b in wanted])
    reads, lists = iter(sampler), list(sampler)
    for done in range(len(wanted) + 1):
        state = json.loads(json.dumps(reads.state_dict()))
        again = iter(sampler)
        again.load_state_dict(state)
        assert list(again) == lists[done:]
        resumed = ordering.input.torch_sampler(orders, first_step=done, **sizes)
        assert [list(resumed), list(resumed)] == [lists[done:], lists]
        next(reads, None)


def test_a_torch_sampler_asks_for_the_order_of_every_epoch():
    current, asked = [np.arange(4)], []

    def orders():
        asked.append(len(asked))
        return current[0]

    sampler = ordering.input.torch_sampler(orders, units_per_step=2)
    assert len(sampler) == 2 and len(asked) == 1  # what a loader asks often makes no epoch anew
    state = iter(sampler).state_dict()
    assert list(sampler) == [[0, 1], [2, 3]]
    current[0] = current[0][::-1]
    assert list(sampler) == [[3, 2], [1, 0]]
    with pytest.raises(ValueError, match="restore the order's state of the same step"):
        iter(sampler).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("count", [0, 1, 4])
def test_torch_reads_the_steps(count):
    data = pytest.importorskip("torch.utils.data", reason="pip install torch")
    source, orders, sizes, wanted = case((4, 13, 3, 2))
    wanted = [b["y"] for b in wanted]
    sampler = ordering.input.torch_sampler(orders, **sizes)
    found = data.DataLoader(source["y"], batch_sampler=sampler, num_workers=count)
    assert_equal([b.numpy() for b in found], [b.reshape(-1) for b in wanted])


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("count", [0, 2])
def test_torchdata_restores_at_every_step(count):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    source, orders, sizes, wanted = case((4, 13, 3, 2))
    wanted = [b["y"].reshape(-1) for b in wanted]

    def loader():
        sampler = ordering.input.torch_sampler(orders, **sizes)
        return stateful.StatefulDataLoader(source["y"], batch_sampler=sampler, num_workers=count)

    for done in range(1, len(wanted)):
        first = loader()
        reads = iter(first)
        assert_equal([next(reads).numpy() for _ in range(done)], wanted[:done])
        again = loader()
        again.load_state_dict(first.state_dict())
        assert_equal([b.numpy() for b in again], wanted[done:])


@pytest.mark.parametrize(
    "make,sizes,word",
    [
        ("map_dataset", {"units_per_step": 7}, "units_per_step is 7"),
        ("map_dataset", {"unit_size": 2}, "the order names example 11, and the source has 6"),
        ("map_dataset", {"orders": [0, 0, 1]}, "at most once"),
        ("map_dataset", {"source": iter([1])}, "source is a list_iterator"),
        ("torch_sampler", {"first_step": 4}, "first_step is 4"),
        ("torch_sampler", {"orders": [0.5]}, "orders is float64"),
    ],
)  # fmt: skip
def test_wrong_inputs_are_refused(make, sizes, word):
    sizes = {"source": np.arange(6), "orders": np.arange(6), "units_per_step": 2} | sizes
    source, orders = sizes.pop("source"), sizes.pop("orders")
    given = (orders,) if make.endswith("sampler") else (source, orders)
    with pytest.raises(ValueError, match=word):
        getattr(ordering.input, make)(*given, **sizes)
