"""Sums over shuffled windows are the gradients of whole blocks, and orders get them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.blocks import add_gradients, read_blocks, split
from tests import block_cases, reference
from tests.refused import refuses
from tests.tables import vmap_workers, whole_numbers

# 8 units of 4 records, where the last of each file has fewer; 3 in a window.
SIZES, UNIT_SIZE, WINDOW, ENTRIES = [14, 15], 4, 3, 3
BLOCKS = split(block_cases.parts_of(SIZES), unit_size=UNIT_SIZE)
COUNT = len(BLOCKS)
VECTORS = whole_numbers((sum(SIZES), ENTRIES), seed=1)
PARAMS = whole_numbers((ENTRIES,), seed=2)


def loss(params, batch, key):
    return 0.5 * jnp.square(batch @ params)


def block_sums(units):
    """The sums of the gradients of whole blocks: whole numbers, which are exact in float32."""
    gradients = VECTORS * (VECTORS @ PARAMS)[:, None]
    return np.stack([gradients[BLOCKS.read([unit])].sum(axis=0) for unit in units])


def add_batch(found, records, places):
    batch = jnp.asarray(VECTORS)[records]
    rows = ordering.per_example_grads(loss)(jnp.asarray(PARAMS), batch, key=jax.random.key(0))[2]
    return add_gradients(found, rows, places)


ADD = jax.jit(add_batch)


def train(state, added, end, next_epoch, *, epochs=2, batch_size=5):
    """The state after some epochs; `state = end(state, sums, units)` ends a window."""
    begin = 0
    found = empty = jnp.zeros((*state.current.shape[:-1], WINDOW, ENTRIES))
    options = {"window": WINDOW, "batch_size": batch_size, "num_epochs": epochs}
    with read_blocks(BLOCKS, lambda: state, **options) as reads:
        for batch in reads:
            found = added(found, *batch)
            if reads.window_ended:
                units = np.asarray(state.current)[..., begin : begin + reads.window_units]
                state, found = end(state, found, units), empty
                begin += reads.window_units
            if reads.epoch_ended:
                state, begin = next_epoch(state), 0
    return state


@pytest.mark.parametrize("batch_size", [1, 5, 20])
def test_sums_over_a_shuffled_window_are_those_of_its_blocks(batch_size):
    order, seen = ordering.random_reshuffling(COUNT), []

    def end(state, found, units):
        np.testing.assert_array_equal(found[: len(units)], block_sums(units))
        seen.append(len(units))
        return state

    state = order.init(jax.random.key(3), None)
    train(state, ADD, end, order.next_epoch, batch_size=batch_size)
    assert seen == [3, 3, 2] * 2


def test_the_orders_of_workers_are_those_of_the_gradients_of_blocks():
    """CD-GraB with two workers, to whom the blocks are dealt anew in every epoch."""
    _, state, observe, next_epoch = block_cases.dealt_of("dealt", 2, COUNT // 2, WINDOW)
    totals, orders = np.zeros((COUNT, ENTRIES)), []

    def end(state, found, units):
        for own in units:
            totals[own] = block_sums(own)
        return observe(state, found[:, : units.shape[1]])

    def following(state):
        after = next_epoch(state)
        expected = reference.dealt_epoch(np.asarray(state.current), totals)
        orders.append(np.asarray(after.current).tolist() == np.asarray(expected).tolist())
        return after

    train(state, vmap_workers(add_batch), end, following, epochs=3)
    assert orders == [True] * 3


@pytest.mark.parametrize("wrong,dtype", [(np.nan, np.float32), (np.inf, jnp.bfloat16)])
@pytest.mark.parametrize("at", range(4))
def test_a_gradient_that_is_not_finite_is_in_the_sum_of_its_block_alone(at, wrong, dtype):
    """Also of a record that fills the batch, whose gradient is in no sum."""
    places = np.array([2, 0, -1, 1, 1, 0, -1], np.int32)
    gradients = {"w": whole_numbers((7, 2, 3), seed=3), "b": whole_numbers((7,), seed=4)}
    gradients["w"][at, 1] = wrong
    empty = jax.tree.map(lambda x: jnp.zeros((4, *x.shape[1:])), gradients)
    rows = jax.tree.map(lambda x: jnp.asarray(x, dtype), gradients)
    found = jax.jit(add_gradients)(empty, rows, jnp.asarray(places))
    for name, g in gradients.items():
        expected = np.zeros((5, *g.shape[1:]), np.float32)
        np.add.at(expected, places, g)  # those of -1 are in the last
        np.testing.assert_array_equal(found[name], expected[:4])


ROWS = jnp.ones((4, ENTRIES))


def add(gradients, places):
    return lambda: add_gradients(jnp.zeros((2, ENTRIES)), gradients, places)


test_bad_input = refuses({
    "fewer places": (add(ROWS, jnp.zeros(3, int)), r"shape \(3,\) .* for 4 gradients"),
    "places of all": (add(ROWS, jnp.zeros((2, 4), int)), "places of one worker's"),
    "other rows": (
        add(jnp.ones((4, 2)), jnp.zeros(4, int)),
        r"gradients is real\[4, 2\] and in sums real\[4, 3\]",
    ),
})  # fmt: skip
