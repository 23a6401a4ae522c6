"""Fields of the state by plans of their own, and the price of any plans of parts."""

import jax
import numpy as np
import optax
import pytest

import local_opt
from local_opt import WIRES
from tests import reference
from tests.problems import (
    MATRICES,
    START,
    TARGETS,
    W,
    assert_bitwise_equal,
    copies,
    distance,
    flat,
    square_gradient,
    square_step,
    vmap,
)
from tests.refused import refuses

FIELDS = {"params": "x", "mu": "u", "nu": "v"}
PLANS = {
    "params": local_opt.constant(2, total_steps=13),
    "mu": local_opt.constant(3, total_steps=13, offset=1),
    "nu": local_opt.SyncPlan([0, 5], 13),
}
ROUNDS = local_opt.local_rounds(
    optax.adam(0.05, b1=0.8, b2=0.9), axis_name="worker", opt_state={"mu": "mean", "nu": "mean"}
)
STEP = jax.jit(vmap(square_step(ROUNDS)))
SYNC = jax.jit(
    lambda x, s, parts: vmap(lambda x, s: ROUNDS.sync(x, s, parts=parts))(x, s), static_argnums=2
)


def run(plans, begin=0, stop=13, params=None, state=None):
    """([3, steps, W, 6] of x, u and v, parameters, state)."""
    if params is None:
        params = copies(START)
        state = jax.jit(jax.vmap(ROUNDS.init))(params)
    history = []
    for t in range(begin, stop):
        params, state = STEP(params, state, MATRICES, TARGETS[t])
        if parts := tuple(name for name, plan in plans.items() if plan.syncs_after(t)):
            params, state = SYNC(params, state, parts)
        adam = state.inner[0]
        history.append([flat(x) for x in (params, adam.mu, adam.nu)])
    return np.array(history).swapaxes(0, 1), params, state


def test_fields_by_plans_of_their_own_equal_des_loc():
    found, _, state = run(PLANS)
    ends = {FIELDS[name]: set(plan.ends.tolist()) for name, plan in PLANS.items()}
    expected = reference.des_loc(flat(START), square_gradient, ends, 0.05, (0.8, 0.9))
    for mine, theirs in zip(found, expected, strict=True):
        assert distance(mine, theirs) < 1e-5  # Adam divides: roundings of float32 grow
    together = {name: ends["x"] for name in "xuv"}
    other = reference.des_loc(flat(START), square_gradient, together, 0.05, (0.8, 0.9))
    assert distance(other, expected) > 1e-3
    assert state.since.tolist() == [0] * W


def test_fields_resume_between_their_syncs_bitwise():
    whole, params, state = run(PLANS)
    head, *kept = run(PLANS, stop=6)
    tail, *after = run(PLANS, 6, 13, *jax.tree.map(np.asarray, tuple(kept)))
    np.testing.assert_array_equal(np.concatenate([head, tail], axis=1), whole)
    assert_bitwise_equal(tuple(after), (params, state))


def test_all_parts_at_once_are_a_sync():
    params = copies(START)
    state = jax.jit(jax.vmap(ROUNDS.init))(params)
    params, state = STEP(params, state, MATRICES, TARGETS[0])
    everything = jax.jit(vmap(ROUNDS.sync))(params, state)
    assert_bitwise_equal(SYNC(params, state, ("params", "mu", "nu")), everything)
    assert_bitwise_equal(SYNC(params, state, ()), (params, state))


def des_loc_plans(period, total_steps):
    return {
        name: local_opt.constant(factor * period, total_steps=total_steps)
        for name, factor in (("params", 1), ("mu", 3), ("nu", 6))
    }


