"""Corrections of local drift equal their papers, remove the bias of local steps, send nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from tests import reference
from tests.problems import (
    PLAN,
    RATE,
    RUNS,
    START,
    W,
    assert_workers_bitwise_equal,
    distance,
    flat,
    run_rounds,
    run_squares,
    square_gradient,
)

RATES = RATE * np.linspace(1, 0.3, 13)


def corrected(correction, inner=None, **options):
    inner = inner or optax.sgd(RATE)
    return local_opt.local_rounds(inner, axis_name="worker", correction=correction, **options)


def at_rates(opt):
    """An optimizer whose steps are told their rates, by its own count of them."""

    def update(grads, state, params):
        rate = jnp.asarray(RATES, jnp.float32)[optax.tree.get(state, "count")]
        return opt.update(grads, state, params, rate=rate)

    return opt._replace(update=update)


@pytest.mark.parametrize("run", ["rounds", "planned"])
def test_control_variates_equal_the_paper_line_by_line(run):
    inner = optax.sgd(lambda count: jnp.asarray(RATES, jnp.float32)[count])
    given = dict(axis_name="worker", correction=local_opt.corrections.scaffold())
    if run == "rounds":
        actual, state = run_rounds(at_rates(local_opt.local_rounds(inner, **given)), PLAN)
        local = state.correction
    else:
        actual, state = run_squares(at_rates(local_opt.local_steps(inner, PLAN, **given)))
        local = state.rounds.correction
    expected, controls = reference.scaffold(flat(START), square_gradient, PLAN.periods, RATES)
    # float32 against float64; differences of parameters over the round's rates lose some digits.
    assert distance(actual, expected) < 2e-6
    theirs, mean = controls[-1]
    assert distance(flat(local.variate), mean - theirs) < 1e-4
    assert np.abs(flat(local.variate).sum(axis=0)).max() < 1e-4 * np.abs(flat(local.variate)).max()
    assert local.rates.tolist() == [0] * W


def test_without_a_rate_the_correction_is_in_units_of_updates():
    """The same for a constant rate."""
    rounds = corrected(local_opt.corrections.scaffold())
    alone, _ = run_rounds(rounds, PLAN)
    text = functools.partial(rounds.update, rate=RATE)
    assert distance(alone, run_rounds(rounds._replace(update=text), PLAN)[0]) < 1e-6


def test_the_proximal_term_equals_the_paper():
    actual, _ = run_rounds(corrected(local_opt.corrections.fedprox(1.5)), PLAN)
    expected = reference.fedprox(flat(START), square_gradient, PLAN.periods, RATE, 1.5)
    assert distance(actual, expected) < 1e-6
    plain, _ = run_rounds(corrected(None), PLAN)
    assert distance(plain, expected) > 1e-2
    same, _ = run_rounds(corrected(local_opt.corrections.fedprox(0.0)), PLAN)
    assert distance(same, plain) < 2e-7  # a mean of changes, which rounds otherwise


# Workers that take different numbers of steps in a round.

SHAPES, MIDDLES = np.array([1.0, 2.0, 4.0]), np.array([3.0, -1.0, 0.5])
EQUAL = np.full(3, 0.05)
RUN = {"vmap": RUNS["vmap"], "mesh": functools.partial(RUNS["shard_map"], workers=3)}


def gradient(worker, step, x):
    return SHAPES[worker] * (x - MIDDLES[worker])


gradient.workers = 3


def uneven(steps, rates, weights, run="vmap", inner=None, **options):
    """x [R] and c - c_i [R, 3] after every round, by `scaffold`."""
    rounds = corrected(local_opt.corrections.scaffold(), inner or optax.sgd(1.0), **options)

    def one(x, state, curvature, centre, count, rate, weight):
        def step(k, carry):
            x, state = carry
            grads = rate * curvature * (x - centre)
            updates, new = rounds.update(grads, state, x, rate=rate)
            return jax.tree.map(lambda a, b: jnp.where(k < count, a, b), (x + updates, new), carry)

        return rounds.sync(*jax.lax.fori_loop(0, 8, step, (x, state)), weight=weight)

    one, x, results = jax.jit(RUN[run](one)), jnp.zeros(3), []
    state = jax.vmap(rounds.init)(x)
    for count, weight in zip(steps, weights, strict=True):
        problem = (np.float32(a) for a in (SHAPES, MIDDLES, count, rates, weight))
        x, state = one(x, state, *problem)
        assert_workers_bitwise_equal(x)
        results.append((x[0], state.correction.variate))
    return [np.array(part) for part in zip(*results, strict=True)]


UNEVEN, TURNS = [[6, 3, 1]], [[6, 3, 1], [2, 2, 2], [1, 5, 8]]
CASES = {  # steps in turns, rates, weights, where it ends
    "uneven": (UNEVEN, EQUAL, [1, 1, 1], 3 / 7),
    "in turns": (TURNS, EQUAL, [1, 1, 1], 3 / 7),
    "weights": (UNEVEN, EQUAL, [1, 2, 5], 9 / 25),
    "weights in turns": (TURNS, EQUAL, [0.1, 3, 1], (0.3 - 6 + 2) / 10.1),
    "rates": ([[4, 4, 4]], np.array([0.02, 0.05, 0.03]), [1, 1, 1], 3 / 7),
    "one rests": ([[6, 0, 1], [2, 3, 4]], EQUAL, [1, 1, 1], None),
}


@pytest.mark.parametrize(
    "case,run", [*((case, "vmap") for case in CASES), ("weights in turns", "mesh")]
)
def test_control_variates_equal_the_paper_where_workers_took_other_steps(case, run):
    turns, rates, weights, end = CASES[case]
    steps = np.array([turns[r % len(turns)] for r in range(90)])
    weights = np.array([weights] * 90, float)
    actual, by_hand = uneven(steps, rates, weights, run)
    ends = np.cumsum(steps.max(axis=1))
    rates = np.stack([rates] * ends[-1])
    expected, controls = reference.scaffold([0.0], gradient, steps, rates, weights)
    np.testing.assert_allclose(actual, expected[ends - 1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(by_hand, [(c - each)[:, 0] for each, c in controls], atol=1e-5)
    np.testing.assert_allclose((weights * by_hand).sum(axis=1), 0, atol=1e-4)
    if end is not None:  # the minimum of the weighted mean loss
        np.testing.assert_allclose(actual[-1], end, atol=1e-5)


def test_a_worker_that_does_not_count_keeps_its_control_whatever_steps_it_took():
    steps = np.array([[6, 3, 1]] * 3)
    weights = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]])
    _, by_hand = uneven(steps, EQUAL, weights)
    assert by_hand[1, 1] == by_hand[0, 1] != by_hand[2, 1]
    np.testing.assert_allclose(by_hand.sum(axis=1), 0, atol=1e-5)


@pytest.mark.parametrize(
    "inner,options",
    [
        (optax.sgd(1.0, momentum=0.9), {}),
        (optax.sgd(1.0), {"outer": optax.sgd(0.7, momentum=0.5, nesterov=True)}),
    ],
    ids=["momentum", "outer"],
)
def test_control_variates_compose_with_momentum_and_an_outer_optimizer(inner, options):
    """They end where the gradient of the mean loss is zero, and rounds of eight steps do not."""
    steps, rates = np.full((400, 3), 8), np.full(3, 0.01)
    result, _ = uneven(steps, rates, np.ones((400, 3)), inner=inner, **options)
    np.testing.assert_allclose(result[-1], 3 / 7, atol=2e-4)
    left = (1 - rates * SHAPES) ** 8
    assert abs(((1 - left) * MIDDLES).sum() / (1 - left).sum() - 3 / 7) > 0.01
