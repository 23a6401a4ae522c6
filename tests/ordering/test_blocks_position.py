"""A state of blocks goes through any checkpoint, and refuses runs of other blocks."""

import functools

import jax
import numpy as np
import pytest

import ordering
from ordering.blocks import read_blocks, split
from tests import block_cases
from tests.block_cases import KEY, as_lists
from tests.problems import assert_bitwise_equal
from tests.refused import refuses

WORKERS, UNITS, WINDOW = 2, 8, 3
BLOCKS = split(block_cases.parts_of([20, 11]), unit_size=2)
SETTINGS = {"batch_size": 4, "seed": 9, "workers": WORKERS, "num_epochs": 1}


def reads_of(name, state=None, blocks=BLOCKS, **options):
    order = block_cases.global_order_of(name, WORKERS, UNITS, options.pop("window", WINDOW))
    like = np.zeros(2, np.float32)
    return read_blocks(blocks, order, KEY, like=like, state=state, **SETTINGS | options)


def rest(reads):
    """The batches and the orders that follow, as gradients are observed."""
    batches = []
    with reads:
        for records, places in reads:
            batches.append(as_lists((records, places)))
            reads.observe(np.stack([records, places], axis=-1).astype(np.float32))
    return batches, np.asarray(reads.order_state.current).tolist()


@functools.cache
def begun(name):
    """(the state after one of the two batches of the second window, what follows)."""
    reads = reads_of(name)
    for _ in range(3):
        records, places = next(reads)
        reads.observe(np.stack([records, places], axis=-1).astype(np.float32))
    return reads.state(), rest(reads)


@pytest.mark.parametrize("name", ["global_reshuffling", "global"])
def test_a_state_goes_through_orbax(name, tmp_path):
    """With a template, and without one; inside a window, whose sums go with it."""
    ocp = pytest.importorskip("orbax.checkpoint")
    state, expected = begun(name)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        with_template = checkpointer.restore(tmp_path / "state", template)
        without = checkpointer.restore(tmp_path / "state")
    assert_bitwise_equal(with_template, state)
    for restored in (with_template, without):
        assert rest(reads_of(name, restored)) == expected


def test_a_batch_that_was_not_observed_is_read_again():
    reads = reads_of("global")
    for done in range(2):  # a window
        records, places = next(reads)
        rows = np.stack([records, places], axis=-1).astype(np.float32)
        if done:
            state = reads.state()
            with pytest.raises(ValueError, match="batch 1 was not observed"):
                next(reads)
        reads.observe(rows)
    assert (int(state.batch), int(state.loads), int(state.summed)) == (1, 1, 1)
    expected = rest(reads)
    again = reads_of("global", state)
    assert as_lists(next(again)) == as_lists((records, places))
    again.observe(rows)
    assert rest(again) == expected


def test_a_batch_is_observed_once():
    reads = reads_of("global", batch_size=2)
    with pytest.raises(ValueError, match="observe was called 0 times"):
        reads.observe(np.zeros((2, 2, 2)))
    next(reads), next(reads)  # as a step that adds gradients by itself
    with pytest.raises(ValueError, match="called 0 times in a window of which 2 batches"):
        reads.observe(np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match="advance was called inside a window"):
        reads.advance(reads.order_state)


def test_the_first_state_is_the_beginning():
    first = reads_of("global_reshuffling").state()
    names = ("epoch", "units", "batch", "unit_size", "window", "batch_size", "seed", "filter")
    assert [int(getattr(first, name)) for name in names] == [0, 0, 0, 2, WINDOW, 4, 9, 0]
    assert len(rest(reads_of("global_reshuffling", first))[0]) == 5


def used(blocks=BLOCKS, **settings):
    return lambda: reads_of(
        "global_reshuffling", begun("global_reshuffling")[0], blocks, **settings
    )


def changed(**changes):
    """Reads on from the state with other values; None leaves a name out."""
    state = begun("global_reshuffling")[0]._asdict() | changes
    state = {k: v for k, v in state.items() if v is not None}
    return lambda: reads_of("global_reshuffling", state)


KEPT = split(block_cases.parts_of([20, 11]), unit_size=2, keep=np.arange(31) != 5)
HALVES = split(block_cases.parts_of([20, 11]), unit_size=2, keep=np.arange(31) % 2 == 0)
OTHER = split(block_cases.parts_of([20, 12]), unit_size=2)
MORE = split(block_cases.parts_of([20, 5, 6]), unit_size=2)
test_bad_input = refuses({
    "block size": (
        used(split(block_cases.parts_of([30, 17]), unit_size=3)),
        "file 0 is not the file .*: it has 30 records, and had 20",
    ),
    "another size": (
        lambda: reads_of("global_reshuffling", begun("global_reshuffling")[0]._replace(
            unit_size=np.array(5))),
        "records in a block: the state was saved with 5, now it is 2",
    ),
    "window": (used(window=2), "blocks in a window: the state was saved with 3, inside a window"),
    "batch_size": (used(batch_size=3), "records in a batch: .* with 4, inside a window, now"),
    "filter": (used(KEPT), "the state was saved without keep= of split, and these blocks are w"),
    "a smaller filter": (used(HALVES), "the state was saved without keep= of split"),
    "seed": (used(seed=0), "the seed: the state was saved with 9, now it is 0"),
    "records": (used(OTHER), "file 1 is not the file .*: it has 12 records, and had 11, or"),
    "files": (used(MORE), "saved with 2 files, now there are 3: pass the same files in the same"),
    "units": (changed(units=np.array(17)), "17 units of the epoch were read, and 2 workers have 8"),
    "size": (changed(seed=np.arange(3)), r"state has int64\[3\] as 'seed': pass it as it was s"),
    "other workers": (used(workers=1), "the order names 8 units, and there are 16 blocks"),
    "missing": (changed(batch=None), "state is a dict: pass what BlockEpochs.state gave"),
})  # fmt: skip


@pytest.mark.parametrize("saved, now", [(True, False), (False, True), (True, "another")])
def test_another_filter_is_named(saved, now):
    """Also of blocks whose largest has another size, with or without a filter."""
    numbers, order = np.arange(40), ordering.random_reshuffling(10, units_per_step=2)
    filters = {True: numbers % 2 == 0, False: None, "another": numbers % 3 == 0}
    first, other = (split(numbers, unit_size=4, keep=filters[x]) for x in (saved, now))
    reads = read_blocks(first, order, KEY, batch_size=4)
    next(reads)
    with pytest.raises(ValueError, match="saved with.* keep= of split, and these blocks are with"):
        read_blocks(other, order, KEY, batch_size=4, state=reads.state())
