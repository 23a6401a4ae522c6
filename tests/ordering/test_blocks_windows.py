"""Windows through other loaders give the batches of the plain loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ordering
from ordering.blocks.windows import batches_of, permutation, windows
from tests import block_cases, reference_blocks
from tests.block_cases import as_lists
from tests.refused import refuses

SIZES, UNIT_SIZE, WORKERS = [13, 20, 7], 3, 4
BLOCKS = ordering.blocks.split(
    block_cases.parts_of(SIZES), unit_size=UNIT_SIZE, multiple_of=WORKERS
)
UNITS = reference_blocks.blocks_of(SIZES, UNIT_SIZE, WORKERS)
ORDERS = np.random.default_rng(0).permutation(16).reshape(4, 4)
SIZES_OF = {"window": 3, "batch_size": 2, "epoch": 5, "seed": 7}
SETTINGS = SIZES_OF | {"num_units": 4}
EXPECTED = reference_blocks.epoch_of(UNITS, ORDERS.tolist(), **SIZES_OF)
EPOCH = windows(BLOCKS, ORDERS, **SETTINGS)


def test_a_permutation_is_the_same_in_every_version():
    """A run that goes on with another NumPy must read the same batches."""
    assert permutation((0, 0, 0), 10).tolist() == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]
    assert permutation((7, 5, 11), 10).tolist() == [5, 9, 2, 7, 8, 6, 0, 4, 3, 1]


def by_grain(epoch):
    grain = pytest.importorskip("grain")
    options = grain.ReadOptions(num_threads=2)
    return grain.MapDataset.source(epoch).to_iter_dataset(options)


@pytest.mark.parametrize("load", [iter, by_grain])
def test_windows_of_another_loader_become_the_batches(load):
    for skipped in (0, 2):
        found = list(batches_of(load(EPOCH), skipped))
        assert [as_lists(batch) for batch in found] == EXPECTED[skipped:]


def test_an_order_without_workers_has_no_axis_of_workers():
    single = windows(BLOCKS, ORDERS.ravel(), **SETTINGS | {"num_units": 16})
    records, places = single[0]
    assert records.shape == places.shape == (5, 2)
    expected = reference_blocks.epoch_of(UNITS, ORDERS.reshape(1, 16).tolist(), **SIZES_OF)
    assert [as_lists(batch) for batch in batches_of(single, 0)] == expected


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_slice_of_orders_gives_the_rest_of_the_windows(workers, window, batch_size, data):
    units = reference_blocks.blocks_of(SIZES, UNIT_SIZE, workers)
    blocks = ordering.blocks.split(
        block_cases.parts_of(SIZES), unit_size=UNIT_SIZE, multiple_of=workers
    )
    orders = np.random.default_rng(window).permutation(len(units)).reshape(workers, -1)
    options = {
        "window": min(window, orders.shape[1]),
        "batch_size": batch_size,
        "epoch": 1,
        "seed": 0,
    }
    expected = reference_blocks.epoch_of(units, orders.tolist(), **options)
    first = data.draw(st.integers(0, -(-orders.shape[1] // options["window"]) - 1))
    options |= {"num_units": orders.shape[1]}
    slice_ = windows(blocks, orders[:, first * options["window"] :], **options)
    batches = -(-options["window"] * UNIT_SIZE // batch_size)
    assert [as_lists(batch) for batch in batches_of(slice_, 0)] == expected[first * batches :]


def of(orders=ORDERS, **changes):
    sizes = {"num_units": np.shape(orders)[-1]} if isinstance(orders, np.ndarray) else {}
    return lambda: windows(BLOCKS, orders, **SETTINGS | sizes | changes)


test_bad_input = refuses({
    "window": (of(window=5), r"window is 5: pass a whole number in 1 \.\. 4"),
    "a large seed": (of(seed=2**63), "seed is 9223372036854775808: pass a whole number in 0"),
    "other units": (of(ORDERS + 1), "name a unit twice, or outside 0 .. 15"),
    "a shard": (of(np.array([[0], [0]]), window=1), "name a unit twice"),
    "too few": (of(np.arange(15)), "names 15 units, and there are 16 blocks: make one for as many"),
})  # fmt: skip


def test_there_are_as_many_windows_as_the_epoch_has():
    assert len(EPOCH) == len(list(EPOCH)) == 2
    with pytest.raises(IndexError, match="no window 2 in an epoch of 2"):
        EPOCH[2]
