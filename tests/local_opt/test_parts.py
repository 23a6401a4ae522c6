"""Fields of the state by plans of their own."""

import jax
import numpy as np
import optax

import local_opt
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
