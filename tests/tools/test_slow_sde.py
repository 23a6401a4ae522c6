"""The theory of the slow drift equals closed forms, and runs end where it predicts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from scipy.integrate import solve_ivp

import local_opt
from experiments import slow_sde
from experiments.report import records
from experiments.report.statistics import interval
from experiments.slow_sde import PROBLEMS, RULES
from tests.commands import parsed

A, VALLEY, LABEL_NOISE = np.array(slow_sde.EXAMPLES), *PROBLEMS.values()


@pytest.mark.parametrize("workers, beta", [(2, 0.0), (8, 1.0), (8, math.inf)])
def test_the_limit_in_the_valley_equals_a_fine_integration(workers, beta):
    """dx/ds = -c x / (2 (1 + x^2)) from 1, c = 1/K + (1 - 1/K) psi(2 beta (1 + x^2))."""

    def slope(s, x):
        z = 2 * beta * (1 + x**2)
        share = (np.exp(-z) - 1 + z) / z if 0 < beta < math.inf else float(beta > 0)
        return -(1 / workers + (1 - 1 / workers) * share) * x / (2 * (1 + x**2))

    expected = solve_ivp(slope, (0, 4), [1.0], rtol=1e-10, atol=1e-12).y[0, -1:]
    actual = slow_sde.flow(VALLEY, slow_sde.in_the_limit, workers, beta)[-1:]
    np.testing.assert_allclose(actual, expected, rtol=1e-4)
    if beta != 1.0:  # as a drift so many times as strong as that of one worker
        strength = 1.0 if beta else 1 / workers
        np.testing.assert_allclose(slow_sde.strength(VALLEY, actual), strength, rtol=1e-3)


@pytest.mark.parametrize("period", [1, 30])
def test_moments_at_a_rate_equal_those_of_simulated_steps(period):
    """Moments of the mean of K workers and of a distance from it, stepped until they settle."""
    rate, workers, curvatures = 0.1, 4, np.array([0.5, 3.0])
    kept = 1 - rate * (curvatures[:, None] + 0 * curvatures)
    kept = kept * kept.T
    mean, variance, seen = np.zeros((2, 2)), np.zeros((2, 2)), []
    for _ in range(max(1, 400 // period)):
        variance, seen = 0 * variance, []
        for _ in range(period):
            seen.append(mean + variance)
            mean = kept * mean + rate**2 / workers
            variance = kept * variance + rate**2 * (1 - 1 / workers)
    result = slow_sde.at_a_rate(jnp.float32(curvatures), workers, rate, period)
    np.testing.assert_allclose(result, np.mean(seen, axis=0) / rate, rtol=1e-3)


def test_label_noise_descends_the_trace_of_the_hessian_along_the_manifold():
    """dX/ds = -(variance / 4 K) P grad tr H, for S = variance H at a minimiser."""
    params = jnp.array(LABEL_NOISE.start)
    u, v = np.split(np.array(LABEL_NOISE.start), 2)
    slopes = np.concatenate([2 * A * u, -2 * A * v], axis=1)
    assert float(slow_sde.sharpness(params)) == pytest.approx(np.trace(slopes.T @ slopes))
    tangents = np.eye(8) - np.linalg.pinv(slopes) @ slopes
    uphill = 8 * np.concatenate([(A**2).sum(0)] * 2) * np.concatenate([u, v])
    drift = jax.jit(slow_sde.drift, static_argnums=(0, 1))
    for workers, beta, strength in ((8, 0.0, 1 / 8), (8, math.inf, 1)):
        actual = drift(LABEL_NOISE, slow_sde.in_the_limit, params, (workers, beta))
        expected = -strength * slow_sde.NOISE**2 / 4 * tangents @ uphill
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


def gradient_in_numpy(name, params, noises):
    """[P, ...] of [P, ...] and [N, ...], written out."""
    if name == "valley":
        x, y = params
        return np.stack([x * y**2, (1 + x**2) * y + noises[0]])
    u, v = params[:4], params[4:]
    start = np.array(LABEL_NOISE.start)
    labels = A @ (start[:4] ** 2 - start[4:] ** 2)
    misses = np.einsum("ij,j...->i...", A, u**2 - v**2) - slow_sde.NOISE * noises
    pull = np.einsum("ij,i...->j...", A, misses - labels.reshape(2, 1, 1, 1))
    return np.concatenate([2 * u * pull, -2 * v * pull])


@pytest.mark.parametrize("name", PROBLEMS)
def test_steps_equal_numpy(name):
    problem, rng = PROBLEMS[name], np.random.default_rng(0)
    params = rng.normal(size=(len(problem.start), 3, 5, 4))
    noises, syncs = rng.normal(size=(problem.num_noises, 5, 4)), np.array([True, False, True])
    expected = params - 0.1 * gradient_in_numpy(name, params, noises[:, None])
    expected[:, syncs] = expected[:, syncs].mean(axis=-1, keepdims=True)
    actual = slow_sde.worker_steps(problem, jnp.float32(params), jnp.float32(noises), 0.1, syncs)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["valley", pytest.param("label_noise", marks=pytest.mark.slow)])
def test_runs_end_where_theory_predicts(name, optimised):
    """Within 3 % of the theory at a large rate plus half an interval, over 64 repetitions."""
    for r in slow_sde.measure(name, 4, 0.05, 64):
        mean, half = interval(r["end"])
        assert abs(mean - r["theory"]) < 0.03 * r["theory"] + half
        assert half < 0.04 * r["theory"]


def test_the_experiment_writes_tables_and_a_page(tmp_path, capsys, monkeypatch):
    def run(*given):
        few = ("--repetitions=3", f"--output_dir={tmp_path}")
        slow_sde.main(parsed(slow_sde, *few, *given))

    for period, rule in zip((1, 4, 10, 50), RULES.values(), strict=True):
        assert rule.plan(0.1, 400) == local_opt.constant(period, total_steps=400)
    for wrong in ("--rates=0.1,fast", "--rates=0.1,1e-9", "--repetitions=1000000000"):
        with pytest.raises(flags.Error, match=f"{wrong}: .* (number|integer) in"):
            run(wrong)
    monkeypatch.setattr(slow_sde, "PROBLEMS", {"valley": VALLEY})
    run("--workers=2", "--rates=0.1,0.2")
    printed = capsys.readouterr().out
    assert (tmp_path / "table_valley.md").read_text() in printed
    assert len(records.read(tmp_path / records.METRICS)) == 2 * 4
