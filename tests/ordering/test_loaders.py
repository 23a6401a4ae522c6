"""Loaders of other libraries read the same steps with any number of processes."""

import json

import jax
import numpy as np
import pytest

import ordering
from ordering.input import map_dataset, torch_sampler
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


@OTHER
def test_a_state_of_another_epoch_is_refused_by_a_sampler(order, units_per_step, message):
    own = iter(torch_sampler(SIX, units_per_step=2))
    state, other = own.state_dict(), iter(torch_sampler(order, units_per_step=units_per_step))
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="state's step is 4: .* in 0 .. 3"):
        own.load_state_dict(state | {"step": 4})
    with pytest.raises(ValueError, match="state is a list: pass the dict of a saved iterator"):
        own.load_state_dict([])


@pytest.mark.parametrize("size", SIZES)
def test_a_torch_sampler_gives_a_list_per_step(size):
    source, orders, sizes, wanted = epoch_of(size)
    sampler = torch_sampler(orders, **sizes)
    assert len(sampler) == len(wanted)
    for _ in range(2):
        found = [source["y"][np.array(i)] for i in sampler]
        assert_same(found, [b["y"].reshape(-1) for b in wanted])
    reads, lists = iter(sampler), list(sampler)
    for done in range(len(wanted) + 1):
        again = iter(sampler)
        again.load_state_dict(json.loads(json.dumps(reads.state_dict())))
        assert list(again) == lists[done:]
        next(reads, None)


def test_a_torch_sampler_asks_for_the_order_of_every_epoch():
    current, asked = [np.arange(4)], []

    def orders():
        asked.append(len(asked))
        return current[0]

    sampler = torch_sampler(orders, units_per_step=2)
    assert len(sampler) == 2 and len(asked) == 1  # asking for the length makes no new epoch
    state = iter(sampler).state_dict()
    assert list(sampler) == [[0, 1], [2, 3]]
    current[0] = current[0][::-1]
    assert list(sampler) == [[3, 2], [1, 0]]
    with pytest.raises(ValueError, match="restore the order's state of the same"):
        iter(sampler).load_state_dict(state)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("count", [0, 2])
def test_torchs_loaders_read_the_steps_and_are_restored_at_every_one(count):
    data = pytest.importorskip("torch.utils.data", reason="pip install torch")
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    source, orders, sizes, wanted = epoch_of(MIDDLE)
    wanted = [b["y"].reshape(-1) for b in wanted]

    def loader(kind):
        sampler = torch_sampler(orders, **sizes)
        return kind(source["y"], batch_sampler=sampler, num_workers=count)

    assert_same([b.numpy() for b in loader(data.DataLoader)], wanted)
    for done in range(1, len(wanted)):
        first = loader(stateful.StatefulDataLoader)
        reads = iter(first)
        assert_same([next(reads).numpy() for _ in range(done)], wanted[:done])
        again = loader(stateful.StatefulDataLoader)
        again.load_state_dict(first.state_dict())
        assert_same([b.numpy() for b in again], wanted[done:])


STATE = ordering.random_reshuffling(6).init(jax.random.key(0), None)
test_wrong_inputs_are_refused = refuses({
    "a large unit": (
        lambda: map_dataset(SIX, SIX, units_per_step=2, unit_size=2),
        "the order names example 11, and the source has 6",
    ),
    "no source": (lambda: map_dataset(iter([1]), SIX, units_per_step=2), "is a list_iterator"),
    "a state": (lambda: map_dataset(SIX, STATE, units_per_step=2), "orders is a ShuffleState"),
    "a function of a state": (lambda: torch_sampler(lambda: STATE, units_per_step=2), "is a"),
})  # fmt: skip
