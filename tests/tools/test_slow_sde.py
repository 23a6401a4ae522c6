"""The slow drift's theory equals closed forms, and runs end where it says."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import app, flags
from scipy.integrate import solve_ivp
from scipy.special import lambertw

import local_opt
from experiments import slow_sde
from experiments.results import records
from experiments.results.statistics import interval
from experiments.slow_sde import PROBLEMS, RULES, flow

A, VALLEY, LABEL_NOISE = np.array(slow_sde.EXAMPLES), *PROBLEMS.values()


def limit(workers, beta):
    return float(flow(VALLEY, slow_sde.in_the_limit, workers, beta)[-1])


@pytest.mark.parametrize("workers", [2, 8])
def test_the_limits_of_parallel_and_qsr_in_the_valley_have_a_closed_form(workers):
    """Where dx/ds = -c x / (2 (1 + x^2)) leads from 1: x^2 exp(x^2) = exp(1 - c s)."""
    ends = np.array([limit(workers, RULES[name].beta) for name in ("parallel", "qsr")], np.float32)
    expected = [math.sqrt(lambertw(math.exp(1 - 4 * c)).real) for c in (1 / workers, 1)]
    np.testing.assert_allclose(ends, expected, rtol=1e-4)
    np.testing.assert_allclose(slow_sde.strength(VALLEY, ends), [1 / workers, 1], rtol=1e-3)
    if workers == 8:
        assert ends.round(3).tolist() == pytest.approx([0.875, 0.218])


@pytest.mark.parametrize("beta", [0.1, 1.0, 5.0])
def test_the_limit_of_h_that_goes_as_one_over_eta_equals_a_fine_integration(beta):
    def slope(s, x):
        z = 2 * beta * (1 + x**2)
        share = (np.exp(-z) - 1 + z) / z
        return -(1 / 8 + 7 / 8 * share) * x / (2 * (1 + x**2))

    expected = solve_ivp(slope, (0, 4), [1.0], rtol=1e-10, atol=1e-12).y[0, -1]
    np.testing.assert_allclose(limit(8, beta), expected, rtol=1e-5)


@pytest.mark.parametrize("period", [1, 4, 30])
def test_moments_at_a_rate_equal_those_of_the_steps(period):
    """Of the mean of K workers and of one's distance from it, step by step until they settle."""
    rate, workers, curvatures = 0.1, 4, np.array([0.5, 3.0])
    kept = 1 - rate * (curvatures[:, None] + 0 * curvatures)
    kept = kept * kept.T
    mean, apart, seen = np.zeros((2, 2)), np.zeros((2, 2)), []
    for _ in range(max(1, 400 // period)):
        apart, seen = 0 * apart, []
        for _ in range(period):
            seen.append(mean + apart)
            mean = kept * mean + rate**2 / workers
            apart = kept * apart + rate**2 * (1 - 1 / workers)
    found = slow_sde.at_a_rate(jnp.float32(curvatures), workers, rate, period)
    np.testing.assert_allclose(found, np.mean(seen, axis=0) / rate, rtol=1e-3)


@pytest.mark.parametrize("beta,period", [(0.0, 1), (1.0, 500), (math.inf, 10**6)])
def test_moments_at_a_small_rate_are_near_the_limit(beta, period):
    curvatures = jnp.array([0.5, 3.0])
    limit = slow_sde.in_the_limit(curvatures, 8, beta)
    found = slow_sde.at_a_rate(curvatures, 8, 0.002, float(period))
    np.testing.assert_allclose(found, limit, rtol=0.01)


def test_label_noise_descends_the_trace_of_the_hessian_along_the_manifold():
    """dX/ds = -(variance / 4 K) P grad tr H, for S = variance H at a minimiser."""
    params = jnp.array(LABEL_NOISE.start)
    u, v = np.split(np.array(LABEL_NOISE.start), 2)
    slopes = np.concatenate([2 * A * u, -2 * A * v], axis=1)
    assert float(slow_sde.sharpness(params)) == pytest.approx(np.trace(slopes.T @ slopes))
    assert float(slow_sde.sharpness(params)) == pytest.approx(7.4336)  # of docs/slow_sde.md
    tangents = np.eye(8) - np.linalg.pinv(slopes) @ slopes
    uphill = 8 * np.concatenate([(A**2).sum(0)] * 2) * np.concatenate([u, v])
    drift = jax.jit(slow_sde.drift, static_argnums=(0, 1))
    for workers, beta, strength in ((8, 0.0, 1 / 8), (8, math.inf, 1)):
        found = drift(LABEL_NOISE, slow_sde.in_the_limit, params, (workers, beta))
        expected = -strength * slow_sde.NOISE**2 / 4 * tangents @ uphill
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


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
def test_a_step_equals_one_written_out_in_numpy(name):
    problem, rng = PROBLEMS[name], np.random.default_rng(0)
    params = rng.normal(size=(len(problem.start), 3, 5, 4))
    noises, syncs = rng.normal(size=(problem.num_noises, 5, 4)), np.array([True, False, True])
    expected = params - 0.1 * gradient_in_numpy(name, params, noises[:, None])
    expected[:, syncs] = expected[:, syncs].mean(axis=-1, keepdims=True)
    found = slow_sde.worker_steps(problem, jnp.float32(params), jnp.float32(noises), 0.1, syncs)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PROBLEMS)
def test_coarse_runs_end_where_the_theory_of_their_rate_says(name, optimised):
    """Within 3 % of theory and the half of an interval of 95 %, of 64 repetitions."""
    for r in slow_sde.measure(name, 4, 0.05, 64):
        mean, half = interval(r["end"])
        assert abs(mean - r["theory"]) < 0.03 * r["theory"] + half
        assert half < 0.04 * r["theory"]


def test_plans_are_the_librarys():
    plans = {name: rule.plan(0.1, 400) for name, rule in RULES.items()}
    assert plans["parallel"] == local_opt.every_step(400)
    assert plans["constant"] == local_opt.constant(4, total_steps=400)
    assert plans["inverse"] == local_opt.constant(10, total_steps=400)
    assert plans["qsr"] == local_opt.constant(50, total_steps=400)
    assert RULES["qsr"].plan(0.02, 10_000).periods.tolist() == [1250] * 8


def test_the_experiment_writes_tables_a_picture_and_a_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slow_sde, "PROBLEMS", {"valley": VALLEY})

    def run(*given):
        values = flags.FlagValues()
        slow_sde.define_flags(values)
        values(["slow_sde", "--repetitions=3", f"--output_dir={tmp_path}", *given])
        slow_sde.main([], values)

    with pytest.raises(app.UsageError, match=r"--rates has \['fast'\]: pass positive"):
        run("--rates=0.1,fast")
    run("--workers=2", "--rates=0.1,0.2")
    printed = capsys.readouterr().out
    assert (tmp_path / "table_valley.md").read_text() in printed
    assert "1. ends at the smallest rate, the limit's: " in printed
    assert printed.count(" of 2 within 5%") == 2 and printed.count(" of 8 within 5%") == 1
    assert "slow_sde.png" in (tmp_path / "report.html").read_text()
    assert len(records.read(tmp_path / records.METRICS)) == 2 * 4