def test_published_ratios_of_communication():
    """K_u = 3 K_x, K_v = 6 K_x: half of Local Adam; with K_x = 256 a 170th of every step's."""
    size, cost = 10**9, {"num_workers": 4, "step_seconds": 1.0, "gigabits_per_second": 100}
    sizes, steps = dict.fromkeys(FIELDS, size), 6 * 256 * 4
    plans = des_loc_plans(256, steps)
    found = local_opt.forecast(plans, num_params=sizes, **cost).sent_bytes
    local_adam = dict.fromkeys(FIELDS, plans["params"])
    assert local_opt.forecast(local_adam, num_params=sizes, **cost).sent_bytes == 2 * found
    parallel = local_opt.forecast(local_opt.every_step(steps), num_params=size, **cost).sent_bytes
    assert parallel / found == pytest.approx(256 / 1.5) and int(parallel / found) == 170


def test_one_part_without_delay_costs_what_a_plan_costs():
    plan, size = local_opt.constant(4, total_steps=10), 10**9
    cost = dict(num_workers=4, step_seconds=0.5, gigabits_per_second=32, latency_seconds=0.25)
    alone = local_opt.forecast(plan, num_params=size, **cost)
    assert local_opt.forecast({"0": plan}, num_params={"0": size}, **cost) == alone
    assert alone.hidden_seconds == 0 and alone.total_seconds == 5.0 + 3 * 1.75


def test_delayed_fragments_hide_what_fits_by_hand():
    """Two fragments of 1 GB, 1 s each at 8 Gb/s, sent after 2, 4, 6 and 8 of 10 steps of 0.25 s.

    Two steps hide half a second of each; the next start then finds the link free. At the end both
    are sent, one after the other, and waited for.
    """
    plans = {str(f): local_opt.constant(4, total_steps=10, offset=2 + 2 * f) for f in range(2)}
    cost = dict(num_workers=2, step_seconds=0.25, delay=2)
    cost |= {"num_params": {"0": 250_000_000, "1": 250_000_000}}
    found = local_opt.forecast(plans, gigabits_per_second=8, **cost)
    assert found.sent_bytes == 6e9 and found.rounds == 6 and found.volume == 6 / 20
    assert (found.hidden_seconds, found.communication_seconds) == (4 * 0.5, 6)
    assert found.total_seconds == 2.5 + 4 * 0.5 + 2
    assert found.peak_bytes_per_second == 2 * 1e9 / 0.5  # at the end; one at a time before
    fast = local_opt.forecast(plans, gigabits_per_second=16, **cost)
    assert (fast.hidden_seconds, fast.communication_seconds) == (2.0, 3.0)


def test_parts_are_priced_by_their_wires():
    plans = dict.fromkeys("ab", local_opt.constant(2, total_steps=4))
    cost = dict(num_params={"a": 2**20, "b": 1000}, num_workers=4, step_seconds=1.0)
    cost |= {"gigabits_per_second": 1}
    found = local_opt.forecast(plans, wire={"a": WIRES["int4"]}, **cost)
    expected = local_opt.sync_bytes(2**20, num_workers=4, wire=WIRES["int4"]) + 6000
    assert found.sent_bytes == 2 * expected and found.volume == 0.5
    every = local_opt.forecast(plans, wire=WIRES["int4"], **cost)
    small = local_opt.sync_bytes(1000, num_workers=4, wire=WIRES["int4"])
    assert every.sent_bytes == 2 * (expected - 6000 + small)
    alone = local_opt.forecast(plans, **cost | {"num_workers": 1}, latency_seconds=1)
    assert alone.sent_bytes == alone.communication_seconds == alone.peak_bytes_per_second == 0


def price(plans=PLANS, sizes=None, **options):
    sizes = sizes or dict.fromkeys(FIELDS, 6)
    cost = dict(num_workers=2, step_seconds=1.0, gigabits_per_second=1) | options
    return local_opt.forecast(plans, num_params=sizes, **cost)


def sync_parts(parts):
    state = ROUNDS.init(START)
    return ROUNDS.sync(START, state, parts=parts)


test_bad_parts_are_refused = refuses({
    "parts": (lambda: sync_parts(("nus",)), r"parts has \['nus'\].* use some of \['params', 'mu'"),
    "sizes": (lambda: price(sizes={"x": 3}), r"num_params are of \['x'\].* plans of \['params'"),
})  # fmt: skip
