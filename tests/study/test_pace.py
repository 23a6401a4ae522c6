"""The pace of echoing: the recurrence against a queue simulated in small ticks of time."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.study.cost import pace_of
from ordering import echo
from tests import reference
from tests.cases import times

# From a separate simulation of loads that take four steps: bernoulli with p = 1/4 at queue depth 1,
# 4 and 16, and with p = 0.9/4 at depth 8.
TABLE = (1.173, 1.072, 1.023, 1.009)


@st.composite
def runs(draw):
    steps = draw(st.integers(1, 40))
    loads = draw(st.lists(st.integers(1, 20), min_size=steps, max_size=steps))
    return steps, loads, draw(st.integers(1, 6)), draw(st.integers(1, 4))


def forecast_of(policy, loads, step, depth):
    """(plan, stall in ticks), for loads and steps of whole ticks."""
    loads = np.pad(np.array(loads) / step, (0, policy.total_steps - len(loads)))
    plan, stall = pace_of(policy, loads, depth=depth)
    return plan, stall * step


@settings(max_examples=times(60))
@given(runs(), st.data())
def test_plans_take_the_time_of_the_simulated_queue(run, data):
    steps, loads, step, depth = run
    fresh = [True, *data.draw(st.lists(st.booleans(), min_size=steps - 1, max_size=steps - 1))]
    plan, stall = forecast_of(echo.EchoPlan(fresh), loads, step, depth)
    decisions, waited = reference.loads_ahead(
        lambda t, *_: fresh[t], steps, loads[: sum(fresh)], step, depth
    )
    assert decisions == fresh == plan.fresh.tolist()
    assert stall == pytest.approx(waited, abs=1e-6)


@settings(max_examples=times(60))
@given(runs(), st.integers(1, 6), st.sampled_from([None, 0.3, 0.9]))
def test_measured_decides_as_with_the_simulated_queue(run, cap, floor):
    steps, loads, step, depth = run
    policy = echo.measured(total_steps=steps, max_factor=cap, floor=floor)
    plan, stall = forecast_of(policy, loads, step, depth)

    def decide(t, count, uses, ready):
        return policy.decide(t, loads=count, uses=uses, ready=lambda: ready)

    decisions, waited = reference.loads_ahead(decide, steps, loads, step, depth)
    assert plan.fresh.tolist() == decisions
    assert stall == pytest.approx(waited, abs=1e-6)
    # Cap and floor hold, and the plan replays at the same pace.
    assert plan.uses.max() <= cap and (np.cumsum(decisions) >= policy.at_least).all()
    assert forecast_of(plan, loads, step, depth) == (plan, stall)


def slowdown(policy, load, depth=1):
    return 1 + pace_of(policy, load, depth=depth)[1] / policy.total_steps


def test_the_slowdown_of_bernoulli_is_that_of_the_reference_table():
    """Both sides vary: the standard deviation over 12 keys is at most 0.0036 in 200,000 steps."""
    plans = [
        echo.bernoulli(share / 4, total_steps=200_000, key=jax.random.key(0)) for share in (1, 0.9)
    ]
    found = [*(slowdown(plans[0], 4, d) for d in (1, 4, 16)), slowdown(plans[1], 4, 8)]
    np.testing.assert_allclose(found, TABLE, rtol=0, atol=0.01)


@pytest.mark.parametrize("factor", [1, 8, 10 / 3])
def test_even_loads_never_stall(factor):
    """At p = 1/R exactly: error diffusion, and loads when ready."""
    steps = 50_000
    spread, stall = pace_of(echo.error_diffusion(1 / factor, total_steps=steps), factor, depth=1)
    assert stall == 0
    policy = echo.measured(total_steps=steps, max_factor=math.ceil(4 * factor))
    ready, stall = pace_of(policy, factor, depth=1)
    assert stall == 0
    assert abs(ready.loads - spread.loads) <= 1  # as often as the input allows
    every = slowdown(echo.fixed(1, total_steps=steps), factor)
    assert every == pytest.approx(factor, rel=2e-5 * factor)


def test_measured_does_not_stall_when_loading_times_vary():
    loads = np.random.default_rng(0).exponential(4, 5000)
    assert slowdown(echo.measured(total_steps=5000, max_factor=200), loads) == 1
    assert slowdown(echo.error_diffusion(0.25, total_steps=5000), loads) > 1.1


def test_measured_continues_after_recorded_decisions():
    whole, _ = pace_of(echo.measured(total_steps=30, max_factor=9), 3.0)
    policy = echo.measured(total_steps=30, max_factor=9, decided=whole.fresh[:11])
    assert pace_of(policy, 3.0)[0] == whole
