"""Blocks are read as the plain loops of the reference read them, and a run goes on anywhere."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ordering
from ordering.blocks import read_blocks
from ordering.blocks.windows import permutation
from ordering.data import LoadError
from tests import block_cases, reference_blocks
from tests.block_cases import Case, as_lists, on_hosts, records_of
from tests.cases import times
from tests.refused import refuses
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
    own = units // (workers or 1)
    orders = [rng.permutation(units).reshape(workers or 1, own) for _ in range(epochs + 1)]
    orders = np.stack(orders) if workers else np.stack(orders)[:, 0]
    options = {
        "window": draw(st.integers(1, own)), "batch_size": draw(st.integers(1, 7)),
        "seed": draw(st.integers(0, 3)),
    }  # fmt: skip
    return Case(sizes, unit_size, kept, orders, draw(st.integers(0, own)), options)


@settings(max_examples=times(30))
@given(cases(), st.data())
def test_every_record_once_per_epoch_as_in_the_plain_loops(case, data):
    expected, places = case.expected(), []
    readers = data.draw(st.sampled_from([1, 2, 4]))
    found = case.read(readers=readers, after=lambda reads: places.append(reads.position()))
    assert found == expected
    steps = len(expected) // 2
    for epoch in (expected[:steps], expected[steps:]):
        assert records_of(epoch) == case.kept_records()
    assert [(int(p["epoch"]), int(p["step"])) for p in places] == [
        divmod(done, steps) for done in range(1, 2 * steps + 1)
    ]
    done = data.draw(st.integers(1, len(places)))
    assert case.read(places[done - 1], readers=readers) == expected[done:]


RNG = np.random.default_rng(0)
FIXED = Case(  # 16 units, of which one is empty; a worker's second window has only one unit
    [13, 20, 7], 3, np.arange(40) % 5 != 2, np.stack([RNG.permutation(16) for _ in range(3)])
    .reshape(3, 4, 4), 2, {"window": 3, "batch_size": 2, "seed": 1},
)  # fmt: skip


def test_a_run_goes_on_at_every_element_with_any_readers_and_hosts():
    expected, places = FIXED.expected(), []
    assert on_hosts(FIXED, 1, after=lambda reads: places.append(reads.position())) == expected
    assert len(places) == len(expected) == 14
    for done, position in enumerate(places, 1):
        for readers, hosts in ((1, 1), (2, 1), (4, 1), (4, 2), (1, 4)):
            found = on_hosts(FIXED, hosts, position, readers=readers)
            assert found == expected[done:], (done, readers, hosts)


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
    FIXED.read(after=lambda r: ends.append((r.step, r.window_ended, r.window_units)))
    windows = [(1, False, 3), (2, False, 3), (3, False, 3), (4, False, 3), (5, True, 3)]
    assert ends == 2 * [*windows, (6, False, 1), (7, True, 1)]


def test_each_block_is_one_request_and_only_the_next_window_is_read_ahead():
    parts = block_cases.parts_of([12, 8])
    blocks = ordering.blocks.split(parts, unit_size=4)
    state = block_cases.given_states(np.stack([np.arange(5)] * 2), 0)[0]
    options = {"window": 1, "batch_size": 1, "num_epochs": 1, "depth": 1}
    with read_blocks(blocks, lambda: state, **options) as reads:
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
    state = block_cases.given_states(np.array([[0, 4, 1, 3, 2]] * 2), 0)[0]
    options = {"window": 1, "batch_size": 2, "num_epochs": 1}
    found = []
    with read_blocks(blocks, lambda: state, **options) as reads:
        with pytest.raises(
            LoadError, match="load 2 failed: OSError: the disk is gone. Res"
        ) as info:
            for batch in reads:
                found.append(as_lists(batch))
        position = reads.position()
    assert (info.value.load, int(position["step"]), len(found)) == (2, 2, 2)
    fails.clear()
    with read_blocks(blocks, lambda: state, position=position, **options) as reads:
        found += [as_lists(batch) for batch in reads]
    assert records_of(found) == list(range(20)) and len(found) == 10


def of(orders=FIXED.orders[0], **settings):
    state = block_cases.given_states(np.stack([orders] * 2), 0)[0]
    return lambda: read_blocks(FIXED.blocks(), lambda: state, **FIXED.settings | settings)


test_bad_input = refuses({
    "window": (of(window=5), r"window is 5: pass a whole number in 1 \.\. 4"),
    "a large seed": (of(seed=2**63), "seed is 9223372036854775808: pass a whole number in 0"),
    "other units": (of(FIXED.orders[0] + 1), "name a unit twice, or outside 0 .. 15"),
    "a shard": (of(np.array([[0], [0]]), window=1), "name a unit twice"),
    "too few": (of(np.arange(15)), "names 15 units, and there are 16 blocks: make one for as many"),
})  # fmt: skip
