"""Every rule, optimizer, outer step and correction, on one problem: the plain loop's numbers.

A row is what is run and what the plain loop does in its place. Fragments are in test_streaming.py,
compressors in test_compressors.py, optimizers of optax in test_wrappers.py.
"""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from local_opt import presets
from tests.cases import mostly_slow
from tests.plain_loop import (
    EVERYTHING,
    Controlled,
    Mean,
    Outer,
    Scaffold,
    each,
    ends,
    plain_loop,
    scaffold_step,
)
from tests.problems import (
    MATRICES,
    MOMENTUM,
    NESTEROV,
    PLAN,
    RATE,
    RUNS,
    SGD,
    START,
    TARGETS,
    W,
    assert_bitwise_equal,
    assert_workers_bitwise_equal,
    copies,
    distance,
    flat,
    of_one,
    plain_sgd,
    run_all,
    square_gradient,
    square_loss,
    square_step,
    vmap,
)

T = PLAN.total_steps
X, ZERO = flat(START).astype(np.float64), np.zeros(6)
FALL = optax.linear_schedule(RATE, 0.1 * RATE, T - 1)
RATES = np.array([float(FALL(t)) for t in range(T)])
ALWAYS = local_opt.constant(1, total_steps=T)
PLAIN = optax.sgd(RATE)
rounds = functools.partial(local_opt.local_rounds, axis_name="worker")
planned = functools.partial(local_opt.local_steps, plan=PLAN, axis_name="worker")


# Steps of one worker, on six numbers.

plain = plain_sgd()


def momentum(w, t, x, v):
    v = MOMENTUM * v + square_gradient(w, t, x)
    return x - RATE * v, v


def clipped(w, t, x, v):
    gradient = square_gradient(w, t, x)
    v = MOMENTUM * v + gradient * min(1.0, 1 / np.linalg.norm(gradient))
    return x - RATE * v, v


def falling(w, t, x, state):
    return x - RATES[t] * square_gradient(w, t, x), state


def pulled(w, t, x, anchor):
    return x - RATE * (square_gradient(w, t, x) + 1.5 * (x - anchor)), anchor


def accumulated(w, t, x, state):
    return x, state + [square_gradient(w, t, x)]


def adam(w, t, x, state):
    g = square_gradient(w, t, x)
    u, v = 0.8 * state["u"] + 0.2 * g, 0.9 * state["v"] + 0.1 * g**2
    moved = u / (1 - 0.8 ** (t + 1)) / (np.sqrt(v / (1 - 0.9 ** (t + 1))) + 1e-8)
    return x - RATE * moved, {"u": u, "v": v}


def by_optax(inner):
    """A step of optax itself, in float64."""

    @jax.jit
    def step(params, state, *example):
        updates, state = inner.update(jax.grad(square_loss)(params, *example), state, params)
        return optax.apply_updates(params, updates), state

    def one(w, t, params, state):
        with jax.enable_x64(True):
            params = each(jnp.asarray, params)
            state = inner.init(params) if state is None else state
            examples = (np.float64(a) for a in (MATRICES[w], TARGETS[t, w]))
            params, state = step(params, state, *examples)
            return each(np.asarray, params), state

    return one


# Syncs that are no means.


def anchored(t, params, states):
    params, _ = EVERYTHING(t, params, states)
    return params, params


def one_step(t, params, states, weights=None):
    """Of momentum, with the mean of the round's gradients: a state is a velocity, and these."""
    means = [np.mean(gradients, axis=0) for _, *gradients in states]
    v = MOMENTUM * states[0][0] + np.average(means, axis=0, weights=weights and weights[t])
    return [params[0] - RATE * v] * len(params), [[v]] * len(params)


def begun_anew(t, params, states):
    """With z as it is at first, the parameters."""
    params, _ = EVERYTHING(t, params, states)
    return params, [state._replace(z=params[0]) for state in states]


def of_fields(plans):
    """Means of x, u and v, each by its plan."""
    due = {t: {name for name, plan in plans.items() if plan.syncs_after(t)} for t in range(T)}
    return {
        t: Mean(params=None if "x" in some else set(), state=some)
        for t, some in due.items()
        if some
    }


