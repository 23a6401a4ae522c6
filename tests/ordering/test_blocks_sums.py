"""Sums over shuffled windows are the gradients of whole blocks, and orders get them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.blocks import add_gradients, read_blocks, split
from tests import block_cases, reference
from tests.tables import vmap_workers, whole_numbers

# 8 units of 4 records, where the last of each file has fewer; 3 in a window.
SIZES, UNIT_SIZE, WINDOW, ENTRIES = [14, 15], 4, 3, 3
BLOCKS = split(block_cases.parts_of(SIZES), unit_size=UNIT_SIZE)
COUNT = len(BLOCKS)
VECTORS = whole_numbers((sum(SIZES), ENTRIES), seed=1)
PARAMS, KEY = whole_numbers((ENTRIES,), seed=2), jax.random.key(0)


def loss(params, batch, key):
    return 0.5 * jnp.square(batch @ params)


def block_sums(units):
    """The sums of the gradients of whole blocks: whole numbers, which are exact in float32."""
    gradients = VECTORS * (VECTORS @ PARAMS)[:, None]
    return np.stack([gradients[BLOCKS.read([unit])].sum(axis=0) for unit in units])


def rows_of(records):
    batch = jnp.asarray(VECTORS)[records]
    return ordering.per_example_grads(loss)(jnp.asarray(PARAMS), batch, key=KEY)[2]


def train(order, workers, end, *, epochs=2, batch_size=5, by_hand=False, state=None):
    """The reader after some epochs; `end(units, sums)` is called as a window ends."""
    like, shape = jnp.zeros(ENTRIES), (WINDOW, ENTRIES)
    options = {"batch_size": batch_size, "num_epochs": epochs, "workers": workers, "like": like}
    of_all = (lambda f: f) if workers is None else vmap_workers
    add, rows = jax.jit(of_all(add_gradients)), jax.jit(of_all(rows_of))
    observe = of_all(order.observe)
    begin, empty = 0, jnp.zeros(shape if workers is None else (workers, *shape))
    sums = empty
    with read_blocks(BLOCKS, order, KEY, **options) as reads:
        for records, places in reads:
            gradients = rows(records)
            sums, ended = add(sums, gradients, places), reads.window_ended
            if ended:
                stop = begin + reads.window_units
                units = np.asarray(reads.order_state.current)[..., begin:stop]
                window_sums = sums[..., : reads.window_units, :]
                end(units, window_sums)
                begin, sums = 0 if reads.epoch_ended else stop, empty
            if not by_hand:
                reads.observe(gradients)
            elif ended:
                reads.advance(observe(reads.order_state, window_sums))
    return reads


@pytest.mark.parametrize("batch_size", [5, 20])
def test_sums_over_a_shuffled_window_are_those_of_its_blocks(batch_size):
    order, seen = ordering.random_reshuffling(COUNT, units_per_step=WINDOW), []

    def end(units, sums):
        np.testing.assert_array_equal(sums, block_sums(units))
        seen.append(len(units))

    train(order, None, end, batch_size=batch_size)
    assert seen == [3, 3, 2] * 2


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_orders_of_workers_are_those_of_the_gradients_of_blocks(by_hand):
    """CD-GraB with two workers, to whom every epoch assigns the blocks anew; by the reader,
    and by a step that adds the gradients itself."""
    order = block_cases.global_order_of("global", COUNT // 2, WINDOW)
    totals, orders = np.zeros((COUNT, ENTRIES)), []

    def end(units, sums):
        for of_worker in units:
            totals[of_worker] = block_sums(of_worker)
        orders.append(units)

    reads = train(order, 2, end, epochs=3, by_hand=by_hand)
    windows = len(orders) // 3
    epochs = [np.concatenate(orders[i : i + windows], 1) for i in range(0, len(orders), windows)]
    gradients = block_sums(range(COUNT))
    for before, after in zip(epochs, epochs[1:], strict=False):
        assert after.tolist() == np.asarray(reference.global_epoch(before, gradients)).tolist()
    assert reads.epoch_ended and len(epochs) == 3


def test_a_mesh_with_explicit_axes_gives_what_is_simulated():
    """Also where it goes on inside a window, whose sums lie on the workers' devices."""
    order = block_cases.global_order_of("global", COUNT // 2, WINDOW)
    options = {"batch_size": 5, "num_epochs": 2, "like": jnp.zeros(ENTRIES)}
    results = []
    for workers in (2, jax.make_mesh((2,), ("worker",))):
        state, batches = None, []
        for stop in (2, None):  # of three batches of a window
            with read_blocks(BLOCKS, order, KEY, workers=workers, state=state, **options) as reads:
                for records, places in reads:
                    batches.append(np.asarray(records).tolist())
                    reads.observe(jnp.stack([records % 7 - 3, records % 5 - 2, places], -1) * 1.0)
                    if len(batches) == stop:
                        break
                state = reads.state()
                assert int(state.summed) == (stop or 0)
        assert len(batches) == 8
        results.append((batches, np.asarray(reads.order_state.current).tolist()))
    assert results[0] == results[1]


@pytest.mark.parametrize("wrong,dtype,at", [(np.nan, np.float32, 2), (np.inf, jnp.bfloat16, 1)])
def test_a_gradient_that_is_not_finite_is_in_the_sum_of_its_block_alone(wrong, dtype, at):
    """Also of a record that fills the batch, whose gradient is in no sum."""
    places = np.array([2, 0, -1, 1, 1, 0, -1], np.int32)
    gradients = {"w": whole_numbers((7, 2, 3), seed=3), "b": whole_numbers((7,), seed=4)}
    gradients["w"][at, 1] = wrong
    empty = jax.tree.map(lambda x: jnp.zeros((4, *x.shape[1:])), gradients)
    rows = jax.tree.map(lambda x: jnp.asarray(x, dtype), gradients)
    actual = jax.jit(add_gradients)(empty, rows, jnp.asarray(places))
    for name, g in gradients.items():
        expected = np.zeros((5, *g.shape[1:]), np.float32)
        np.add.at(expected, places, g)  # those of -1 are in the last
        np.testing.assert_array_equal(actual[name], expected[:4])
