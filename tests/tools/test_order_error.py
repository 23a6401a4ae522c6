"""The two errors of the family equal those of local SGD, and follow its formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import local_opt
import models
from experiments import order_error, order_losses
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
        of_order = order_losses.order_formula(family, setting)
        expected.append((of_order, order_losses.local_formula(family, setting, 12)))
    # Forty epochs of four draws; what neither formula counts is of the next order.
    np.testing.assert_allclose(np.mean(found, axis=0), np.mean(expected, axis=0), rtol=0.15)
    assert order_losses.border(family, setting) == order_losses.LONGEST  # any round errs less
    family = family._replace(cubic=4.0)
    at = order_losses.border(family, setting)
    values = [order_losses.local_formula(family, setting, h) for h in (at, at + 1)]
    assert values[0] < expected[-1][0] <= values[1]


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


def test_the_sign_equals_that_of_full_tensors():
    model = models.softmax_regression(num_features=2, num_classes=2, l2=0.1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 2)).astype(np.float32)
    train = {"x": x, "y": (x[:, 0] + rng.normal(size=12) > 0).astype(np.int32)}
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
    cosine, noise = order_error.sign(model, train, sample=12)
    assert cosine == pytest.approx(gram[0, 1] / np.sqrt(gram[0, 0] * gram[1, 1]), abs=1e-3)
    expected = np.mean(np.sum(z**2, axis=1)) / np.trace(own.mean(axis=0))
    assert noise == pytest.approx(expected, rel=1e-3)


def test_every_question_is_a_table(tmp_path, monkeypatch, capsys):
    settings = Setting(4, 2, 16, epochs=6), Setting(2, 4, 16, epochs=6)
    monkeypatch.setattr(order_error, "SETTINGS", settings)
    monkeypatch.setattr(order_error, "ENDS", settings)
    monkeypatch.setattr(order_error, "sign", lambda *args, seed: (-0.5, 1.0 + seed))
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