class Row(NamedTuple):
    """What is run, and what the plain loop does.

    Attributes:
      made: the transformation or the rounds.
      step, state, syncs: of the plain loop, whose first parameters are START or, flat, X.
      more: [T, W] or [T], extra arguments of every step.
      error: the distance that is allowed: 13 steps of float32 (6e-8) against float64.
      start: X, or a tree.
      targets, workers: of the problem.
    """

    made: Any
    step: Callable
    state: Any
    syncs: Callable | dict
    more: dict = {}
    error: float = 1e-6
    start: Any = X
    targets: np.ndarray = TARGETS
    workers: int = W


def outer(*args, **options):
    return lambda: ends(PLAN, Outer(X, *args, **options))


def preset(make, inner, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that five rounds are few
        return make(inner, PLAN, **options)


def per(h_base):
    return lambda t, period: period / h_base


def weighed(weights):
    return {t: Mean(weights=weights[t]) for t in ends(PLAN)}


def controlled(weights=None):
    return lambda: ends(PLAN, Scaffold(X, weights))


MUON = optax.contrib.muon(
    0.1, beta=0.9, nesterov=False, adam_b2=0.99, weight_decay=0.1, adam_weight_decay=0.1
)
FREE = optax.contrib.schedule_free_sgd(RATE)
WEIGHTS = np.float32([[1, 2, 3, 4], [0, 1, 1, 5], [2, 0, 0, 0], [1, 1, 0, 1e4], [0.1, 3, 1e-3, 2]])
WEIGHTS = np.repeat(WEIGHTS, PLAN.periods, axis=0)
FIELDS = {
    "x": local_opt.constant(2, total_steps=T),
    "u": local_opt.constant(3, total_steps=T, offset=1),
    "v": local_opt.SyncPlan([0, 5], T),
}
OK = np.random.default_rng(11).random((T, W)) > 0.3
OK[[0, 2, T - 1], [1, 2, 3]] = False  # the first step, and steps that end rounds
OK[3:6, 0], OK[9] = False, True  # a whole round; and none skips this sync
NAN = np.where(OK[..., None], TARGETS[:T], np.nan)


def skipping(w, t, x, v):
    return momentum(w, t, x, v) if OK[t, w] else (x, v)


def skips(inner, **options):
    return Row(planned(inner), skipping, ZERO, ends(PLAN), **options)


DES_LOC = {"des_loc": {}, "des_loc, steps": {"step": np.arange(T)}}
HEAVY = optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(1.0, momentum=0.6))
SLOW = {"learning_rate": 0.8, "momentum": 0.7}
DILOCO = {"learning_rate": 0.6, "momentum": 0.8}
SCAFFOLD = {"correction": local_opt.corrections.scaffold()}
CONTROLS = scaffold_step(square_gradient, lambda w, t: RATES[t]), Controlled(ZERO, ZERO)
SLOWMO = functools.partial(Outer, X, 0.8, 0.7, nesterov=False)
ROWS = {
    "clipped": Row(
        optax.chain(
            optax.clip_by_global_norm(1.0), local_opt.local_steps(SGD, PLAN, axis_name=None)
        ),
        clipped, ZERO, ends(PLAN)),
    "rounds": Row(rounds(SGD), momentum, ZERO, ends(PLAN)),
    "planned, weights": Row(planned(SGD), momentum, ZERO, weighed(WEIGHTS), {"weight": WEIGHTS}),
    "rounds, weights": Row(rounds(SGD), momentum, ZERO, weighed(WEIGHTS), {"weight": WEIGHTS}),
    "parallel": Row(local_opt.parallel_rounds(SGD), momentum, ZERO, ends(ALWAYS)),
    "parallel, weights": Row(
        local_opt.parallel_rounds(SGD), momentum, ZERO,
        {t: Mean(weights=WEIGHTS[t], state=None) for t in range(T)}, {"weight": WEIGHTS}),
    "planned, always": Row(local_opt.local_steps(SGD, ALWAYS), momentum, ZERO, ends(ALWAYS)),
    "accumulated": Row(
        local_opt.accumulated_rounds(SGD), accumulated, [ZERO], ends(PLAN, one_step)),
    "accumulated, weights": Row(
        local_opt.accumulated_rounds(SGD), accumulated, [ZERO],
        ends(PLAN, functools.partial(one_step, weights=[*WEIGHTS])), {"weight": WEIGHTS}),
    "scaffold, rounds": Row(
        rounds(optax.sgd(FALL), **SCAFFOLD), *CONTROLS, controlled(), {"rate": RATES}, 2e-6),
    "scaffold, planned": Row(
        planned(optax.sgd(FALL), **SCAFFOLD), *CONTROLS, controlled(), {"rate": RATES}, 2e-6),
    "scaffold, no rate": Row(
        rounds(PLAIN, **SCAFFOLD), scaffold_step(square_gradient, lambda w, t: RATE),
        CONTROLS[1], controlled(), error=2e-6),
    "fedprox": Row(
        rounds(PLAIN, correction=local_opt.corrections.fedprox(1.5)),
        pulled, X, ends(PLAN, anchored)),
    "fedprox of 0": Row(
        rounds(PLAIN, correction=local_opt.corrections.fedprox(0.0)), plain, (), ends(PLAN)),
    "diloco": Row(
        preset(presets.diloco, PLAIN, **DILOCO), plain, (), outer(0.6, 0.8), error=2e-6),
    "muloco": Row(
        preset(presets.diloco, MUON, learning_rate=0.7, momentum=0.6), by_optax(MUON), None,
        lambda: ends(PLAN, Outer(START, 0.7, 0.6)), error=1e-5, start=START),
    "slowmo": Row(
        preset(presets.slowmo, optax.sgd(FALL), inner_rate=FALL, **SLOW), falling, (),
        lambda: ends(PLAN, SLOWMO(scale=lambda t, period: RATES[t])), error=2e-6),
    "slowmo, one rate": Row(
        preset(presets.slowmo, PLAIN, **SLOW), plain, (), lambda: ends(PLAN, SLOWMO()), error=2e-6),
    "heavy ball by period": Row(
        planned(PLAIN, outer=presets.normalize_by_period(HEAVY, h_base=3)), plain, (),
        outer(1.0, 0.6, nesterov=False, scale=per(3)), error=2e-6),
    "chained by period": Row(
        planned(PLAIN, outer=optax.chain(
            optax.identity(), presets.normalize_by_period(NESTEROV, h_base=2))),
        plain, (), outer(0.7, 0.9, scale=per(2)), error=2e-6),
    **{name: Row(
        local_opt.local_steps(
            optax.adam(RATE, b1=0.8, b2=0.9), FIELDS["x"],
            sync_opt_state={"mu": FIELDS["u"], "nu": FIELDS["v"]}),
        adam, {"u": ZERO, "v": ZERO}, of_fields(FIELDS), more, error=1e-5)
       for name, more in DES_LOC.items()},
    "reset": Row(
        planned(FREE, sync_opt_state={"z": "reset"}), by_optax(FREE), None,
        ends(PLAN, begun_anew), error=2e-6, start=START),
    "snoo": Row(
        planned(PLAIN, axis_name=(), outer=optax.sgd(0.6, 0.8, nesterov=True)),
        plain, (), outer(0.6, 0.8), error=2e-6, workers=1),
    "one worker": Row(
        planned(PLAIN, axis_name=(), outer=optax.sgd(1.0)), plain, (), {}, workers=1),
    "apply_if_finite": skips(optax.apply_if_finite(SGD, 1000), targets=NAN),
    "skip_not_finite": skips(
        optax.MultiSteps(SGD, 1, should_skip_update_fn=optax.skip_not_finite), targets=NAN),
    "a condition": skips(
        optax.conditionally_mask(SGD, lambda step, *, ok: ok, forward_extra_args=True),
        more={"ok": OK}),
}  # fmt: skip


