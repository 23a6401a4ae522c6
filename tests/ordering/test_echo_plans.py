"""Echo plans against plain loops over the steps, and the values that they refuse."""

import math
from fractions import Fraction

import jax
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ordering import echo
from tests import reference, tables


@pytest.mark.parametrize("name", tables.ECHO_PLANS)
@pytest.mark.parametrize("total_steps", [1, 41])  # jax compiles for each
def test_properties_of_a_plan_agree_with_a_loop_over_the_steps(name, total_steps):
    plan = tables.ECHO_PLANS[name](total_steps)
    assert plan.total_steps == total_steps == len(plan.fresh)
    assert plan.loads == plan.fresh.sum() and plan.loads_per_step == plan.loads / total_steps
    used = reference.loads_used(plan.fresh)  # a loop over steps, as a training run sees the plan
    assert np.bincount(used).tolist() == plan.uses.tolist()
    assert [used.index(load) for load in range(plan.loads)] == plan.load_steps.tolist()
    loads_before = [len(set(used[:t])) for t in range(total_steps + 1)]
    assert plan.loads_before(np.arange(total_steps + 1)).tolist() == loads_before
    assert [plan.first_load(t) for t in range(total_steps)] == used


@given(st.integers(1, 12), st.integers(1, 60))
def test_fixed_loads_every_factor_steps(factor, total_steps):
    plan = echo.fixed(factor, total_steps=total_steps)
    assert plan.fresh.tolist() == [t % factor == 0 for t in range(total_steps)]


COSINE = optax.cosine_decay_schedule(1.0, 300, alpha=0.25)
CHANCES = {
    "a number": (0.3, lambda t: 0.3),
    "cosine": (COSINE, lambda t: 0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * t / 300))),
    "python": (lambda t: 1 / (1 + t % 4), lambda t: 1 / (1 + t % 4)),
    "an array": (np.linspace(1.0, 0.1, 300), lambda t: 1.0 - 0.9 * t / 299),
    "almost never": (1e-12, lambda t: 1e-12),
}


@pytest.mark.parametrize("name", CHANCES)
def test_bernoulli_is_algorithm_1(name):
    given_p, p = CHANCES[name]
    for key in jax.random.split(jax.random.key(0), 2):
        plan = echo.bernoulli(given_p, total_steps=300, key=key)
        coins = np.asarray(jax.random.uniform(key, (300,), np.float32))
        assert plan.fresh.tolist() == reference.stochastic_echo(p, coins)


LINE = [Fraction(50 - t, 50) for t in range(45)]  # hits whole sums and misses them by 1/50
RATES = {
    "1/3": (1 / 3, [Fraction(1, 3)] * 1000),
    "0.1": (0.1, [Fraction(1, 10)] * 1000),
    "0.4": (0.4, [Fraction(2, 5)] * 1000),
    "1": (1.0, [Fraction(1)] * 1000),
    "a line": (lambda t: (50.0 - t) / 50, LINE),
    "a line of optax": (optax.linear_schedule(1.0, 0.1, 45), LINE),
}


@pytest.mark.parametrize("name", RATES)
def test_error_diffusion_equals_exact_arithmetic(name):
    p, exact = RATES[name]
    plan = echo.error_diffusion(p, total_steps=len(exact))
    assert plan.fresh.tolist() == reference.error_diffusion(exact)


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=40))
@example([0.1] * 40)
@example([1e-3, 1.0, 1e-3])
def test_error_diffusion_is_within_one_load_of_its_rate_in_every_stretch(p):
    plan = echo.error_diffusion(np.array(p), total_steps=len(p))
    loads, rates = np.append(0, np.cumsum(plan.fresh)), np.append(0, np.cumsum(p))
    surplus = loads - rates
    # Less than one in exact arithmetic; these are sums of 40 floats.
    assert np.abs(surplus[:, None] - surplus[None]).max() < 1 + 1e-12


def test_draws_do_not_depend_on_the_precision():
    expected = {name: make(400).digest() for name, make in tables.ECHO_PLANS.items()}
    assert len(set(expected.values())) == len(expected)
    with jax.enable_x64(True):
        assert {name: make(400).digest() for name, make in tables.ECHO_PLANS.items()} == expected
