"""The two errors of the family equal those of local SGD, and follow its formulas."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import local_opt
import models
from experiments import order_error, order_formulas, order_losses
from experiments.order_losses import NEVER, Drift, Setting
from experiments.results import records
from tests import reference
from tests.studies import parsed

W, M, B, N = 4, 12, 2, 6
SMALL = Setting(W, B, M, rate=0.3, epochs=24, dimension=3)


def every(period, setting=SMALL):
    plan = local_opt.constant(period, total_steps=setting.epochs * setting.steps)
    return plan.syncs_after(np.arange(plan.total_steps)), np.full(plan.total_steps, setting.rate)


class Gradients:
    """Gradients of the family's exact losses, not of their expansion."""

    workers = W

    def __init__(self, family, order):
        self.family, self.order = family, order

    def __call__(self, w, t, x):
        f = self.family
        units = self.order[t // N, w, t % N * B : (t % N + 1) * B]
        g, z = f.spread[units].mean(axis=0), f.noise[units].mean(axis=0)
        return f.curvature * (x + g * x + f.cubic / 2 * x**2) - z


CORRECTIONS = {"none": NEVER, "control": Drift(gain=1.0), "proximal": Drift(pull=0.4)}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_expansion_equals_local_sgd_to_first_order(name):
    """Halving the expansion's parameter leaves a quarter of the difference."""
    left, periods, drift = [], [4] * 36, CORRECTIONS[name]
    for small in (0.02, 0.01):
        setting = SMALL._replace(spread=small, cubic=small)
        family = order_losses.draw(setting)
        order = order_losses.epochs_of("cd_grab", family.noise, W, 24, seed=0)
        gradient = Gradients(family, order)
        if name == "control":
            history, _ = reference.scaffold(np.zeros(3), gradient, periods, [0.3] * 144)
        elif name == "proximal":
            history = reference.fedprox(np.zeros(3), gradient, periods, 0.3, drift.pull)
        else:
            history = reference.local_sgd(np.zeros(3), gradient, periods, 0.3)
        y, u = order_losses.paths(family, setting, order, *every(4), drift)
        left.append(np.abs(history.mean(axis=1) - (y + u)).max())
        assert np.abs(u).max() > 10 * left[-1]
        if name != "proximal":  # the linear part is parallel SGD, whatever the plan
            plain, _ = order_losses.paths(family, setting, order, *every(1))
            np.testing.assert_allclose(y, plain, atol=1e-12)
    assert 3.5 < left[0] / left[1] < 4.5


def test_formulas_are_the_means_of_runs():
    setting = Setting(8, 2, 48, rate=0.1, epochs=80, least=0.3, spread=0.0)
    found, expected = [], []
    for seed in range(4):
        own = order_error.run(setting, "dealt", 12, seed)
        found.append((own.order, own.bias))
        family = order_losses.draw(setting, seed)
        of_order = order_formulas.order_formula(family, setting)
        expected.append((of_order, order_formulas.local_formula(family, setting, 12)))
    # Forty epochs of four draws; what neither formula counts is of the next order.
    np.testing.assert_allclose(np.mean(found, axis=0), np.mean(expected, axis=0), rtol=0.15)
    assert order_formulas.border(family, setting) == order_formulas.LONGEST  # any round errs less
    family = family._replace(cubic=4.0)
    at = order_formulas.border(family, setting)
    values = [order_formulas.local_formula(family, setting, h) for h in (at, at + 1)]
    assert values[0] < expected[-1][0] <= values[1]


AVERAGES = {"last": np.ones(1), "mean": np.full(24, 1 / 24), "ema": order_formulas.ema(36)}


# A sum r per worker has few pairs to settle, and errs more than its formula.
@pytest.mark.parametrize("order, within", [("rr", 0.15), ("cd_grab", 0.15), ("id_pair", 0.3)])
def test_formulas_of_orders_are_the_means_of_runs(order, within):
    """In directions with eta l n of 0.2 and of 6, where averages do opposite things."""
    setting = Setting(4, 4, 96, rate=0.25, epochs=200, dimension=32, least=1.0)
    drawn = order_losses.draw(setting)
    made = order_losses.epochs_of(order, drawn.noise, 4, 200, seed=0)
    for curvature in (0.033, 1.0):
        family = drawn._replace(curvature=np.full(32, curvature))
        path = order_losses.parallel(family, setting, made, np.full(200 * 24, 0.25))
        for name, weights in AVERAGES.items():
            found = order_losses.errors(family, setting, path, path, weights).order
            expected = order_formulas.order_formula(family, setting, order, weights)
            assert found == pytest.approx(expected, rel=within), (curvature, name)


def test_averages_of_an_epoch_and_regimes_of_their_formulas():
    setting = Setting(4, 2, 2000, dimension=1, rate=0.02)  # eta l n = 20 l
    unit = order_losses.draw(setting._replace(least=1.0))
    n, s2 = 1000, float(unit.noise.var())

    def of(curvature, weights=(1.0,)):
        family = unit._replace(curvature=np.array([curvature]))
        return order_formulas.order_formula(family, setting, "rr", weights)

    mean = np.full(n, 1 / n)
    # Exact: the mean of an epoch is a multiple of the difference of its two ends.
    for curvature in (0.001, 0.02, 0.055, 0.062, 2.0):
        keep, x = 1 - 0.02 * curvature, 20 * curvature
        expected = of(curvature) * 2 * (1 - keep**n) * keep**2 / x**2
        assert of(curvature, mean) == pytest.approx(expected, rel=1e-9)
        assert (of(curvature, mean) < of(curvature)) == (x > 1.18)
    slow, fast = 1e-4, 1.0
    assert of(slow) == pytest.approx(0.02**3 * slow**2 * s2 * (n**2 - 1) / 48 / 8, rel=0.01)
    assert of(slow, mean) == pytest.approx(0.02**2 * slow * s2 * n / 24 / 8, rel=0.01)
    # eta l n = 20 and eta l = 0.02 are neither infinite nor 0.
    assert of(fast) == pytest.approx(0.02 * s2 / 4 / 8, rel=0.15)
    assert of(fast, mean) == pytest.approx(s2 / (2 * 0.02 * n**2 * 8), rel=0.15)


def test_linear_recursions_and_their_averages_equal_a_loop():
    family = order_losses.draw(SMALL)._replace(spread=np.zeros((W * M, 3)), cubic=0.0)
    made = order_losses.epochs_of("rr", family.noise, W, 24, seed=0)
    path = order_losses.parallel(family, SMALL, made, np.full(24 * N, 0.3))
    y, own, weights = np.zeros(3), [], order_formulas.ema(9)
    for order in made:
        for t in range(N):
            z = np.mean([family.noise[order[w, t * B : (t + 1) * B]] for w in range(W)], (0, 1))
            y = y - 0.3 * (family.curvature * y - z)
            own.append(y)
    np.testing.assert_allclose(path[0], own, atol=1e-12)
    ends = range(24 * N, 12 * N, -N)
    means = [sum(w * own[t - 1 - j] for j, w in enumerate(weights) if j < t) for t in ends]
    found = order_losses.errors(family, SMALL, path, path, weights).order
    expected = np.mean(np.sum(family.curvature / 2 * np.square(means), axis=1))
    assert found == pytest.approx(expected, rel=1e-9)
    start = np.array([1.0, -2.0, 0.5])
    y, own = start, [start]
    for _ in range(24 * N):
        y = y - 0.3 * family.curvature * y
        own.append(y)
    left = sum(w * own[-1 - j] for j, w in enumerate(weights))
    expected = np.sum(family.curvature / 2 * left**2)
    assert order_formulas.start_formula(family, SMALL, start, weights) == pytest.approx(expected)


@pytest.mark.parametrize("order", ["rr", "cd_grab"])
def test_momentum_acts_as_an_average_of_the_iterates(order):
    """Momentum b is an EMA over 1 / (1 - b) steps, as long as eta l << 1 - b."""
    setting = Setting(4, 4, 96, rate=0.1, epochs=200, dimension=32, least=1.0)
    family = order_losses.draw(setting)._replace(curvature=np.full(32, 0.05))
    made = order_losses.epochs_of(order, family.noise, 4, 200, seed=0)
    y, m, ends = np.zeros(32), np.zeros(32), []
    for t, units in enumerate(made.reshape(200, 4, 24, 4).swapaxes(1, 2).reshape(-1, 16)):
        m = 0.9 * m + 0.1 * (0.05 * y - family.noise[units].mean(axis=0))
        y = y - 0.1 * m
        if t % 24 == 23 and t > 2400:
            ends.append(0.05 / 2 * np.sum(y**2))
    expected = order_formulas.order_formula(family, setting, order, order_formulas.ema(10))
    assert np.mean(ends) == pytest.approx(expected, rel=0.2)
    assert expected > 5 * order_formulas.order_formula(family, setting, order)


@pytest.mark.parametrize("power", [0, 1, 2])
def test_adam_with_a_frozen_second_moment_is_sgd_in_other_coordinates(power):
    """And an order balanced on the scaled rows of Adam's own coordinates is the same order."""
    family, p = order_losses.adam(order_losses.draw(SMALL._replace(least=1.0)), power)
    scale = np.geomspace(0.03, 1, 3)
    z, curvature = family.noise / np.sqrt(p), scale**power
    np.testing.assert_allclose(z.std(axis=0) / scale, 1, rtol=0.3)
    assert (p * curvature).max() == pytest.approx(1)
    made = order_losses.epochs_of("cd_grab", family.noise * p**0.5, W, 24, seed=0)
    np.testing.assert_array_equal(made, order_losses.epochs_of("cd_grab", z * p, W, 24, seed=0))
    x, path = np.zeros(3), order_losses.parallel(family, SMALL, made, np.full(24 * N, 0.3))
    for t, order in enumerate(made.reshape(24, W, N, B).swapaxes(1, 2).reshape(24 * N, -1)):
        x = x - 0.3 * p * (curvature * x - z[order].mean(axis=0))
        y = path[0, t]
        np.testing.assert_allclose(x / np.sqrt(p), y, atol=1e-12)
    assert curvature @ x**2 == pytest.approx(family.curvature @ y**2)


def test_local_steps_keep_their_bias_in_a_mean():
    setting = Setting(8, 2, 48, rate=0.1, epochs=80, least=1.0, spread=0.0, dimension=4)
    family, weights = order_losses.draw(setting), np.full(24, 1 / 24)
    expected = [order_formulas.local_formula(family, setting, 24, a) for a in (False, True)]
    found = [order_error.run(setting, "dealt", 24, 0, weights=w) for w in ((1.0,), weights)]
    np.testing.assert_allclose([f.bias for f in found], expected, rtol=0.1)
    assert found[1].order < found[0].order / 3  # while the order's error is averaged away


def test_every_order_visits_each_unit_once_and_balanced_ones_follow_the_papers():
    vectors = order_losses.draw(SMALL).noise
    own, start = vectors.reshape(W, M, 3), np.arange(W)[:, None] * M
    for name in order_losses.ORDERS:
        found = order_losses.epochs_of(name, vectors, W, 3, seed=0)
        for epoch in found:
            assert sorted(epoch.ravel()) == list(range(W * M))
            if name in order_losses.SHARDED:
                np.testing.assert_array_equal(np.sort(epoch, axis=1), start + np.arange(M))
        before, after, _ = found - start
        if name == "cd_grab":
            np.testing.assert_array_equal(after, reference.cd_grab_epoch(before, own))
        elif name == "id_pair":
            for o, g, then in zip(before, own, after, strict=True):
                np.testing.assert_array_equal(then, reference.pair_balance_epoch(o, g))


def tiny(units):
    """Logistic regression on two features."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(units, 2)).astype(np.float32)
    y = (x[:, 0] + rng.normal(size=units) > 0).astype(np.int32)
    return models.softmax_regression(num_features=2, num_classes=2, l2=0.1), {"x": x, "y": y}


def test_the_sign_equals_that_of_full_tensors():
    model, train = tiny(12)
    params, unravel = jax.flatten_util.ravel_pytree(model.init(jax.random.key(0)))

    def losses(p):
        return model.loss(unravel(p), {k: jnp.asarray(v) for k, v in train.items()}, None)

    def mean(p):
        return losses(p).mean()

    newton = jax.jit(lambda p: p - jnp.linalg.solve(jax.hessian(mean)(p), jax.grad(mean)(p)))
    for _ in range(12):
        params = newton(params)
    z = -np.asarray(jax.jit(jax.jacobian(losses))(params), np.float64)
    own = np.asarray(jax.jit(jax.jacfwd(jax.jacrev(losses)))(params), np.float64)
    third = np.asarray(jax.jit(jax.jacfwd(jax.hessian(mean)))(params), np.float64)
    parts = np.stack([
        np.einsum("nij,nj->i", own, z) / 12, np.einsum("ijk,nj,nk->i", third, z, z) / 24
    ])  # fmt: skip
    gram = parts @ np.linalg.solve(own.mean(axis=0), parts.T)
    at = order_losses.optimum(model, train)
    cosine, noise = order_losses.sign(at, sample=12)
    assert cosine == pytest.approx(gram[0, 1] / np.sqrt(gram[0, 0] * gram[1, 1]), abs=1e-3)
    expected = np.mean(np.sum(z**2, axis=1)) / np.trace(own.mean(axis=0))
    assert noise == pytest.approx(expected, rel=1e-3)
    curvature, bias = own.mean(axis=0), np.einsum("ijk,nj,nk->i", third, z, z) / 24
    expected = bias @ np.linalg.solve(curvature, bias) / 2
    assert order_losses.floor(at, z) == pytest.approx(expected, rel=1e-3)
    family, start, turn = order_losses.family_of(at)
    np.testing.assert_allclose(turn * family.curvature @ turn.T, curvature, atol=1e-5)
    np.testing.assert_allclose(family.noise @ turn.T, z, atol=1e-4)
    np.testing.assert_allclose(turn @ start, -params, atol=1e-4)  # it starts from 0


def test_every_question_is_a_table(tmp_path, monkeypatch, capsys):
    settings = Setting(4, 2, 16, epochs=6), Setting(2, 4, 16, epochs=6)
    monkeypatch.setattr(order_error, "SETTINGS", settings)
    monkeypatch.setattr(order_error, "ENDS", settings)
    monkeypatch.setattr(order_losses, "sign", lambda at, seed: (-0.5, 1.0 + seed))
    task = types.SimpleNamespace(name="digits", model=tiny(64)[0], train=tiny(64)[1])
    monkeypatch.setitem(order_error.TASKS, "digits", lambda: task)
    monkeypatch.setattr(order_error, "POWER", order_error.POWER._replace(epochs=20))
    order_error.main(parsed(order_error, "--seeds=2", f"--output_dir={tmp_path}"))
    said, found = capsys.readouterr().out, records.read(str(tmp_path / "metrics.jsonl"))
    for name in order_error.QUESTIONS:
        text = (tmp_path / f"table_{name}.md").read_text()
        assert text in said and "nan" not in text
        rows = {r["row"] for r in found if r["question"] == name}
        assert len(text.splitlines()) == 2 + len(rows)
    assert (tmp_path / "order_error.png").stat().st_size > 10_000
    assert "data:image/png" in (tmp_path / "report.html").read_text()