@functools.cache
def expected(name):
    """[T, W, 6], and the last states."""
    row = ROWS[name]
    syncs = row.syncs() if callable(row.syncs) else row.syncs
    steps = list(plain_loop(row.step, row.start, [row.state] * row.workers, T, syncs))
    params = [[x if row.start is X else flat(x) for x in params] for params, _ in steps]
    return np.array(params), steps[-1][1]


@functools.cache
def actual(name, run):
    row = ROWS[name]
    how = {"targets": row.targets, "workers": row.workers}
    return run_all(row.made, RUN[run], PLAN, **how, **row.more)


def check_ends(name, history):
    """To the bit in what a sync overwrites, and else to the rounding of x + (mean - x)."""
    plan, exact = PLANS.get(name, PLAN), isinstance(ROWS[name].made, local_opt.Rounds)
    for x in history[[t for t in range(T) if plan.syncs_after(t)]]:
        assert np.abs(x - x[:1]).max() <= (0 if exact else np.spacing(np.abs(x).max()))


PMAP = functools.partial(jax.pmap, axis_name="batch", devices=jax.devices()[:W])
RUN = RUNS | {"pmap": PMAP, "alone": of_one}
PLANS = {
    "parallel": ALWAYS,
    "parallel, weights": ALWAYS,
    "planned, always": ALWAYS,
} | dict.fromkeys(DES_LOC, FIELDS["x"])
CASES = [(name, run) for name in ROWS for run in RUNS if ROWS[name].workers == W]
CASES += [("clipped", "pmap"), ("snoo", "alone"), ("one worker", "alone")]
# Every row in one way, in turns, and two rows in all.
QUICK = [case for i, case in enumerate(CASES) if case[1] not in RUNS or i % 3 == i // 3 % 3]


@pytest.mark.parametrize("name,run", mostly_slow(CASES, quick=QUICK))
def test_a_row_is_the_plain_loop(name, run):
    (history, state), (right, _) = actual(name, run), expected(name)
    assert distance(history, right) < ROWS[name].error
    check_ends(name, history)
    for of in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "num_syncs")):
        if hasattr(of, "num_syncs"):
            assert of.num_steps.tolist() == [T] * len(of.num_steps)
            assert of.num_syncs.tolist() == [PLANS.get(name, PLAN).rounds] * len(of.num_steps)


