"""Loaders of other libraries read the same steps with any number of processes."""

import json

import numpy as np
import pytest

from ordering.input import map_dataset, step_indices
from tests.refused import refuses
from tests.sources import SIZES, assert_same, epoch_of

grain = pytest.importorskip("grain", reason="Grain is not installed: pip install grain")

pytestmark = pytest.mark.usefixtures("parsed_flags")
MIDDLE = SIZES[2]
# Every process imports JAX, which takes seconds.
IN_PROCESSES = [
    pytest.param(size, count, marks=pytest.mark.slow)
    for size, count in [(SIZES[0], 1), (MIDDLE, 4), (SIZES[3], 4)]
]


@pytest.mark.parametrize("size,count", [(size, 0) for size in SIZES] + IN_PROCESSES)
def test_a_grain_dataset_is_restored_at_every_element(size, count):
    source, orders, sizes, wanted = epoch_of(size)
    dataset = map_dataset(source, orders, **sizes)
    assert_same([dataset[t] for t in range(len(dataset))], wanted)
    dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    if count:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=count))
    reads, states = iter(dataset), []
    for batch in wanted:
        states.append(reads.get_state())
        assert_same([next(reads)], [batch])
    states.append(reads.get_state())
    again = iter(dataset)
    for done, state in enumerate(states):
        again.set_state(json.loads(json.dumps(state)))
        assert_same(again, wanted[done:])


def test_a_grain_source_with_maps_and_the_end_of_an_epoch():
    examples = grain.MapDataset.source(np.arange(12)).map(lambda i: {"i": i, "square": i * i})
    dataset = map_dataset(examples, [[3, 0, 5, 1, 2, 4], [0, 1, 2, 3, 4, 5]], units_per_step=4)
    steps = [np.array([[3, 0, 5, 1], [6, 7, 8, 9]]), np.array([[2, 4], [10, 11]])]
    assert_same(dataset, [{"i": step, "square": step**2} for step in steps])
    for epoch in (dataset, dataset.map(lambda x: x)):
        with pytest.raises(ValueError, match="an order is of one epoch"):
            epoch.repeat(2)
    with pytest.raises(ValueError, match="the order is the shuffle"):
        dataset.shuffle(seed=0)
    with pytest.raises(IndexError, match="no step 2 in an epoch of 2 steps"):
        dataset.map(lambda x: x)[2]


SIX = np.arange(6)
OTHERS = {
    "order": ([5, 4, 3, 2, 1, 0], 2, "state's order is '.{8}', and this epoch's is '.{8}'"),
    "sizes": (SIX, 3, "state's examples_per_step is 2, and this epoch's is 3"),
}
OTHER = pytest.mark.parametrize("order,units_per_step,message", OTHERS.values(), ids=OTHERS)
READS = {
    "plain": lambda dataset: dataset,
    "with maps": lambda dataset: dataset[1:].seed(0).map(lambda x: x + 1).filter(lambda x: True),
    "iter": lambda dataset: dataset.map(lambda x: x + 1).to_iter_dataset().map(lambda x: x),
    "in processes": lambda dataset: dataset.to_iter_dataset().mp_prefetch(),
}


def test_a_state_of_another_number_of_processes_is_refused_by_grain():
    """Grain itself raises an IndexError there, or hangs."""
    epoch = map_dataset(SIX, SIX, units_per_step=2)
    counts, of = range(3), grain.MultiprocessingOptions
    reads = [iter(epoch.to_iter_dataset().mp_prefetch(of(count))) for count in counts]
    for saved in counts:
        state = reads[saved].get_state()
        for count in counts:
            if count == saved:
                reads[count].set_state(state)
                continue
            with pytest.raises(ValueError, match=f"processes is {saved}, and .* is {count}"):
                reads[count].set_state(state)
    assert_same(epoch[1:].to_iter_dataset(), [np.array([2, 3]), np.array([4, 5])])


@OTHER
@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_a_state_of_another_epoch_is_refused_by_grain(order, units_per_step, message, reads):
    state = iter(reads(map_dataset(SIX, SIX, units_per_step=2))).get_state()
    other = iter(reads(map_dataset(SIX, order, units_per_step=units_per_step)))
    with pytest.raises(ValueError, match=message):
        other.set_state(json.loads(json.dumps(state)))
    with pytest.raises(ValueError, match="state's order is None"):
        other.set_state({"next_index": 1})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("default")
def test_lists_of_step_indices_are_a_batch_sampler(size, count):
    data = pytest.importorskip("torch.utils.data", reason="pip install torch")
    source, orders, sizes, wanted = epoch_of(size)
    indices, per_step = step_indices(orders, **sizes)
    lists = [indices[i : i + per_step].tolist() for i in range(0, len(indices), per_step)]
    for done in (0, 1):
        loader = data.DataLoader(source["y"], batch_sampler=lists[done:], num_workers=count)
        assert_same([b.numpy() for b in loader], [b["y"].reshape(-1) for b in wanted[done:]])


test_wrong_inputs_are_refused = refuses({
    "a large unit": (
        lambda: map_dataset(SIX, SIX, units_per_step=2, unit_size=2),
        "the order names example 11, and the source has 6",
    ),
})  # fmt: skip
