"""Extremes that the library bears, and what it warns of."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.baselines import herding
from syncopate import schedules


def test_a_schedule_that_would_take_long_is_warned_of(monkeypatch):
    asked = []
    slow = lambda t: asked.append(t) or 0.1 / (1 + int(t))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = schedules.evaluate_schedule(slow, 120, "lr")
    assert [t for t in asked if isinstance(t, int)] == list(range(120))
    monkeypatch.setattr(schedules, "SLOW", 0.0)
    with pytest.warns(UserWarning, match="lr is evaluated step by step, .* write it with jax.nu"):
        np.testing.assert_array_equal(schedules.evaluate_schedule(slow, 120, "lr"), values)


def test_greedy_orders_do_not_depend_on_the_scale():
    vectors = jax.random.normal(jax.random.key(3), (20, 5))
    first = herding.greedy_order(vectors)
    for exponent in (-60, -20, 20, 100):
        np.testing.assert_array_equal(herding.greedy_order(jnp.ldexp(vectors, exponent)), first)
    large = herding.greedy_order(jnp.array([[1e20], [-1e20], [2e20], [-2e20]]))
    assert sorted(large.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "order", [ordering.pair_balance, ordering.grab, ordering.baselines.greedy_herding]
)
def test_leaves_of_size_zero_change_nothing(order):
    made, orders = order(4, units_per_step=2), []
    init, next_epoch = jax.jit(made.init), jax.jit(made.next_epoch)
    full = {"a": jax.random.normal(jax.random.key(1), (4, 3))}
    observe = jax.jit(lambda s, r: made.observe(s, r))
    for extra in ({}, {"z": jnp.zeros((4, 0, 2))}):
        tree = full | extra
        state = init(jax.random.key(0), jax.tree.map(lambda x: x[0], tree))
        for first in (0, 2):
            state = observe(state, jax.tree.map(lambda x, at=first: x[at : at + 2], tree))
        orders.append(next_epoch(state).current.tolist())
    assert orders[0] == orders[1]
