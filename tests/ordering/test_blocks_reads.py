"""Blocks are read as the plain loops of the reference read them, and a run goes on anywhere."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ordering
from ordering.blocks import read_blocks
from ordering.blocks.windows import Windows, permutation
from ordering.data import LoadError
from tests import block_cases, reference_blocks
from tests.block_cases import Case, as_lists, records_of
from tests.cases import times
from tests.waiting import wait_for


@st.composite
def cases(draw, workers=(None, 1, 2, 3, 4), epochs=2):
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    unit_size, workers = draw(st.integers(1, 5)), draw(st.sampled_from(workers))
    units = len(reference_blocks.blocks_of(sizes, unit_size, workers or 1))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    kept = rng.random(sum(sizes)) < 0.7 if draw(st.booleans()) else None
    if kept is not None:
        kept[-1] = True
    num_units = units // (workers or 1)
    orders = [rng.permutation(units).reshape(workers or 1, num_units) for _ in range(epochs + 1)]
    orders = np.stack(orders) if workers else np.stack(orders)[:, 0]
    options = {
        "window": draw(st.integers(1, num_units)),
        "batch_size": draw(st.integers(1, 7)),
        "seed": draw(st.integers(0, 3)),
    }
    return Case(sizes, unit_size, kept, orders, draw(st.integers(0, num_units)), options)


@settings(max_examples=times(30))
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


RNG = np.random.default_rng(0)
FIXED = Case(  # 16 units, of which one is empty; a worker's second window has only one unit
    [13, 20, 7],
    3,
    np.arange(40) % 5 != 2,
    np.stack([RNG.permutation(16) for _ in range(3)]).reshape(3, 4, 4),
    2,
    {"window": 3, "batch_size": 2, "seed": 1},
)


def test_a_run_goes_on_at_every_element_with_any_readers():
    expected, places = FIXED.expected(), []
    assert FIXED.read(after=lambda reads: places.append(reads.state())) == expected
    assert len(places) == len(expected) == 14
    for done, state in enumerate(places, 1):
        for readers in (1, 4) if done % 3 else (2,):
            assert FIXED.read(state, readers=readers) == expected[done:], (done, readers)


def test_where_a_window_ended_the_batches_may_have_another_size():
    """And the windows another number of blocks, of an order that observes nothing."""
    places, size = [], FIXED.settings["batch_size"]
    FIXED.read(after=lambda reads: places.append((reads.state(), reads.window_ended)))
    for done, (state, ended) in enumerate(places[:-1], 1):
        before = FIXED.expected()[:done]
        for options in ({"batch_size": size + 3}, {"window": 1}):
            if not ended:
                with pytest.raises(ValueError, match="with [23], inside a window"):
                    FIXED.read(state, **options)
                continue
            batches = before + FIXED.read(state, **options)
            assert records_of(batches) == sorted(2 * FIXED.kept_records())


def test_a_host_reads_the_rows_of_its_own_workers():
    """Any number of hosts gives the batches of one that reads for all workers."""
    orders, axes = FIXED.orders[0], lambda n: (n, 2)
    of_all = Windows(FIXED.blocks(), orders, (3, 2), (1, 0), axes(4))
    for first, count in ((0, 1), (3, 1), (0, 2), (2, 2)):
        rows = orders[first : first + count]
        windows = Windows(FIXED.blocks(), rows, (3, 2), (1, 0), axes(count))
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


def test_windows_end_where_the_reader_says():
    ends = []
    FIXED.read(after=lambda r: ends.append(((r.loads - 1) % 7 + 1, r.window_ended, r.window_units)))
    windows = [(1, False, 3), (2, False, 3), (3, False, 3), (4, False, 3), (5, True, 3)]
    assert ends == 2 * [*windows, (6, False, 1), (7, True, 1)]


def test_each_block_is_one_request_and_only_the_next_window_is_read_ahead():
    parts = block_cases.parts_of([12, 8])
    blocks = ordering.blocks.split(parts, unit_size=4)
    order = block_cases.given_order(np.stack([np.arange(5)] * 2), 0, 1)
    options = {"batch_size": 1, "num_epochs": 1, "depth": 1}
    with read_blocks(blocks, order, block_cases.KEY, **options) as reads:
        next(reads)
        wait_for(lambda: len(parts[0].read.asked) == 2)
        assert len(list(reads)) == 19
    assert sorted(parts[0].read.asked) == [(0, 4), (4, 8), (8, 12)]
    assert sorted(parts[1].read.asked) == [(0, 4), (4, 8)]


def test_a_run_goes_on_from_the_load_that_failed():
    parts, fails = block_cases.parts_of([12, 8]), [True]

    def read(start, stop):
        if fails and start == 4:
            raise OSError("the disk is gone.")
        return parts[1].read(start, stop)

    blocks = ordering.blocks.split(
        [parts[0], dataclasses.replace(parts[1], read=read)], unit_size=4
    )
    order = block_cases.given_order(np.array([[0, 4, 1, 3, 2]] * 2), 0, 1)
    options = {"batch_size": 2, "num_epochs": 1}
    batches = []
    with read_blocks(blocks, order, block_cases.KEY, **options) as reads:
        with pytest.raises(LoadError, match="load 2 .*OSError: the disk is gone") as info:
            for batch in reads:
                batches.append(as_lists(batch))
        state = reads.state()
    assert (info.value.load, int(state.loads), len(batches)) == (2, 2, 2)
    fails.clear()
    with read_blocks(blocks, order, block_cases.KEY, state=state, **options) as reads:
        batches += [as_lists(batch) for batch in reads]
    assert records_of(batches) == list(range(20)) and len(batches) == 10
