"""Plans: the published schedules to the digit, one table of rules, and what they refuse."""

import functools
import itertools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import local_opt
from local_opt.plans import syncs_after_traced
from tests import reference, tables
from tests.cases import mostly_slow, times
from tests.problems import ends_of

VECTORS = (
    pathlib.Path(__file__).resolve().parents[2].parent / "shared" / "reference" / "qsr_vectors.json"
)


# Published runs: T, warmup, peak rate, alpha, H_base; and facts about their rounds.
RECIPES = {
    "vit_b": (
        93600,
        10000,
        0.008,
        0.0175,
        4,
        {"rounds": 9711, "percent": 10.375, "first": (30, 57213), "last": (8142, 85458)},
    ),
    "resnet152": (
        62400,
        1560,
        0.8,
        0.2,
        2,
        {"rounds": 24792, "percent": 39.731, "first": (3, 47306), "last": (829, 61571)},
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_published_schedules(name):
    """And the starts of another cosine, another loop and another order of the clamps."""
    total_steps, warmup, peak, alpha, h_base, facts = RECIPES[name]
    rule = dict(total_steps=total_steps, alpha=alpha, h_base=h_base, warmup_steps=warmup)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total_steps, 1e-6)
    plan = local_opt.qsr(schedule, **rule)
    assert plan.rounds == facts["rounds"]
    assert round(100 * plan.rounds / plan.total_steps, 3) == facts["percent"]
    h, step = facts["first"]  # the first round with that H
    assert plan.starts[plan.periods == h][0] == step
    h, step = facts["last"]
    assert (plan.periods[-1], plan.starts[-1]) == (h, step)
    lr = reference.warmup_cosine(peak, warmup, total_steps, 1e-6)
    np.testing.assert_array_equal(plan.starts, reference.qsr_rounds(lr, **rule))


def test_every_row_of_the_vectors():
    if not VECTORS.exists():
        pytest.skip("no ../shared/reference/qsr_vectors.json")
    rows = json.loads(VECTORS.read_text())
    assert rows
    for row in rows:
        lr = optax.warmup_cosine_decay_schedule(
            0.0, row["peak_lr"], row["warmup_steps"], row["total_steps"], row["floor_lr"]
        )
        names = ("total_steps", "alpha", "h_base", "power", "warmup_steps")
        plan = local_opt.qsr(lr, **{name: row[name] for name in names})
        assert plan.rounds == row["rounds"]
        assert round(100 * plan.rounds / plan.total_steps, 4) == row["comm_pct"]
        assert int(plan.starts.sum()) == row["sum_starts"]
        for h, step in row["first_occurrence"].items():
            assert plan.starts[plan.periods == int(h)][0] == step
        tail = np.stack([plan.starts, plan.periods], axis=1)[-len(row["tail"]) :]
        assert tail.tolist() == row["tail"]


@functools.cache
def plan_of(name, total_steps):
    return tables.PLANS[name](total_steps)


@pytest.mark.parametrize("name", tables.PLANS)
@pytest.mark.parametrize("total_steps", [1, 2, 23, 60])
def test_every_plan_is_rounds_of_the_run(name, total_steps):
    plan = plan_of(name, total_steps)
    assert plan.total_steps == total_steps
    rounds = plan.rounds
    assert plan.starts.dtype == np.int64 and plan.starts[0] == 0
    assert (plan.periods >= 1).all() and plan.periods.sum() == total_steps
    assert ends_of(plan)[-1] == total_steps and plan.syncs_after(total_steps - 1)
    steps = np.arange(total_steps)
    assert plan.syncs_after(steps).sum() == rounds
    if total_steps in (1, 23):  # in a compiled step, of which each takes time
        traced = jax.jit(functools.partial(syncs_after_traced, plan))
        beyond = traced(np.arange(total_steps + 9)).tolist()
        assert beyond == [*plan.syncs_after(steps).tolist(), *[True] * 9]
    # A loop over steps, as a training run sees the plan.
    r, since = 0, 0
    for t in range(total_steps):
        since += 1
        assert plan.syncs_after(t) == (since == plan.periods[r])
        if plan.syncs_after(t):
            r, since = r + 1, 0
    assert (r, since) == (rounds, 0)


def test_one_round_takes_a_run_that_is_shorter():
    expected = local_opt.SyncPlan([0], 9)
    assert local_opt.constant(100, total_steps=9) == expected
    assert local_opt.qsr(0.1, total_steps=9, alpha=1e30, h_base=1) == expected
    assert local_opt.qsr(1e-300, total_steps=9, alpha=1e300, h_base=1, power=3) == expected
    assert local_opt.qsr(0.1, total_steps=9, alpha=0.1, h_base=10**30) == expected


def python_cosine(t):
    if t < 4:
        return 0.1 * t / 4
    return 0.1 * 0.5 * (1 + math.cos(math.pi * (t - 4) / 36))


@pytest.mark.parametrize("power", [1, 2, 3])
def test_rates_as_schedule_as_python_function_and_as_number(power):
    rule = dict(total_steps=40, alpha=0.12, h_base=2, power=power, warmup_steps=4)
    expected = reference.qsr_rounds(python_cosine, **rule)
    assert len(expected) < 20  # the rule grows here
    optax_cosine = optax.warmup_cosine_decay_schedule(0.0, 0.1, 4, 40, 0.0)
    for lr in (python_cosine, optax_cosine, lambda t: np.float64(python_cosine(int(t)))):
        assert local_opt.qsr(lr, **rule).starts.tolist() == expected
    array = np.array([python_cosine(t) for t in range(40)])
    assert local_opt.qsr(array, **rule).starts.tolist() == expected
    numbers = dict(total_steps=40, alpha=0.25, h_base=2, power=power)
    for lr in (0.1, lambda t: 0.1, optax.constant_schedule(0.1)):
        plan = local_opt.qsr(lr, **numbers)
        assert plan.periods[0] == math.floor((0.25 / 0.1) ** power)
        assert plan.starts.tolist() == reference.qsr_rounds(lambda t: 0.1, **numbers)


def test_the_warmup_has_the_rounds_that_follow_it():
    """As the paper recommends; and shorter ones where the rate inside it is higher."""
    rule = dict(total_steps=19, alpha=0.25, h_base=2)  # (0.25 / 0.1)^2 is 6.25
    rise = np.append(np.linspace(0.0, 0.1, 6)[:5], [0.1] * 14)
    for warmup in (0, 1, 4, 5, 8):
        assert local_opt.qsr(rise, warmup_steps=warmup, **rule).periods.tolist() == [6, 6, 6, 1]
    assert local_opt.qsr(0.1, warmup_steps=19, **rule).periods.tolist() == [2] * 9 + [1]
    assert local_opt.qsr(0.1, warmup_steps=4, h_max=5, **rule).periods.tolist() == [5, 5, 5, 4]
    stairs = np.repeat([1e-6, 0.05, 0.1], [5, 5, 9])
    assert local_opt.qsr(stairs, warmup_steps=10, **rule).periods.tolist() == [6, 6, 6, 1]
    # Until a stair asks for less.
    assert local_opt.qsr(stairs, **rule).periods.tolist() == [9, 6, 4]
    late = np.repeat([0.05, 0.125, 0.05], [3, 1, 15])  # the peak lies in the warmup
    assert local_opt.qsr(late, warmup_steps=6, **rule).periods.tolist() == [4, 15]


CYCLE = optax.cosine_decay_schedule(0.1, 100)
RISING = {
    "onecycle": optax.cosine_onecycle_schedule(300, 0.1),
    "linear onecycle": optax.linear_onecycle_schedule(300, 0.1),
    "sgdr": optax.sgdr_schedule(
        [dict(init_value=1e-5, peak_value=0.1, decay_steps=100, warmup_steps=20, end_value=1e-5)]
        * 3
    ),
    "restarts": optax.join_schedules([CYCLE] * 3, [100, 200]),
    "from above 0": optax.warmup_cosine_decay_schedule(1e-6, 0.1, 30, 300, 1e-4),
    "from 0": optax.warmup_cosine_decay_schedule(0.0, 0.1, 30, 300, 1e-4),
    "zero in one step": lambda t: 0.1 * (t != 50),
    "zero for a while": lambda t: 0.1 * ((t < 50) | (t > 90)),
    "rises at the end": lambda t: 0.001 + 0.099 * (t > 250),
    "up and down": lambda t: 0.01 + 0.09 * (t % 7 == 3),
    "tiny": lambda t: 1e-6 + 0.1 * (t > 20),
    "falls to 0": optax.linear_schedule(0.1, 0.0, 200),
}


@functools.cache
def rates_of(name):
    with jax.enable_x64(True):
        return jax.vmap(RISING[name])(jnp.arange(300)).tolist()


OPTIONS = ({}, {"h_max": 9}, {"power": 1}, {"warmup_steps": 40})
RULED = [*itertools.product(RISING, OPTIONS)]


@pytest.mark.parametrize("name,options", mostly_slow(RULED, quick=RULED[::3]))
def test_no_round_is_longer_than_the_rate_of_any_of_its_steps_allows(name, options):
    lr, rule = RISING[name], dict(total_steps=300, alpha=0.23, h_base=2) | options
    plan = local_opt.qsr(lr, power=rule.pop("power", 2), **rule)
    rule["power"] = options.get("power", 2)
    rates = rates_of(name)
    asked = np.array(reference.qsr_asked(rates.__getitem__, **rule))
    for start, length in zip(plan.starts, plan.periods, strict=True):
        assert length <= asked[start : start + length].min()
        whole = start + length == 300 or length + 1 > asked[start : start + length + 1].min()
        assert whole, "a longer round was allowed"
    assert plan.starts.tolist() == reference.qsr_rounds(rates.__getitem__, **rule)


def test_numbers_that_float32_would_round_to_the_other_side_of_a_whole_one():
    """alpha / lr = 3 - 1e-9 is 3 in float32: the rule is evaluated in float64."""
    rule = dict(total_steps=100, alpha=3 - 1e-9, h_base=1)
    for lr in (1.0, optax.constant_schedule(1.0), lambda t: jnp.cos(0.0 * t)):
        assert local_opt.qsr(lr, **rule).periods[0] == 8
    assert jnp.zeros(()).dtype == jnp.float32 and not jax.config.jax_enable_x64
    rule["alpha"] = 3.0
    for lr in (1 + 1e-9, lambda t: jnp.float64(1e-9) + jnp.cos(0.0 * t)):
        assert local_opt.qsr(lr, **rule).periods[0] == 8


def test_bernoulli_has_its_rate_and_its_key():
    p, total_steps = 0.25, 10_000
    plan = local_opt.bernoulli(p, total_steps=total_steps, key=jax.random.key(0))
    deviation = math.sqrt(total_steps * p * (1 - p))  # binomial, 4 deviations: 1 in 16000
    assert abs(plan.rounds - p * total_steps) < 4 * deviation
    other = local_opt.bernoulli(p, total_steps=total_steps, key=jax.random.key(1))
    assert plan == local_opt.bernoulli(p, total_steps=total_steps, key=jax.random.key(0)) != other
    # p(t) is the chance of a sync after step t.
    once = local_opt.bernoulli(
        lambda t: 1.0 if t == 4 else 1e-9, total_steps=10, key=jax.random.key(0)
    )
    assert ends_of(once) == [5, 10]


@pytest.mark.parametrize("name", tables.PLANS)
@settings(max_examples=times(12))
@given(st.data())
def test_aligned_rounds_wait_for_the_next_mark(name, data):
    total_steps = data.draw(st.sampled_from([1, 2, 23, 60]))  # jax compiles for each
    every = data.draw(st.sampled_from([1, 2, 3, 2.5, 6.5, 12, 25 / 3, 100]))
    fresh = data.draw(
        st.none() | st.lists(st.booleans(), min_size=total_steps - 1, max_size=total_steps - 1)
    )
    loaded = np.array([True, *(fresh if fresh is not None else [True] * (total_steps - 1))])
    plan = plan_of(name, total_steps)
    result = plan.aligned(every=every, fresh=None if fresh is None else loaded)
    ends = reference.aligned_ends(set(ends_of(plan)), loaded, every)
    assert ends_of(result) == ends
    assert result.total_steps == total_steps and 1 <= result.rounds <= plan.rounds
    again = result.aligned(every=every, fresh=None if fresh is None else loaded)
    assert again is result
    if every == 1 and fresh is None:
        assert result is plan


INF = math.inf
INFINITE = [([INF, 1, 1], INF), ([1, -INF, 1], -INF), ([INF] * 3, INF), ([-INF, 1, INF], math.nan)]


@pytest.mark.parametrize("of_workers, mean", INFINITE)
def test_the_mean_of_infinities_is_theirs_on_one_device_as_on_a_mesh(of_workers, mean):
    plan, x = local_opt.constant(1, total_steps=1), jnp.array(of_workers)
    mesh = jax.make_mesh((3,), ("worker",), devices=jax.devices()[:3])
    for workers in (3, mesh):
        np.testing.assert_array_equal(plan.after(0, jnp.copy(x), workers), np.full(3, mean))