def test_no_row_would_pass_as_another():
    """But one that is the same method."""
    same = {"planned, weights": "rounds, weights", "parallel": "planned, always"}
    same |= {"scaffold, rounds": "scaffold, planned", "des_loc": "des_loc, steps"}
    same |= dict.fromkeys(("skip_not_finite", "a condition"), "apply_if_finite")
    others = [name for name in ROWS if name not in same and ROWS[name].workers == W]
    for name, other in itertools.combinations(others, 2):
        assert distance(expected(name)[0], expected(other)[0]) > 1e-3, (name, other)


def test_states_are_those_of_the_plain_loop():
    (_, state), (_, right) = actual("scaffold, rounds", "vmap"), expected("scaffold, rounds")
    variate = flat(state.correction.variate)
    assert distance(variate, [s.common - s.control for s in right]) < 1e-4  # differences over rates
    assert np.abs(variate.sum(axis=0)).max() < 1e-4 * np.abs(variate).max()
    assert state.correction.rates.tolist() == state.since.tolist() == [0] * W
    (_, state), (_, right) = actual("des_loc", "vmap"), expected("des_loc")
    for mine, field in zip(state.rounds.inner[0][1:], "uv", strict=True):
        assert distance(flat(mine), [s[field] for s in right]) < 1e-5
    assert actual("slowmo", "vmap")[1].rounds.outer.count.tolist() == [T] * W
    assert_workers_bitwise_equal(actual("accumulated", "vmap")[1])


@pytest.mark.parametrize("more", [{}, {"outer": NESTEROV}], ids=["mean", "outer"])
def test_the_drift_of_a_sync_is_that_from_their_mean(more):
    rounds = local_opt.local_rounds(SGD, drift=True, **more)
    _, state = run_all(rounds, plan=local_opt.constant(T, total_steps=T))
    before = list(plain_loop(momentum, X, [ZERO] * W, T, {}))
    x = np.array(before[-1][0])
    drift = np.linalg.norm(x - x.mean(axis=0), axis=1) / np.linalg.norm(x.mean(axis=0))
    np.testing.assert_allclose(rounds.drift(state), drift, rtol=1e-4)  # of float32 numbers


def test_diloco_has_the_numbers_of_its_paper_and_the_options_of_local_steps():
    options = {"axis_name": "worker", "sync_opt_state": "reset"}
    made = preset(presets.diloco, SGD, **options), planned(SGD, outer=NESTEROV, **options)
    assert_bitwise_equal(*map(run_all, made))


def test_a_select_around_the_update_loses_one_sync_of_one_worker():
    """The usual select of loss scaling, which tells the step and that it does not count."""
    opt = local_opt.local_steps(SGD, PLAN)

    @jax.jit
    @vmap
    def step(x, state, matrix, target, ok, t):
        new = square_step(opt, step=t, weight=ok)(x, state, matrix, target)
        return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, (x, state))

    x = copies(START)
    state, results = jax.vmap(opt.init)(x), []
    for t in range(T):
        x, state = step(x, state, MATRICES, NAN[t], OK[t], jnp.full(W, t))
        results.append(flat(x))
    assert np.isfinite(results).all()
    with pytest.raises(ValueError, match="roundings are allowed"):
        local_opt.check_synced(results[2])
    local_opt.check_synced(results[2][OK[2]])
    local_opt.check_synced(results[9])
