"""Control variates of workers that take different numbers of steps; others are in test_runs.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from tests.plain_loop import Controlled, Scaffold, plain_loop, scaffold_step
from tests.problems import RUNS, assert_workers_bitwise_equal

# Workers that take different numbers of steps in a round.

SHAPES, MIDDLES = np.array([1.0, 2.0, 4.0]), np.array([3.0, -1.0, 0.5])
EQUAL, SGD = np.full(3, 0.05), optax.sgd(1.0)
RUN = {"vmap": RUNS["vmap"], "mesh": functools.partial(RUNS["shard_map"], workers=3)}


def gradient(worker, step, x):
    return SHAPES[worker] * (x - MIDDLES[worker])


@functools.cache
def a_round(run, inner, outer):
    """A compiled round, and its `Rounds`."""
    control = local_opt.corrections.scaffold()
    rounds = local_opt.local_rounds(inner, outer=outer, correction=control)

    def one(x, state, curvature, centre, count, rate, weight):
        def step(k, carry):
            x, state = carry
            grads = rate * curvature * (x - centre)
            updates, new = rounds.update(grads, state, x, rate=rate)
            return jax.tree.map(lambda a, b: jnp.where(k < count, a, b), (x + updates, new), carry)

        return rounds.sync(*jax.lax.fori_loop(0, 8, step, (x, state)), weight=weight)

    return jax.jit(RUN[run](one)), rounds


def uneven(steps, rates, weights, run="vmap", inner=SGD, outer=None):
    """x [R] and c - c_i [R, 3] after every round, by `scaffold`."""
    (one, rounds), x, results = a_round(run, inner, outer), jnp.zeros(3), []
    state = jax.vmap(rounds.init)(x)
    for count, weight in zip(steps, weights, strict=True):
        problem = (np.float32(a) for a in (SHAPES, MIDDLES, count, rates, weight))
        x, state = one(x, state, *problem)
        assert_workers_bitwise_equal(x)
        results.append((x[0], state.correction.variate))
    return [np.array(part) for part in zip(*results, strict=True)]


def expected(steps, rates, weights):
    """The same of the plain loop, in which a worker waits at the end of its round."""
    of_round = np.repeat(np.arange(len(steps)), steps.max(axis=1))
    place = np.concatenate([np.arange(n) for n in steps.max(axis=1)])
    rate_of = lambda w, t: rates[w] * (place[t] < steps[of_round[t], w])  # noqa: E731
    ends = dict(zip(np.cumsum(steps.max(axis=1)) - 1, weights, strict=True))
    zero = np.zeros(1)
    loop = plain_loop(
        scaffold_step(gradient, rate_of),
        zero,
        [Controlled(zero, zero)] * 3,
        len(place),
        dict.fromkeys(ends, Scaffold(zero, ends)),
    )
    after = [each for t, each in enumerate(loop) if t in ends]
    controls = [[(state.common - state.control)[0] for state in states] for _, states in after]
    return np.array([x[0][0] for x, _ in after]), controls


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
    wanted, controls = expected(steps, rates, weights)
    np.testing.assert_allclose(actual, wanted, atol=1e-6)
    np.testing.assert_allclose(by_hand, controls, atol=1e-5)
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
        (SGD, {"outer": optax.sgd(0.7, momentum=0.5, nesterov=True)}),
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
