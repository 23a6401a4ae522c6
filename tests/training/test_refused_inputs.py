"""What the library refuses by name, and extremes that it bears."""

import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import local_opt
import ordering
from ordering import echo, herding
from syncopate import schedules
from tests.refused import refuses

KEY, NO_KEYS = jax.random.key(0), (0, np.uint32(7), np.zeros(2, np.uint32), None)
NO_SIZES = (2.0, np.float32(4), "4", None, True, np.nan, np.inf, 0, -1)
NO_STEPS = (10**12, 10**7 + 1, 10.0, 2.5, np.nan, "10", 0, -3)
# {what: (values, calls of one, message)}
WRONG = {
    "units": (NO_SIZES, [
        ordering.random_reshuffling, ordering.shuffle_once, ordering.flip_flop, ordering.unzip,
        ordering.dealt_reshuffling,
        *(lambda n, order=order: order(n, units_per_step=1) for order in (
            ordering.greedy_herding, ordering.grab, ordering.pair_balance, ordering.cd_grab)),
    ], "num_units is .*: an order needs .* Pass the number"),
    "units of a step": (NO_SIZES, [
        lambda n, order=order: order(4, units_per_step=n) for order in (
            ordering.greedy_herding, ordering.grab, ordering.pair_balance, ordering.cd_grab)
    ], r"units_per_step is .* in \[1, 4\]. Lower"),
    "keys": (NO_KEYS, [
        lambda key: ordering.shuffle_once(4).init(key),
        lambda key: ordering.greedy_herding(4).init(key, jnp.zeros(2)),
        lambda key: ordering.sketch(key, size=8),
        lambda key: echo.bernoulli(0.5, total_steps=4, key=key),
    ], r"key is .*: pass a typed key, as jax.random"),
    "steps": (NO_STEPS, [
        lambda n: schedules.evaluate_schedule(0.1, n, "lr"),
        lambda n: echo.fixed(2, total_steps=n),
        lambda n: echo.error_diffusion(0.5, total_steps=n),
        lambda n: echo.measured(total_steps=n, max_factor=4),
        lambda n: echo.bernoulli(0.5, total_steps=n, key=KEY),
        local_opt.every_step,
        lambda n: local_opt.constant(4, total_steps=n),
        lambda n: local_opt.qsr(0.1, total_steps=n, alpha=0.1, h_base=2),
        lambda n: local_opt.SyncPlan(np.array([0]), n),
    ], "total_steps is {}: (pass an integer|a plan holds)"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_values_are_named(what):
    values, calls, message = WRONG[what]
    for wrong in values:
        for call in calls:
            with pytest.raises(ValueError, match=message.replace("{}", re.escape(repr(wrong)))):
                call(wrong)


MADE = ordering.pair_balance(4, units_per_step=2)
test_what_does_not_fit_is_named = refuses({
    "step": (lambda: local_opt.constant(4, total_steps=12).syncs_after(3.5),
             r"step is 3.5 \(float64\): steps are whole numbers"),
    "no entries": (
        lambda: MADE.observe(
            MADE.init(KEY, {"z": jnp.zeros((0, 2))}), ordering.Rows.of({"z": jnp.zeros((2, 0, 2))})
        ),
        "have size 0: there is nothing to balance. Pass"),
    "no workers": (lambda: local_opt.consolidate({"w": jnp.zeros((0, 3))}),
                   r"shape \(0, 3\): pass arrays .* at least one worker"),
    "no units": (
        lambda: ordering.herding_bound(jnp.zeros((0, 4, 2)), jnp.zeros((0, 4), int)),
        "of at least one unit"),
})  # fmt: skip


NO_SCHEDULES = {
    "lr is complex128.*: .* must be real numbers": [
        1j, np.ones(4) * 1j, lambda t: 1j * t, lambda t: 1 + 0j
    ],
    "lr is a? ?.*: .* must be real numbers": [
        "fast", "0.1", ["0.1"] * 4, True, [True] * 4, None, [0.1, None, 1, 1], 10**400, KEY, {},
        (0.1 for _ in range(4)), lambda t: None, lambda t: "0.1", lambda t: t > 0, lambda t: KEY,
        lambda t: [1.0] * int(t),
    ],
    r"lr has the shape \(.*: pass one value for each of the 4 steps": [
        [], [0.1], np.ones((4, 1)), lambda t: [t, t], lambda t: np.ones((2, 3)),
    ],
    r"lr is (cosine_decay_schedule|<lambda>|observe): pass a function of \(step\)": [
        optax.cosine_decay_schedule, lambda: 0.1, ordering.pair_balance(4).observe,
    ],
    r"lr\(\d\) is (nan|inf|-inf|-1): the schedule must be finite and not negative": [
        math.nan, math.inf, -1, [0, -math.inf, 0, 0], lambda t: 2.0 - t,
        lambda t: jnp.where(t > 2, jnp.nan, 1.0), lambda t: math.nan if t else 1,
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", NO_SCHEDULES)
def test_what_is_no_schedule_is_refused(message):
    for schedule in NO_SCHEDULES[message]:
        with pytest.raises(ValueError, match=message):
            schedules.evaluate_schedule(schedule, 4, "lr")


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
    made, orders = order(4, units_per_step=2), []
    full = {"a": jax.random.normal(jax.random.key(1), (4, 3))}
    observe = jax.jit(lambda s, r: made.observe(s, ordering.Rows.of(r)))
    for extra in ({}, {"z": jnp.zeros((4, 0, 2))}):
        tree = full | extra
        state = made.init(jax.random.clone(KEY), jax.tree.map(lambda x: x[0], tree))
        for first in (0, 2):
            state = observe(state, jax.tree.map(lambda x, at=first: x[at : at + 2], tree))
        orders.append(made.next_epoch(state).current.tolist())
    assert orders[0] == orders[1]
