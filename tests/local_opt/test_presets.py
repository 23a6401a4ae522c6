"""Methods by name equal the pseudocode of their papers, over rounds and workers."""

import jax
import numpy as np
import optax
import pytest

import local_opt
from tests import reference
from tests.problems import (
    COMPRESSORS,
    MATRICES,
    NESTEROV,
    PLAN,
    RATE,
    RUNS,
    START,
    TARGETS,
    W,
    assert_bitwise_equal,
    distance,
    ends_of,
    flat,
    run_given,
    run_squares,
    square_gradient,
    square_step,
)

RNG = np.random.default_rng(7)
SGD = optax.sgd(RATE)
pytestmark = pytest.mark.filterwarnings("ignore:.*rounds for an outer momentum")


def of_one(w, t, x):
    return square_gradient(0, t, x)


of_one.workers = 1


def nesterov(gradient, outer):
    """DiLoCo, as Streaming DiLoCo with one fragment that is received when it is sent."""
    ends, rates = [set(ends_of(PLAN))], [RATE] * PLAN.total_steps
    return reference.streaming_diloco(
        flat(START), gradient, [np.arange(6)], ends, rates, delay=0, mixing=0.0, outer=outer
    )


# Pseudocode in NumPy: slow, and meant to be read.


def orthogonal(matrix, steps=5):
    """Muon's Newton-Schulz iteration (Jordan et al. 2024)."""
    flat = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if flat else matrix) / (np.linalg.norm(matrix) + 1e-8)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if flat else x


def muloco_by_hand(params, grads, periods, rate, outer, decay):
    """Algorithm 1 of MuLoCo (Thérien et al. 2025) on {name: array}: every name after each sync.

    grads [T, W] of dicts; outer: (rate, momentum); matrices step by Muon, the others by AdamW.
    """
    workers = len(grads[0])
    anchor = {n: np.array(x, np.float64) for n, x in params.items()}
    velocity = {n: 0.0 for n in params}
    u, v = ([dict.fromkeys(params, 0.0) for _ in range(workers)] for _ in range(2))
    t, history = 0, []
    for h in periods:
        local = [{n: x.copy() for n, x in anchor.items()} for _ in range(workers)]
        for _ in range(h):
            for w in range(workers):
                for n, g in grads[t][w].items():
                    g = np.asarray(g, np.float64)
                    u[w][n] = 0.9 * u[w][n] + 0.1 * g
                    first = u[w][n] / (1 - 0.9 ** (t + 1))
                    if g.ndim == 2:
                        step = orthogonal(first) * max(1, g.shape[1] / g.shape[0]) ** 0.5
                    else:
                        v[w][n] = 0.99 * v[w][n] + 0.01 * g**2
                        step = first / (np.sqrt(v[w][n] / (1 - 0.99 ** (t + 1))) + 1e-8)
                    local[w][n] = local[w][n] - rate * (step + decay * local[w][n])
            t += 1
        for n in params:
            delta = anchor[n] - sum(x[n] for x in local) / workers
            velocity[n] = outer[1] * velocity[n] + outer[0] * delta
            anchor[n] = anchor[n] - outer[1] * velocity[n] - outer[0] * delta
        history.append({n: x.copy() for n, x in anchor.items()})
    return history


def slowmo_by_hand(params, gradient, periods, rates, outer):
    """Algorithm 1 of SlowMo (Wang et al. 2020) over SGD: x [T, W, D] after every step.

    rates: of every step, whose last in a round is gamma; outer: (alpha, beta).
    """
    x = np.array(params, np.float64)
    anchor, u, t, history = x[0].copy(), 0.0, 0, []
    for h in periods:
        for _ in range(h):
            grads = [gradient(w, t, x[w]) for w in range(len(x))]
            x = x - rates[t] * np.stack(grads)
            t += 1
            history.append(x)
        u = outer[1] * u + (anchor - x.mean(axis=0)) / rates[t - 1]
        anchor = anchor - outer[0] * rates[t - 1] * u
        x = np.stack([anchor] * len(x))
        history[-1] = x
    return np.stack(history)


@pytest.mark.parametrize("run", ["vmap", "shard_map"])
def test_diloco_equals_its_pseudocode(run):
    """And with the paper's numbers, and an option of `local_steps`, where none are given."""
    opt = local_opt.presets.diloco(SGD, PLAN, learning_rate=0.6, momentum=0.8)
    result, _ = run_squares(opt, RUNS[run])
    assert distance(result, nesterov(square_gradient, (0.6, 0.8))) < 2e-6
    options, inner = (
        {"axis_name": "worker", "sync_opt_state": "reset"},
        optax.sgd(RATE, momentum=0.9),
    )
    plain = local_opt.local_steps(inner, PLAN, outer=NESTEROV, **options)
    result = run_squares(local_opt.presets.diloco(inner, PLAN, **options))
    assert_bitwise_equal(result, run_squares(plain))


