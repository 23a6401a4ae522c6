"""A run over blocks goes on with another number of workers, and reads every record once."""

import jax.numpy as jnp
import pytest

import ordering
from ordering.blocks import read_blocks, resize
from tests import block_cases
from tests.block_cases import KEY, as_lists, records_of

# 24 units, 2 of them empty; together 16 in a window and 48 records in a step: W workers have 24 / W
# units, windows of 16 / W and 8 / W, and 3 + 2 steps in an epoch.
SIZES, UNIT_SIZE, UNITS, WINDOW, BATCH, STEPS = [20, 31, 11], 3, 24, 16, 16, 5
WORKERS = (1, 2, 4, 8)
BLOCKS = ordering.blocks.split(
    block_cases.parts_of(SIZES), unit_size=UNIT_SIZE, multiple_of=max(WORKERS)
)
RECORDS = list(range(sum(SIZES)))
VECTORS = block_cases.vectors_of(len(RECORDS))


def order_of(name, workers):
    return block_cases.global_order_of(name, workers, UNITS // workers, WINDOW // workers)


def read(name, workers, state=None, *, most):
    """(batches, the state after them)."""
    batches, like = [], jnp.zeros(block_cases.ENTRIES)
    options = {"batch_size": BATCH // workers, "workers": workers, "like": like, "state": state}
    with read_blocks(BLOCKS, order_of(name, workers), KEY, **options) as reads:
        while len(batches) < most:
            records, places = next(reads)
            batches.append(as_lists((records, places)))
            reads.observe(jnp.asarray(VECTORS)[records])
        return batches, reads.state()


def resized(name, state, workers):
    order = order_of(name, workers)
    fresh = ordering.init_workers(order, KEY, jnp.zeros(block_cases.ENTRIES), workers)
    return resize(state, fresh, order)


def check(name, *stages):
    """Workers and steps of each stage: every epoch that is read has every record once."""
    (workers, most), *others = stages
    records, state = read(name, workers, most=most)
    for after, most in others:
        if after != workers:
            workers = after
            state = resized(name, state, workers)
        more, state = read(name, workers, state, most=most)
        assert all(len(batch) == workers for batch in more)
        records += more
    alone = read(name, stages[0][0], most=STEPS)[0]
    assert len(records) % STEPS == 0
    for first in range(0, len(records), STEPS):
        assert records_of(records[first : first + STEPS]) == RECORDS, (stages, first)
    for begin, end in ((0, 3), (3, 5)):
        assert records_of(records[begin:end]) == records_of(alone[begin:end]), "windows are kept"


@pytest.mark.parametrize("name", ["global_reshuffling", "global"])
def test_a_run_goes_on_with_any_number_of_workers(name):
    """After the first window of an epoch, between epochs, and once more in the same epoch."""
    more = [(1, 4), (8, 1)] if name == "global_reshuffling" else []
    for before, after in [(2, 4), (4, 2), *more]:
        for done in (3, 5, 8):
            check(name, (before, done), (after, 15 - done))
    check(name, (2, 3), (4, 5), (2, 7))


def test_the_axis_of_the_workers_may_have_another_name():
    def of(workers):
        units = UNITS // workers
        return ordering.global_reshuffling(units, units_per_step=WINDOW // workers, axis_name="dp")

    options = {"axis_name": "dp", "num_epochs": 1}
    with read_blocks(BLOCKS, of(2), KEY, workers=2, batch_size=BATCH // 2, **options) as reads:
        batches = [as_lists(next(reads)) for _ in range(3)]
        fresh = ordering.init_workers(of(4), KEY, workers=4, axis_name="dp")
        state = resize(reads.state(), fresh, of(4), axis_name="dp")
    options |= {"workers": 4, "batch_size": BATCH // 4, "state": state}
    with read_blocks(BLOCKS, of(4), KEY, **options) as reads:
        batches += map(as_lists, reads)
    assert records_of(batches) == RECORDS
