"""Workers that take different numbers of steps in a round: one sync, and the same for all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from local_opt import WIRES
from tests.problems import RUNS, assert_workers_bitwise_equal, copies

CURVATURES, CENTRES = np.array([1.0, 2.0, 4.0]), np.array([3.0, -1.0, 0.5])
RATES = np.full(3, 0.05)
RUN = {"vmap": RUNS["vmap"], "mesh": functools.partial(RUNS["shard_map"], workers=3)}


def scaffold(steps, rates, weights):
    """x [R] and c - c_i [R, 3] after every round: Karimireddy et al. 2020, algorithm 1, option II.

    steps, weights [R, 3]: of every worker in every round. The change of c is that of the workers
    that took a step, and the others' c_i follow it.
    """
    x, c, own, found = 0.0, 0.0, np.zeros(3), []
    for count, weight in zip(steps, weights, strict=True):
        y = np.full(3, x)
        for i in range(3):
            for _ in range(count[i]):
                y[i] -= rates[i] * (CURVATURES[i] * (y[i] - CENTRES[i]) - own[i] + c)
        plus = own - c + (x - y) / np.maximum(count, 1) / rates
        share, taken = weight / weight.sum(), weight * (count > 0) / (weight @ (count > 0))
        change = taken @ (plus - own)
        own = np.where(count > 0, plus, own + change)
        x, c = x + share @ (y - x), c + change
        found.append((x, c - own))
    return [np.array(part) for part in zip(*found, strict=True)]


def corrected(steps, rates, weights, run):
    """The same by `control_variates`."""
    rounds = local_opt.local_rounds(optax.sgd(1.0), correction=local_opt.control_variates())

    def one(x, state, curvature, centre, count, rate, weight):
        def step(k, carry):
            x, state = carry
            grads = rate * curvature * (x - centre)
            updates, new = rounds.update(grads, state, x, rate=rate)
            return jax.tree.map(lambda a, b: jnp.where(k < count, a, b), (x + updates, new), carry)

        return rounds.sync(*jax.lax.fori_loop(0, 8, step, (x, state)), weight=weight)

    one, x, found = jax.jit(RUN[run](one)), jnp.zeros(3), []
    state = jax.vmap(rounds.init)(x)
    for count, weight in zip(steps, weights, strict=True):
        problem = (np.float32(a) for a in (CURVATURES, CENTRES, count, rates, weight))
        x, state = one(x, state, *problem)
        assert_workers_bitwise_equal(x)
        found.append((x[0], state.correction.against))
    return [np.array(part) for part in zip(*found, strict=True)]


UNEVEN, TURNS = [[6, 3, 1]], [[6, 3, 1], [2, 2, 2], [1, 5, 8]]
CASES = {  # steps in turns, rates, weights, where it ends
    "uneven": (UNEVEN, RATES, [1, 1, 1], 3 / 7),
    "in turns": (TURNS, RATES, [1, 1, 1], 3 / 7),
    "weights": (UNEVEN, RATES, [1, 2, 5], 9 / 25),
    "weights in turns": (TURNS, RATES, [0.1, 3, 1], (0.3 - 6 + 2) / 10.1),
    "rates": ([[4, 4, 4]], np.array([0.02, 0.05, 0.03]), [1, 1, 1], 3 / 7),
    "one rests": ([[6, 0, 1], [2, 3, 4]], RATES, [1, 1, 1], None),
}


@pytest.mark.parametrize("run", RUN)
@pytest.mark.parametrize("turns,rates,weights,end", CASES.values(), ids=CASES)
def test_control_variates_equal_the_paper_where_workers_took_other_steps(
    turns, rates, weights, end, run
):
    steps = np.array([turns[r % len(turns)] for r in range(90)])
    weights = np.array([weights] * 90, float)
    found, against = corrected(steps, rates, weights, run)
    expected, controls = scaffold(steps, rates, weights)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(against, controls, atol=1e-5)
    np.testing.assert_allclose((weights * against).sum(axis=1), 0, atol=1e-4)
    if end is not None:  # the minimum of the weighted mean loss
        np.testing.assert_allclose(found[-1], end, atol=1e-5)


def test_a_worker_that_does_not_count_keeps_its_control_whatever_steps_it_took():
    steps = np.array([[6, 3, 1]] * 3)
    weights = np.array([[1, 1, 1], [1, 0, 1], [1, 1, 1]])
    _, against = corrected(steps, RATES, weights, "vmap")
    assert against[1, 1] == against[0, 1] != against[2, 1]
    np.testing.assert_allclose(against.sum(axis=1), 0, atol=1e-5)


# The outer optimizer gets one round length, of all workers.

STEPS, WEIGHTS = np.array([4, 2, 3, 7]), np.float32([1, 5, 2, 0])
BASE = 4
OUTER = local_opt.normalize_by_period(optax.chain(optax.trace(0.5), optax.scale(-0.7)), h_base=BASE)


def means_of(changes, steps, weights):
    """Where the outer optimizer goes in two rounds of the same changes [4], by its definition."""
    share = weights / weights.sum()
    length = share @ steps / BASE
    x = v = 0.0
    for _ in range(2):
        v = 0.5 * v + (-share @ changes) / length
        x -= 0.7 * v * length
    return x


def after_two_rounds(way, run, weights):
    """x of every worker, which moves by its own number of steps of its own size."""
    if way == "streaming":
        stream = local_opt.streaming_rounds(optax.sgd(1.0), fragments=1, mixing=0.0, outer=OUTER)
        rounds = local_opt.Rounds(stream.init, stream.update, None)

        def sync(x, state, **options):
            state = stream.start(x, state, fragment=0, **options)
            return stream.finish(x, state, fragment=0)
    else:
        wire = WIRES["float16"] if way == "wire" else None
        rounds = local_opt.local_rounds(optax.sgd(1.0), outer=OUTER, wire=wire)
        sync = rounds.sync

    def one(x, state, size, count, weight):
        def step(k, carry):
            x, state = carry
            updates, new = rounds.update(-size, state, x)
            return jax.tree.map(lambda a, b: jnp.where(k < count, a, b), (x + updates, new), carry)

        moved = jax.lax.fori_loop(0, 8, step, (x, state))
        return sync(*moved) if weights is None else sync(*moved, weight=weight)

    one, x = jax.jit(RUNS[run](one)), copies(jnp.zeros(()))
    state = jax.vmap(rounds.init)(x)
    for _ in range(2):
        counted = jnp.zeros(4) if weights is None else weights
        x, state = one(x, state, jnp.arange(1.0, 5), jnp.asarray(STEPS), counted)
        assert_workers_bitwise_equal((x, state.outer, state.anchor))
    return x


@pytest.mark.parametrize("run", ["vmap", "shard_map"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("way", ["rounds", "wire", "streaming"])
def test_workers_of_uneven_steps_agree_after_an_outer_step(way, weights, run):
    found = after_two_rounds(way, run, weights)
    changes = STEPS * np.arange(1.0, 5)
    expected = means_of(changes, STEPS, np.ones(4) if weights is None else np.float64(WEIGHTS))
    np.testing.assert_allclose(found, expected, rtol=1e-3 if way == "wire" else 1e-6)
