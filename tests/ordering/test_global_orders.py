"""Global orders: epochs are permutations of all units, equal to the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering import base
from ordering.global_orders import GlobalState, _following
from tests import reference, tables

PAIRS = {
    "cd_grab": lambda m, b: ordering.cd_grab(m, units_per_step=b),
    "gathered": lambda m, b: ordering.cd_grab(m, units_per_step=b, gathers="sync"),
    "pair_balance": lambda m, b: ordering.pair_balance(m, units_per_step=b),
}


def run(order, gradients, units_per_step, **kwargs):
    """Orders [epochs + 1, W, M]; gradients [W M, D] of all units, which all workers read."""
    workers = kwargs.pop("workers")
    everywhere = np.broadcast_to(gradients, (workers, *gradients.shape))
    return tables.run_workers(order, everywhere, units_per_step, **kwargs)


@pytest.mark.parametrize(
    "name,workers,num_units,units_per_step",
    [("cd_grab", 4, 6, 4), ("gathered", 3, 5, 1), ("pair_balance", 4, 6, 4)],
)
def test_equals_the_reference(name, workers, num_units, units_per_step):
    gradients = tables.whole_numbers((workers * num_units, 6), seed=num_units, high=50)
    order = ordering.global_order(PAIRS[name](num_units, units_per_step), num_units)
    orders = run(order, gradients, units_per_step, workers=workers, epochs=3)
    for before, after in zip(orders, orders[1:], strict=False):
        expected = reference.global_epoch(before, gradients, alone=name == "pair_balance")
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize(
    "name,workers,num_units,left",
    [
        ("cd_grab", 8, 4, 5),
        ("cd_grab", 3, 4, 12),
        ("reshuffling", 1, 1, 0),
        ("reshuffling", 8, 4, 5),
    ],
)
def test_units_are_visited_at_most_once_and_each_epoch_leaves_out_others(
    name, workers, num_units, left
):
    total = workers * num_units + left
    gradients = tables.whole_numbers((total, 3), seed=workers)
    order = ordering.global_reshuffling(num_units, total=total)
    if name == "cd_grab":
        order = ordering.global_order(PAIRS[name](num_units, 1), num_units, total=total)
    orders = run(order, gradients, 1, workers=workers, epochs=4).reshape(5, -1)
    seen = [set(units) for units in orders.tolist()]
    assert all(len(units) == workers * num_units for units in seen)
    assert set().union(*seen) <= set(range(total))
    assert not left or len({frozenset(units) for units in seen[:3]}) > 1
    if name == "cd_grab" and left:  # consecutive units, in turn
        for epoch, units in enumerate(seen):
            waiting = {(total - left + epoch * left + i) % total for i in range(left)}
            assert units == set(range(total)) - waiting


def test_front_of_the_next_order_is_final():
    order = ordering.global_order(PAIRS["cd_grab"](8, 2), 8, total=27)
    gradients = jnp.asarray(tables.whole_numbers((27, 4)))

    def epoch(key):
        state = order.init(key, jnp.zeros(4))
        for start in range(0, 8, 2):
            units = state.current[start : start + 2]
            state = order.observe(state, gradients[units])
        return state.next, state.left, order.next_epoch(state).current

    keys = jax.random.split(jax.random.key(0), 3)
    final, left, current = tables.vmap_workers(epoch)(keys)
    assert left.tolist() == [4] * 3
    for worker, count in enumerate(left):
        np.testing.assert_array_equal(final[worker, :count], current[worker, :count])


def test_the_end_of_an_epoch_sends_only_signs():
    """One gather, of one bit per pair."""
    order = ordering.global_order(PAIRS["gathered"](32, 2), 32)
    state = tables.vmap_workers(lambda key: order.init(key, jnp.zeros(4)))(
        jax.random.split(jax.random.key(0), 8)
    )
    end = jax.jit(tables.shard_map_workers(order.next_epoch)).lower(state).as_text()
    waits = ordering.cd_grab(32, units_per_step=2, gathers="sync")
    plain = jax.jit(tables.shard_map_workers(waits.next_epoch)).lower(state.pairs).as_text()
    gather = '"stablehlo.all_gather"'
    assert end.count(gather) == plain.count(gather) + 1
    assert sum(gather in line and "tensor<8x2xui8>" in line for line in end.splitlines()) == 1


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("total", [20, 2**31 - 8, base.MOST_UNITS])
def test_the_units_that_wait_next_follow_those_that_wait(total, count):
    """Up to the largest total: a unit and their number may be more than int32 holds."""
    everyone = jax.ShapeDtypeStruct((1, total - count), jnp.int32)
    for first in (0, total - 2 * count, total - count):
        waiting = [first + i for i in range(count)]
        state = GlobalState(None, everyone, jnp.array([waiting], jnp.int32))
        expected = [(unit + count) % total for unit in waiting]
        assert _following(state).tolist() == [expected]
