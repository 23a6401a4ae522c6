"""What the library refuses by name, and extremes that it bears."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import local_opt
import ordering
from local_opt.workers import worker_mesh
from ordering import echo, herding
from syncopate import plans

PLAIN_ORDERS = (
    ordering.random_reshuffling, ordering.shuffle_once, ordering.flip_flop, ordering.unzip,
    ordering.dealt_reshuffling,
)  # fmt: skip
STEPPED = (ordering.greedy_herding, ordering.grab, ordering.pair_balance, ordering.cd_grab)
TOO_LONG = 10**12


@pytest.mark.parametrize("wrong", [2.0, np.float32(4), "4", None, True, np.nan, np.inf, 0, -1])
def test_sizes_are_whole_numbers(wrong):
    for order in PLAIN_ORDERS:
        with pytest.raises(ValueError, match="num_units is .*: an order needs .* Pass the number"):
            order(wrong)
    for order in STEPPED:
        with pytest.raises(ValueError, match="num_units is .*: an order needs .* Pass the number"):
            order(wrong, units_per_step=1)
        with pytest.raises(ValueError, match=r"units_per_step is .* in \[1, 4\], .* Lower"):
            order(4, units_per_step=wrong)
    with pytest.raises(ValueError, match="block_size is"):
        ordering.block_reshuffling(4, block_size=wrong)
    with pytest.raises(ValueError, match="workers is .*: pass a whole number >= 1"):
        worker_mesh(wrong)


def test_numbers_of_numpy_are_whole_numbers():
    assert len(ordering.shuffle_once(np.int64(3)).init(jax.random.key(0)).current) == 3


@pytest.mark.parametrize("wrong", [0, np.uint32(7), np.zeros(2, np.uint32), None])
def test_keys_are_typed(wrong):
    uses = (
        lambda key: ordering.shuffle_once(4).init(key),
        lambda key: ordering.greedy_herding(4).init(key, jnp.zeros(2)),
        lambda key: ordering.sketch(key, size=8),
        lambda key: echo.bernoulli(0.5, total_steps=4, key=key),
        lambda key: plans.check_key(key),
    )
    for use in uses:
        with pytest.raises(ValueError, match=r"key is .*: pass a typed key, as jax.random"):
            use(wrong)


@pytest.mark.parametrize("schedule", [1j, np.ones(4) * 1j, lambda t: 1j * t, lambda t: 1 + 0j])
def test_schedules_are_real(schedule):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="lr is complex128: .* must be real numbers"):
            plans.evaluate_schedule(schedule, 4, "lr")
    with pytest.raises(ValueError, match="lr is .*: the values of a schedule must be real"):
        plans.evaluate_schedule("fast", 4, "lr")


@pytest.mark.parametrize("wrong", [TOO_LONG, 10.0, 2.5, np.nan, "10", 0, -3])
def test_runs_have_a_number_of_steps_that_fits(wrong):
    uses = (
        lambda steps: plans.evaluate_schedule(0.1, steps, "lr"),
        lambda steps: echo.fixed(2, total_steps=steps),
        lambda steps: echo.error_diffusion(0.5, total_steps=steps),
        lambda steps: echo.measured(total_steps=steps, max_factor=4),
        lambda steps: local_opt.every_step(steps),
        lambda steps: echo.bernoulli(0.5, total_steps=steps, key=jax.random.key(0)),
        lambda steps: local_opt.constant(4, total_steps=steps),
        lambda steps: local_opt.qsr(0.1, total_steps=steps, alpha=0.1, h_base=2),
        lambda steps: local_opt.SyncPlan(np.array([0]), steps),
    )
    for use in uses:
        with pytest.raises(
            ValueError, match=rf"total_steps is {re.escape(repr(wrong))}: (a run has|plans)"
        ):
            use(wrong)


def test_steps_are_whole_numbers():
    with pytest.raises(ValueError, match=r"step is 3.5 \(float64\): steps are whole numbers"):
        local_opt.constant(4, total_steps=12).syncs_after(3.5)
    with pytest.raises(ValueError, match=r"step is 3.0 \(float64\): steps are whole numbers"):
        echo.fixed(2, total_steps=12).loads_before(3.0)


@given(
    arrays.arrays(
        np.float32, (6, 2),
        elements=st.floats(width=32, allow_nan=True, allow_infinity=True),
    )
)  # fmt: skip
def test_greedy_orders_are_permutations_whatever_the_gradients(vectors):
    order = herding.greedy_order(jnp.asarray(vectors))
    assert sorted(order.tolist()) == list(range(len(vectors)))


def test_greedy_orders_do_not_depend_on_the_scale():
    vectors = jax.random.normal(jax.random.key(3), (20, 5))
    first = herding.greedy_order(vectors)
    for exponent in (-60, -20, 20, 100):
        np.testing.assert_array_equal(herding.greedy_order(jnp.ldexp(vectors, exponent)), first)
    large = herding.greedy_order(jnp.array([[1e20], [-1e20], [2e20], [-2e20]]))
    assert sorted(large.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", [ordering.pair_balance, ordering.grab, ordering.greedy_herding])
def test_leaves_of_size_zero_change_nothing(order):
    made, key = order(4, units_per_step=2), jax.random.key(0)
    full = {"a": jax.random.normal(jax.random.key(1), (4, 3))}
    observe, orders = jax.jit(lambda s, r: made.observe(s, ordering.Rows.of(r))), []
    for extra in ({}, {"z": jnp.zeros((4, 0, 2))}):
        tree = full | extra
        state = made.init(jax.random.clone(key), jax.tree.map(lambda x: x[0], tree))
        for first in (0, 2):
            rows = jax.tree.map(lambda x, at=first: x[at : at + 2], tree)
            state = observe(state, rows)
        orders.append(made.next_epoch(state).current.tolist())
    assert orders[0] == orders[1]


def test_gradients_without_entries_and_no_workers_are_refused():
    made = ordering.pair_balance(4, units_per_step=2)
    state = made.init(jax.random.key(0), {"z": jnp.zeros((0, 2))})
    with pytest.raises(ValueError, match="have size 0: there is nothing to balance. Pass"):
        made.observe(state, ordering.Rows.of({"z": jnp.zeros((2, 0, 2))}))
    with pytest.raises(ValueError, match=r"shape \(0, 3\): pass arrays .* at least one worker"):
        local_opt.consolidate({"w": jnp.zeros((0, 3))})
    with pytest.raises(ValueError, match="of at least one unit"):
        ordering.herding_bound(jnp.zeros((0, 4, 2)), jnp.zeros((0, 4), int))
