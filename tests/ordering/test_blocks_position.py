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
            with pytest.raises(ValueError, match="batch 1 .*observe"):
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
    with pytest.raises(ValueError, match="observe .* 0 "):
        reads.observe(np.zeros((2, 2, 2)))
    next(reads), next(reads)  # as a step that adds gradients by itself
    with pytest.raises(ValueError, match="observe .* 0 .* 2 "):
        reads.observe(np.zeros((2, 2, 2)))
    with pytest.raises(ValueError, match="advance "):
        reads.advance(reads.order_state)


def test_the_first_state_is_the_beginning():
    first = reads_of("global_reshuffling").state()
    names = ("epoch", "units", "batch", "unit_size", "window", "batch_size", "seed", "filter")
    assert [int(getattr(first, name)) for name in names] == [0, 0, 0, 2, WINDOW, 4, 9, 0]
    assert len(rest(reads_of("global_reshuffling", first))[0]) == 5


@pytest.mark.parametrize("saved, now", [(True, False), (False, True), (True, "another")])
def test_another_filter_is_named(saved, now):
    """Also of blocks whose largest has another size, with or without a filter."""
    numbers, order = np.arange(40), ordering.random_reshuffling(10, units_per_step=2)
    filters = {True: numbers % 2 == 0, False: None, "another": numbers % 3 == 0}
    first, other = (split(numbers, unit_size=4, keep=filters[x]) for x in (saved, now))
    reads = read_blocks(first, order, KEY, batch_size=4)
    next(reads)
    with pytest.raises(ValueError, match="keep="):
        read_blocks(other, order, KEY, batch_size=4, state=reads.state())