@pytest.mark.parametrize("run", ["vmap", "shard_map"])
def test_slowmo_equals_its_pseudocode_at_a_rate_that_falls(run):
    lr = optax.exponential_decay(RATE, 4, 0.3)
    rates = [float(lr(t)) for t in range(PLAN.total_steps)]
    first = np.stack([flat(START)] * W)
    expected = slowmo_by_hand(first, square_gradient, PLAN.periods, rates, (0.8, 0.7))
    given = dict(learning_rate=0.8, momentum=0.7)
    actual, state = run_squares(
        local_opt.presets.slowmo(optax.sgd(lr), PLAN, inner_rate=lr, **given), RUNS[run]
    )
    assert distance(actual, expected) < 2e-6
    assert state.rounds.outer.count.tolist() == [PLAN.total_steps] * W
    without, _ = run_squares(local_opt.presets.slowmo(optax.sgd(lr), PLAN, **given), RUNS[run])
    assert distance(without, expected) > 1e-2
    for rate in (RATE, 1.0):  # a constant one cancels
        opt = local_opt.presets.slowmo(SGD, PLAN, inner_rate=rate, **given)
        rates = [RATE] * PLAN.total_steps
        expected = slowmo_by_hand(first, square_gradient, PLAN.periods, rates, (0.8, 0.7))
        assert distance(run_squares(opt, RUNS[run])[0], expected) < 2e-6


def run_alone(opt):
    """[T, 6] of one worker under a plain jit, and its state."""
    params, state, step = START, opt.init(START), jax.jit(square_step(opt))
    history = []
    for t in range(PLAN.total_steps):
        params, state = step(params, state, MATRICES[0], TARGETS[t, 0])
        history.append(flat(params))
    return np.stack(history), state


def test_one_worker_without_an_axis_equals_the_pseudocode_of_snoo():
    alone = lambda *outer: local_opt.local_steps(  # noqa: E731
        SGD, PLAN, axis_name=(), outer=optax.sgd(*outer, nesterov=True)
    )
    result, state = run_alone(alone(0.6, 0.8))
    assert distance(result[:, None], nesterov(of_one, (0.6, 0.8))) < 2e-6
    assert state.num_syncs == PLAN.rounds
    plain, _ = run_alone(alone(1.0, 0.0))
    assert distance(plain, run_alone(SGD)[0]) < 1e-6  # x <- a - (a - x)


SHAPES = {"a": (3, 5), "b": (4,), "c": (6, 2)}
GRADS = [
    [{n: RNG.normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(W)]
    for _ in range(PLAN.total_steps)
]
FIRST = {n: RNG.normal(size=s).astype(np.float32) for n, s in SHAPES.items()}


def test_muloco_equals_its_pseudocode():
    decays = {"weight_decay": 0.1, "adam_weight_decay": 0.1}
    muon = optax.contrib.muon(0.1, beta=0.9, nesterov=False, adam_b2=0.99, **decays)
    opt = local_opt.presets.diloco(muon, PLAN, learning_rate=0.7, momentum=0.6)
    expected = muloco_by_hand(FIRST, GRADS, PLAN.periods, 0.1, (0.7, 0.6), 0.1)
    assert distance(run_given(opt, FIRST, GRADS), expected) < 1e-5


def test_sparseloco_equals_its_pseudocode():
    """70 blocks, of which 64 share one table and 6 the other; two bits, places and feedback."""
    size, rate, compressor = 69 * 4096 + 7, 0.1, COMPRESSORS["top_k_2bit"]
    first = RNG.normal(size=size).astype(np.float32)
    plan = local_opt.SyncPlan([0, 2], 3)  # the second round sends what the first has lost
    grads = np.float32(RNG.normal(size=(plan.total_steps, W, size)) ** 3)
    result = run_given(
        local_opt.local_steps(optax.sgd(rate), plan, outer=optax.sgd(0.65), compress=compressor),
        {"x": first},
        [[{"x": g} for g in each] for each in grads],
        plan,
    )
    anchor, lost = np.asarray(first, np.float64), np.zeros((W, size))
    rounded = reference.ROUNDED["top_k_2bit"]
    assert compressor.feedback == 0.95
    for start, length, new in zip(plan.starts, plan.periods, result, strict=True):
        changes = -rate * grads[start : start + length].astype(np.float64).sum(axis=0)
        mean, lost = reference.synchronize_changes(anchor, changes, lost, compressor, rounded)
        anchor = anchor + 0.65 * (mean - anchor)
        error = np.abs(new["x"] - anchor)
        assert (error > 1e-5).sum() <= 1e-4 * size, (error > 1e-5).sum()  # ties of two codes
    assert np.abs(lost).max() > 1e-3
