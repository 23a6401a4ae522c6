"""Blocks are read as the plain loops of the reference read them, and a run goes on anywhere."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ordering
from ordering.blocks import read_blocks, resize, split
from ordering.blocks.windows import Windows, permutation
from ordering.data import LoadError
from ordering.steps import in_steps
from tests import block_cases, reference_blocks
from tests.block_cases import ENTRIES, FIXED, KEY, Case, as_lists, records_of
from tests.cases import times
from tests.problems import assert_bitwise_equal
from tests.waiting import wait_for


@st.composite
def cases(draw, workers=(None, 1, 2, 3, 4), epochs=2):
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    unit_size, workers = draw(st.integers(1, 5)), draw(st.sampled_from(workers))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    share = draw(st.sampled_from([None, 0.7, 0.2]))
    kept = None if share is None else rng.random(sum(sizes)) < share
    if kept is not None:
        kept[-1] = True
    units = len(reference_blocks.blocks_of(sizes, unit_size, workers or 1, kept))
    num_units = units // (workers or 1)
    orders = [rng.permutation(units).reshape(workers or 1, num_units) for _ in range(epochs + 1)]
    orders = np.stack(orders) if workers else np.stack(orders)[:, 0]
    options = {
        "window": draw(st.integers(1, num_units)),
        "batch_size": draw(st.integers(1, 7)),
        "seed": draw(st.integers(0, 3)),
    }
    return Case(sizes, unit_size, kept, orders, draw(st.integers(0, num_units)), options)


@settings(max_examples=times(15))
@given(cases(), st.data())
def test_every_record_once_per_epoch_as_in_the_plain_loops(case, data):
    expected, places = case.expected(), []
    readers = data.draw(st.sampled_from([1, 2, 4]))
    batches = case.read(readers=readers, after=lambda reads: places.append(reads.state()))
    assert batches == expected
    steps = len(expected) // 2
    for epoch in (expected[:steps], expected[steps:]):
        assert records_of(epoch) == case.kept_records()
    assert [int(p.loads) for p in places] == list(range(1, 2 * steps + 1))
    done = data.draw(st.integers(1, len(places)))
    assert case.read(places[done - 1], readers=readers) == expected[done:]


def test_a_run_goes_on_at_every_element_and_says_where_windows_end():
    expected, places, ends = FIXED.expected(), [], []

    def after(reads):
        places.append(reads.state())
        ends.append(((reads.loads - 1) % 7 + 1, reads.window_ended, reads.window_units))

    assert FIXED.read(after=after) == expected
    windows = [(1, False, 3), (2, False, 3), (3, False, 3), (4, False, 3), (5, True, 3)]
    assert ends == 2 * [*windows, (6, False, 1), (7, True, 1)]
    for done, state in enumerate(places, 1):
        readers = 1 + done % 4
        assert FIXED.read(state, readers=readers) == expected[done:], (done, readers)
        # Where a window ended, batches and windows may have another size.
        for options in ({"batch_size": 5}, {"window": 1}):
            if not ends[done - 1][1]:
                with pytest.raises(ValueError, match="with [23], inside a window"):
                    FIXED.read(state, **options)
            elif done < len(places):
                batches = expected[:done] + FIXED.read(state, **options)
                assert records_of(batches) == sorted(2 * FIXED.kept_records())


def test_a_host_reads_the_rows_of_its_own_workers():
    """Any number of hosts gives the batches of one that reads for all workers."""
    orders = FIXED.orders[0]

    def windows_of(first, count):
        units = in_steps(orders[first : first + count], 3, num_units=4, total=16)
        return Windows(FIXED.blocks(), units, count, (3, 2), (1, 0))

    of_all = windows_of(0, 4)
    for first, count in ((0, 1), (3, 1), (0, 2), (2, 2)):
        windows = windows_of(first, count)
        for (records, places), (some, their) in zip(of_all, windows, strict=True):
            np.testing.assert_array_equal(some, records[:, first : first + count])
            np.testing.assert_array_equal(their, places[:, first : first + count])


def test_another_loader_gives_the_same_batches():
    grain = pytest.importorskip("grain")
    options = grain.ReadOptions(num_threads=2)

    def by_grain(epoch):
        assert len(epoch) == 2
        return grain.MapDataset.source(epoch).to_iter_dataset(options)

    assert FIXED.read(readers=by_grain) == FIXED.expected()
    assert FIXED.read(readers=lambda epoch: epoch) == FIXED.expected()


def test_a_permutation_is_the_same_in_every_version():
    """A run that goes on with another NumPy must read the same batches."""
    assert permutation((0, 0, 0), 10).tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
    assert permutation((7, 5, 11), 10).tolist() == [5, 9, 2, 7, 8, 6, 0, 4, 3, 1]


def test_each_block_is_one_request_and_only_the_next_window_is_read_ahead():
    """In every epoch, also where the last window is shorter."""
    parts = block_cases.parts_of([12, 8])
    order = ordering.random_reshuffling(5, units_per_step=2)
    options = {"batch_size": 1, "num_epochs": 3, "depth": 1}
    with read_blocks(split(parts, unit_size=4), order, KEY, **options) as reads:
        next(reads)
        asked = [part.read.asked for part in parts]
        wait_for(lambda: sum(map(len, asked)) == 4)
        assert len(list(reads)) == 59
    assert sorted(asked[0]) == sorted(3 * [(0, 4), (4, 8), (8, 12)])
    assert sorted(asked[1]) == sorted(3 * [(0, 4), (4, 8)])


def test_a_run_goes_on_from_the_load_that_failed():
    parts, fails = block_cases.parts_of([12, 8]), [True]

    def read(start, stop):
        if fails and start == 4:
            raise OSError("the disk is gone.")
        return parts[1].read(start, stop)

    blocks = split([parts[0], dataclasses.replace(parts[1], read=read)], unit_size=4)
    order = block_cases.given_order(np.array([[0, 4, 1, 3, 2]] * 2), 0, 1)
    options = {"batch_size": 2, "num_epochs": 1}
    batches = []
    with read_blocks(blocks, order, KEY, **options) as reads:
        with pytest.raises(LoadError, match="load 2 .*OSError: the disk is gone") as info:
            for batch in reads:
                batches.append(as_lists(batch))
        state = reads.state()
    assert (info.value.load, int(state.loads), len(batches)) == (2, 2, 2)
    fails.clear()
    with read_blocks(blocks, order, KEY, state=state, **options) as reads:
        batches += [as_lists(batch) for batch in reads]
    assert records_of(batches) == list(range(20)) and len(batches) == 10


def test_a_mixture_reads_blocks_as_often_as_its_plan_says():
    """Blocks of one source come two or more times, and the run goes on at every batch."""
    sizes = {"a": 20, "b": 10}
    weights = {"a": 1, "b": 3}
    plan = ordering.mixture(sizes, weights=weights, batch_size=2, total_steps=15)
    blocks = split(np.arange(120), unit_size=4)
    options = {"batch_size": 4, "num_epochs": 1}
    with read_blocks(blocks, plan.order(), KEY, **options) as reads:
        batches, states = [], []
        for records, _ in reads:
            batches.append(np.asarray(records).tolist())
            states.append(reads.state())
    assert len(batches) == 30
    for window in range(15):
        read = {record // 4 for batch in batches[2 * window : 2 * window + 2] for record in batch}
        wanted = np.asarray(plan.order().units(states[0].order))[2 * window : 2 * window + 2]
        assert read == {*wanted.tolist()}
    with read_blocks(blocks, plan.order(), KEY, state=states[6], **options) as reads:
        assert [np.asarray(records).tolist() for records, _ in reads] == batches[7:]


# States: 8 units of two workers, in windows of 3.


def rest(reads, count=None):
    """The batches, `count` or all, and the orders that follow, as gradients are observed."""
    batches = []
    for records, places in reads:
        batches.append(as_lists((records, places)))
        reads.observe(np.stack([records, places], axis=-1).astype(np.float32))
        if len(batches) == count:
            break
    return batches, np.asarray(reads.order_state.current).tolist()


def test_a_state_goes_through_orbax(tmp_path):
    """With a template, and without one; inside a window, whose sums go with it."""
    ocp = pytest.importorskip("orbax.checkpoint")
    reads = block_cases.short_run("global")
    rest(reads, 3)
    state, expected = reads.state(), rest(reads)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        with_template = checkpointer.restore(tmp_path / "state", template)
        without = checkpointer.restore(tmp_path / "state")
    assert_bitwise_equal(with_template, state)
    for restored in (with_template, without):
        assert rest(block_cases.short_run("global", restored)) == expected


def test_a_batch_that_was_not_observed_is_read_again_and_one_is_observed_once():
    reads = block_cases.short_run("global")
    with pytest.raises(ValueError, match="observe .* 0 "):
        reads.observe(np.zeros((2, 4, 2)))
    for done in range(2):  # a window
        records, places = next(reads)
        rows = np.stack([records, places], axis=-1).astype(np.float32)
        if done:
            state = reads.state()
            with pytest.raises(ValueError, match="batch 1 .*observe"):
                next(reads)
        reads.observe(rows)
    assert (int(state.batch), int(state.loads), int(state.summed)) == (1, 1, 1)
    expected = rest(reads)
    again = block_cases.short_run("global", state)
    assert as_lists(next(again)) == as_lists((records, places))
    again.observe(rows)
    assert rest(again) == expected
    by_hand = block_cases.short_run("global", batch_size=2)
    next(by_hand), next(by_hand)  # as a step that adds gradients by itself
    with pytest.raises(ValueError, match="observe .* 0 .* 2 "):
        by_hand.observe(np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match="advance "):
        by_hand.advance(by_hand.order_state)


def test_the_first_state_is_the_beginning():
    first = block_cases.short_run("global_reshuffling").state()
    names = ("epoch", "units", "batch", "unit_size", "window", "batch_size", "seed", "filter")
    assert [int(getattr(first, name)) for name in names] == [0, 0, 0, 2, 3, 4, 9, 0]
    assert len(rest(block_cases.short_run("global_reshuffling", first))[0]) == 5


@pytest.mark.parametrize("saved, now", [(True, False), (False, True), (True, "another")])
def test_another_filter_is_named(saved, now):
    """Also of blocks whose largest has another size, with or without a filter."""
    numbers = np.arange(40)
    filters = {True: numbers % 2 == 0, False: None, "another": numbers % 3 == 0}

    def reads(kept, state=None):
        blocks = split(numbers, unit_size=4, keep=filters[kept])
        order = ordering.random_reshuffling(len(blocks), units_per_step=2)
        return read_blocks(blocks, order, KEY, batch_size=4, state=state)

    first = reads(saved)
    next(first)
    with pytest.raises(ValueError, match="keep="):
        reads(now, first.state())


# Other numbers of workers: 24 units, 2 of them empty; together 16 in a window and 16 records in a
# step. W workers have 24 / W units, windows of 16 / W and 8 / W, and 3 + 2 steps in an epoch.
SIZES, UNITS, STEPS = [20, 31, 11], 24, 5
BLOCKS = split(block_cases.parts_of(SIZES), unit_size=3, multiple_of=8)
VECTORS = block_cases.vectors_of(sum(SIZES))
AXES = {"global": "worker", "global_reshuffling": "dp"}


def order_of(name, workers):
    return block_cases.global_order_of(name, UNITS // workers, 16 // workers, AXES[name])


def read(name, workers, state=None, *, most):
    """(batches, the state after them)."""
    batches, like = [], jnp.zeros(ENTRIES)
    options = {"batch_size": 16 // workers, "workers": workers, "like": like, "state": state}
    options["axis_name"] = AXES[name]
    with read_blocks(BLOCKS, order_of(name, workers), KEY, **options) as reads:
        while len(batches) < most:
            records, places = next(reads)
            batches.append(as_lists((records, places)))
            reads.observe(jnp.asarray(VECTORS)[records])
        return batches, reads.state()


@functools.cache
def alone(name, workers):
    return read(name, workers, most=STEPS)[0]


CHANGES = {  # workers and steps of each stage: in an epoch, between two, and twice in one
    "global_reshuffling": [((2, 3), (4, 12)), ((8, 5), (1, 10)), ((1, 8), (8, 7))],
    "global": [((4, 8), (2, 7)), ((2, 3), (4, 5), (2, 7))],
}


def as_dicts(tree):
    """NamedTuples as Orbax restores them."""
    if hasattr(tree, "_asdict"):
        return {name: as_dicts(x) for name, x in tree._asdict().items()}
    return tree


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_with_any_number_of_workers(name):
    """Every epoch that is read has every record once; states are as checkpoints give them."""
    axis = {"axis_name": AXES[name]}
    for stages in CHANGES[name]:
        batches, state = [], None
        for workers, most in stages:
            if state is not None:
                order = order_of(name, workers)
                fresh = ordering.init_workers(order, KEY, jnp.zeros(ENTRIES), workers, **axis)
                as_dict = state._replace(order=as_dicts(state.order))._asdict()
                state = resize(as_dict, fresh, order)
            more, state = read(name, workers, state, most=most)
            assert all(len(batch) == workers for batch in more)
            batches += more
        assert len(batches) % STEPS == 0
        for first in range(0, len(batches), STEPS):
            assert records_of(batches[first : first + STEPS]) == list(range(sum(SIZES)))
        for begin, end in ((0, 3), (3, 5)):
            expected = alone(name, stages[0][0])[begin:end]
            assert records_of(batches[begin:end]) == records_of(expected), "windows are kept"
