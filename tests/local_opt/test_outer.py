"""Outer optimizers equal their papers, and methods by name are what they say."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from local_opt import presets
from tests import reference
from tests.problems import (
    PLAN,
    RATE,
    SGD,
    W,
    assert_bitwise_equal,
    assert_workers_bitwise_equal,
    distance,
    run_squares,
    vmap,
)

# Outer optimizers. The gradients do not depend on the parameters, so changes are known.

CHANGES = np.random.default_rng(2).normal(size=(13, W, 3)).astype(np.float32)


def run_outer(outer, plan, run_in_graph=False):
    """Parameters [R, 3] after every sync; the inner optimizer is plain SGD."""
    x = jnp.zeros((W, 3))
    if run_in_graph:
        opt = local_opt.local_steps(optax.sgd(RATE), plan, axis_name="worker", outer=outer)
        step, found = jax.jit(vmap(opt.update)), []
        state = jax.jit(vmap(opt.init))(x)
        for t in range(plan.total_steps):
            updates, state = step(CHANGES[t], state, x)
            x = x + updates
            if plan.syncs_after(t):
                found.append(np.asarray(x))
        return np.stack(found), state.rounds.outer
    rounds = local_opt.local_rounds(optax.sgd(RATE), axis_name="worker", outer=outer)
    update, sync, found = jax.jit(vmap(rounds.update)), jax.jit(vmap(rounds.sync)), []
    state = jax.jit(vmap(rounds.init))(x)
    for start, length in plan.rounds_from(0):
        for t in range(start, start + length):
            updates, state = update(CHANGES[t], state, x)
            x = x + updates
        x, state = sync(x, state)
        assert_workers_bitwise_equal((x, state.anchor, state.outer))
        assert_bitwise_equal(state.anchor, x)
        found.append(np.asarray(x))
    return np.stack(found), state.outer


def expected_outer(plan, rate, momentum, nesterov=False, h_base=None):
    """Parameters [R, 3] after every sync, in float64."""
    mean = RATE * np.asarray(CHANGES, np.float64).mean(axis=1)
    changes = [mean[s : s + h].sum(axis=0) for s, h in plan.rounds_from(0)]
    lengths = plan.periods / h_base if h_base else np.ones(plan.rounds)
    moves = reference.outer_momentum(
        [d / n for d, n in zip(changes, lengths, strict=True)], rate, momentum, nesterov
    )
    return np.cumsum([u * n for u, n in zip(moves, lengths, strict=True)], axis=0)


OUTER = {
    "nesterov": (local_opt.nesterov(), (0.7, 0.9, True)),
    "slow_momentum": (local_opt.slow_momentum(learning_rate=0.8, momentum=0.6), (0.8, 0.6)),
    "plain": (optax.sgd(1.0), (1.0, 0.0)),
    "normalize_by_period": (
        local_opt.normalize_by_period(local_opt.nesterov(), h_base=2),
        (0.7, 0.9, True, 2),
    ),
    "normalize_by_period of a chain": (
        local_opt.normalize_by_period(
            optax.chain(optax.clip_by_global_norm(1e6), local_opt.slow_momentum(momentum=0.6)),
            h_base=3,
        ),
        (1.0, 0.6, False, 3),
    ),
    "chain": (
        optax.chain(
            optax.identity(), local_opt.normalize_by_period(local_opt.nesterov(), h_base=2)
        ),
        (0.7, 0.9, True, 2),
    ),
}


@pytest.mark.parametrize(
    "name,in_graph", [(name, False) for name in OUTER] + [("nesterov", True), ("chain", True)]
)
def test_outer_optimizers_equal_their_papers(name, in_graph):
    outer, settings = OUTER[name]
    found, _ = run_outer(outer, PLAN, in_graph)
    expected = expected_outer(PLAN, *settings)[:, None]
    # float32 sums of 13 numbers, in another order.
    assert distance(found, np.broadcast_to(expected, found.shape)) < 2e-6


def test_normalizing_changes_nothing_for_rounds_of_one_length():
    outer = local_opt.nesterov()
    corrected = (
        local_opt.normalize_by_period(outer, h_base=4),
        local_opt.normalize_by_period(outer, h_base=3),
    )
    states = [o.init(jnp.zeros(3)) for o in (outer, *corrected)]
    for change in jnp.asarray(CHANGES[:4, 0]):
        plain, states[0] = outer.update(change, states[0])
        same, states[1] = corrected[0].update(change, states[1], period=4)
        other, states[2] = corrected[1].update(change, states[2], period=4)
        assert_bitwise_equal(same, plain)
        np.testing.assert_allclose(other, plain, rtol=1e-6)  # it is linear: only roundings


def test_normalized_velocity_does_not_depend_on_the_rounds():
    outer = local_opt.normalize_by_period(local_opt.slow_momentum(momentum=0.5), h_base=4)

    def velocities(periods):
        state, found = outer.init(jnp.zeros(())), []
        for period in periods:  # a change of 1 per step
            _, state = outer.update(jnp.float32(period), state, period=jnp.int32(period))
            found.append(float(state[0].trace))
        return found

    assert velocities([4, 4, 4]) == velocities([2, 8, 16]) == [4.0, 6.0, 7.0]


def test_bad_outer_optimizers():
    for make in (local_opt.nesterov, local_opt.slow_momentum):
        with pytest.raises(ValueError, match="learning_rate is 0: it must be positive"):
            make(learning_rate=0)
        with pytest.raises(ValueError, match=r"momentum is 1.0: it must lie in \[0, 1\)"):
            make(momentum=1.0)
    for h_base in (0, 1.5, True):
        with pytest.raises(ValueError, match=f"h_base is {h_base}: it must be a whole number >= 1"):
            local_opt.normalize_by_period(optax.sgd(1.0), h_base=h_base)


LONG = local_opt.constant(1, total_steps=60)
MAKERS = {
    "diloco": (local_opt.diloco, local_opt.nesterov),
    "slowmo": (local_opt.slowmo, local_opt.slow_momentum),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_method_is_local_steps_with_its_outer_optimizer(name):
    make, outer = MAKERS[name]
    options = {"axis_name": "worker", "opt_state": "reset"}
    momentum = optax.sgd(RATE, momentum=0.9)
    named = make(momentum, LONG, **options)
    plain = local_opt.local_steps(momentum, LONG, outer=outer(), **options)
    assert_bitwise_equal(run_squares(named), run_squares(plain))


def left_after(rounds, share, rate=0.7, momentum=0.9):
    """The error after outer steps each of whose changes is a share of it, from 1; in NumPy."""
    error, velocity = np.ones_like(share), np.zeros_like(share)
    for _ in range(rounds):
        change = share * error
        velocity = momentum * velocity + change
        error = error - rate * (change + momentum * velocity)
    return np.abs(error)


@pytest.mark.parametrize("rounds", [17, 44, 100])
def test_what_momentum_leaves_is_what_the_warning_says(rounds):
    """Over all shares of the way to the optimum that a round may take; averaging leaves less."""
    share = np.linspace(0.01, 1, 100)
    worst = left_after(rounds, share).max()
    assert 0.5 * 0.9 ** (rounds / 2) < worst < 1.05 * 0.9 ** (rounds / 2)
    assert (left_after(rounds, share) > (1 - share) ** rounds).mean() > 0.8


def test_few_rounds_are_told():
    plan = local_opt.constant(30, total_steps=17 * 30)
    with pytest.warns(
        UserWarning, match="diloco has 17 rounds for an outer momentum of 0.9: .* 41% "
    ):
        local_opt.diloco(SGD, plan, axis_name="worker")
    with pytest.warns(UserWarning, match="slowmo has 2 rounds .* at least 7 rounds"):
        local_opt.slowmo(SGD, local_opt.constant(8, total_steps=16), axis_name="worker")
    assert presets.rounds_needed(0.9) == 44 and presets.rounds_needed(0.0) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local_opt.diloco(SGD, local_opt.constant(30, total_steps=44 * 30), axis_name="worker")
        local_opt.diloco(SGD, plan, axis_name="worker", momentum=0.0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="momentum is 1"):
        local_opt.diloco(SGD, LONG, axis_name="worker", momentum=1)
    with pytest.raises(ValueError, match="plan is a int"):
        local_opt.diloco(SGD, 500, axis_name="worker")
