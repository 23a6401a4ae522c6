"""echo_forecast: the recurrence against a queue simulated in small ticks of time."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ordering import echo
from tests import reference
from tests.cases import times

# By R, from a separate simulation of loads that take R steps: bernoulli with p = 1/R at queue
# depth 1, 4 and 16, and with p = 0.9/R at depth 8.
TABLE = {
    2: (1.127, 1.052, 1.017, 1.003),
    4: (1.173, 1.072, 1.023, 1.009),
    8: (1.196, 1.085, 1.029, 1.014),
}
TICK = 0.125  # seconds


@st.composite
def runs(draw):
    steps = draw(st.integers(1, 40))
    loads = draw(st.lists(st.integers(1, 20), min_size=steps, max_size=steps))
    return steps, loads, draw(st.integers(1, 6)), draw(st.integers(1, 4))


def forecast_of(policy, loads, step, depth):
    seconds = TICK * np.array(loads)
    return echo.echo_forecast(policy, load_seconds=seconds, step_seconds=TICK * step, depth=depth)


@settings(max_examples=times(60))
@given(runs(), st.data())
def test_plans_take_the_time_of_the_simulated_queue(run, data):
    steps, loads, step, depth = run
    fresh = [True, *data.draw(st.lists(st.booleans(), min_size=steps - 1, max_size=steps - 1))]
    found = forecast_of(echo.EchoPlan(fresh), loads, step, depth)
    decisions, waited = reference.loads_ahead(
        lambda t, *_: fresh[t], steps, loads[: sum(fresh)], step, depth
    )
    assert decisions == fresh and found.loads == sum(fresh)
    assert found.stall_seconds == pytest.approx(TICK * waited, abs=1e-9)
    assert found.total_seconds == pytest.approx(TICK * (steps * step + waited))
    assert found.slowdown == pytest.approx(1 + waited / (steps * step))


@settings(max_examples=times(60))
@given(runs(), st.integers(1, 6), st.sampled_from([None, 0.3, 0.9]))
def test_measured_decides_as_with_the_simulated_queue(run, cap, floor):
    steps, loads, step, depth = run
    policy = echo.measured(total_steps=steps, max_factor=cap, floor=floor)
    found = forecast_of(policy, loads, step, depth)

    def decide(t, count, uses, ready):
        return policy.decide(t, loads=count, uses=uses, ready=lambda: ready)

    decisions, waited = reference.loads_ahead(decide, steps, loads, step, depth)
    assert found.plan.fresh.tolist() == decisions
    assert found.stall_seconds == pytest.approx(TICK * waited, abs=1e-9)
    # Cap and floor hold, and the plan replays at the same pace.
    assert found.plan.uses.max() <= cap and (np.cumsum(decisions) >= policy.at_least).all()
    assert forecast_of(found.plan, loads, step, depth) == found


@pytest.mark.parametrize("factor", TABLE)
def test_the_slowdown_of_bernoulli_is_that_of_the_reference_table(factor):
    """Both sides vary: the standard deviation over 12 keys is at most 0.0036 in 200,000 steps."""
    pace = {"load_seconds": 0.002 * factor, "step_seconds": 0.002}
    plans = [
        echo.bernoulli(share / factor, total_steps=200_000, key=jax.random.key(0))
        for share in (1, 0.9)
    ]
    found = [echo.echo_forecast(plans[0], depth=d, **pace).slowdown for d in (1, 4, 16)]
    found.append(echo.echo_forecast(plans[1], depth=8, **pace).slowdown)
    np.testing.assert_allclose(found, TABLE[factor], rtol=0, atol=0.01)


@pytest.mark.parametrize("factor", [1, 2, 4, 8, 10 / 3, 1.7])
def test_even_loads_never_stall(factor):
    """At p = 1/R exactly: error diffusion, and loads when ready."""
    steps = 50_000
    pace = {"load_seconds": 0.003 * factor, "step_seconds": 0.003, "depth": 1}
    spread = echo.echo_forecast(echo.error_diffusion(1 / factor, total_steps=steps), **pace)
    assert spread.slowdown == 1 and spread.stall_seconds == 0
    policy = echo.measured(total_steps=steps, max_factor=math.ceil(4 * factor))
    ready = echo.echo_forecast(policy, **pace)
    assert ready.slowdown == 1
    assert abs(ready.loads - spread.loads) <= 1  # as often as the input allows
    every = echo.echo_forecast(echo.fixed(1, total_steps=steps), **pace)
    assert every.slowdown == pytest.approx(factor, rel=2e-5 * factor)


def test_measured_does_not_stall_when_loading_times_vary():
    loads = np.random.default_rng(0).exponential(0.008, 5000)
    policy = echo.measured(total_steps=5000, max_factor=200)
    pace = {"load_seconds": loads, "step_seconds": 0.002, "depth": 1}
    assert echo.echo_forecast(policy, **pace).stall_seconds == 0
    spread = echo.error_diffusion(0.25, total_steps=5000)
    assert echo.echo_forecast(spread, **pace).slowdown > 1.1


def test_measured_continues_after_recorded_decisions():
    pace = {"load_seconds": 3.0, "step_seconds": 1.0}
    whole = echo.echo_forecast(echo.measured(total_steps=30, max_factor=9), **pace).plan
    policy = echo.measured(total_steps=30, max_factor=9, decided=whole.fresh[:11])
    assert echo.echo_forecast(policy, **pace).plan == whole


@pytest.mark.parametrize(
    "change, message",
    [
        ({"step_seconds": 0}, "step_seconds is 0"),
        ({"load_seconds": [1.0, -1.0, 1.0]}, "load_seconds is .1.0, -1.0"),
        ({"load_seconds": [[1.0], [1.0, 2.0]]}, "load_seconds is ..1.0., "),
        ({"load_seconds": [1.0]}, "1 values and the run up to 3 loads"),
        ({"depth": 0}, "depth is 0"),
        ({"policy": 4}, "policy is a int"),
    ],
)  # fmt: skip
def test_bad_values_are_named(change, message):
    policy = echo.fixed(2, total_steps=6)
    values = {"policy": policy, "load_seconds": 1.0, "step_seconds": 1.0} | change
    with pytest.raises(ValueError, match=message):
        echo.echo_forecast(values.pop("policy"), **values)
