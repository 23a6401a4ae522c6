"""A position goes through any checkpoint, and refuses runs of other sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ordering.blocks import read_blocks, split
from tests import block_cases
from tests.block_cases import as_lists
from tests.problems import assert_bitwise_equal
from tests.refused import refuses

WORKERS, UNITS, WINDOW = 2, 8, 3
BLOCKS = split(block_cases.parts_of([20, 11]), unit_size=2)
SETTINGS = {"window": WINDOW, "batch_size": 4, "seed": 9}


@functools.cache
def begun(name):
    """(the state of an order, the position after two batches, those that follow in the epoch)."""
    state = block_cases.dealt_of(name, WORKERS, UNITS, WINDOW)[1]
    with read_blocks(BLOCKS, lambda: state, num_epochs=1, **SETTINGS) as reads:
        next(reads), next(reads)
        position = reads.position()
        return state, position, [as_lists(batch) for batch in reads]


def rest(position):
    state = jax.tree.map(jnp.asarray, position["orders"])
    options = {"num_epochs": 1, "position": position} | SETTINGS
    with read_blocks(BLOCKS, lambda: state, **options) as reads:
        return [as_lists(batch) for batch in reads]


@pytest.mark.parametrize("name", ["global_reshuffling", "dealt"])
def test_a_position_goes_through_orbax(name, tmp_path):
    """With a template, and without one."""
    ocp, flax = map(pytest.importorskip, ("orbax.checkpoint", "flax"))
    state, position, expected = begun(name)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "position", position)
        checkpointer.wait_until_finished()
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, position)
        with_template = checkpointer.restore(tmp_path / "position", template)
        without = checkpointer.restore(tmp_path / "position")
    with pytest.raises(ValueError, match="orders are a dict of a checkpoint: make them a state"):
        read_blocks(BLOCKS, lambda: state, position=without, **SETTINGS)
    without["orders"] = flax.serialization.from_state_dict(state, without["orders"])
    for restored in (with_template, without):
        assert_bitwise_equal(restored, position)
        assert rest(restored) == expected


def test_the_first_position_is_the_beginning():
    state, _, _ = begun("global_reshuffling")
    with read_blocks(BLOCKS, lambda: state, **SETTINGS) as reads:
        first = reads.position()
    names = ("epoch", "step", "unit_size", "window", "batch_size", "seed", "filter")
    assert [int(first[name]) for name in names] == [0, 0, 2, WINDOW, 4, 9, 0]
    assert len(rest(first)) == 5 and rest(first)[2:] == begun("global_reshuffling")[2]


def test_hosts_save_the_orders_of_all():
    """Each host has the state of its own worker, and is given those of all to save."""
    state = begun("global_reshuffling")[0]
    own = block_cases.rows_of(state, 0, 1)
    with read_blocks(BLOCKS, lambda: own, **SETTINGS) as reads:
        next(reads), next(reads)
        assert_bitwise_equal(reads.position(state), begun("global_reshuffling")[1])


def at(position, blocks=BLOCKS, **settings):
    """Reads on from a position, with these settings in place of its own."""
    state = begun("global_reshuffling")[0]
    return lambda: read_blocks(blocks, lambda: state, position=position, **SETTINGS | settings)


def used(blocks=BLOCKS, **settings):
    return at(begun("global_reshuffling")[1], blocks, **settings)


def changed(**changes):
    """Reads on from the position with other values; None leaves a name out."""
    position = begun("global_reshuffling")[1] | changes
    return at({k: v for k, v in position.items() if v is not None})


def read_from(orders, **changes):
    position = begun("global_reshuffling")[1] | changes
    state = block_cases.given_states(np.stack([orders] * 2), 0)[0]
    return read_blocks(BLOCKS, lambda: state, position=position, **SETTINGS)


OTHER = split(block_cases.parts_of([20, 12]), unit_size=2)
MORE = split(block_cases.parts_of([20, 5, 6]), unit_size=2)
test_bad_input = refuses({
    "block size": (
        used(split(block_cases.parts_of([30, 17]), unit_size=3)),
        "records in a block: the position was saved with 2, now it is 3",
    ),
    "window": (used(window=2), "blocks in a window: the position was saved with 3, now it is 2"),
    "batch_size": (used(batch_size=3), "records in a batch: .* saved with 4, now it is 3"),
    "filter": (  # of the same largest block
        used(split(block_cases.parts_of([20, 11]), unit_size=2, keep=np.arange(31) != 5)),
        "the digest of split's filter.*: the position was saved with 0, now it is [0-9]+",
    ),
    "seed": (used(seed=0), "the seed: the position was saved with 9, now it is 0"),
    "records": (used(OTHER), "file 1 is not the file .*: it has 12 records, and had 11, or"),
    "files": (used(MORE), "saved with 2 files, now there are 3: pass the same files in the same"),
    "step": (changed(step=np.array(5)), "step 5 of epoch 0 is not one of an epoch of 5 steps"),
    "size": (changed(seed=np.arange(3)), r"position has int64\[3\] as 'seed': pass it as it was s"),
    "a fresh order": (
        lambda: read_from(np.arange(16).reshape(2, 8)),
        r"live gives other orders, of shape \(2, 8\), .*: begin with position.'orders'",
    ),
    "other workers": (
        lambda: read_from(np.arange(16).reshape(4, 4), step=np.array(0)),
        r"other orders, of shape \(4, 4\), .* of shape \(2, 8\): .*resize the position first",
    ),
    "missing": (changed(step=None), r"a dict of \['batch_size', .*pass what position"),
})  # fmt: skip
