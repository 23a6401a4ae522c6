"""The family's two errors are those of local SGD on it, and what its formulas say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

import local_opt
import models
from experiments import order_error, order_runs
from experiments import order_losses as families
from experiments.order_losses import Drift
from experiments.results import records
from experiments.study import study
from tests import reference

W, M, B = 4, 12, 2
N = M // B


def every(period, epochs=24, steps=N):
    plan = local_opt.constant(period, total_steps=epochs * steps)
    return plan.syncs_after(np.arange(plan.total_steps))


class Gradients:
    """Of the family's losses themselves, not of their expansion."""

    workers = W

    def __init__(self, family, order):
        self.family, self.order = family, order

    def __call__(self, w, t, x):
        f = self.family
        units = self.order[t // N, w, t % N * B : (t % N + 1) * B]
        g, z = f.spread[units].mean(axis=0), f.noise[units].mean(axis=0)
        return f.curvature * (x + g * x + f.cubic / 2 * x**2) - z


CORRECTIONS = {"none": Drift(), "control": Drift(gain=1.0), "proximal": Drift(pull=0.4)}


@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_expansion_is_local_sgd_to_first_order(name):
    """Halve what is expanded in, and what is left of the difference is a quarter."""
    left, rate, periods = [], 0.3, [4] * 36
    drift = CORRECTIONS[name]
    for small in (0.02, 0.01):
        family = families.draw(W * M, W, dimension=3, spread=small, cubic=small)
        order = order_runs.epochs_of("cd_grab", family.noise, W, 24, seed=0)
        gradient = Gradients(family, order)
        if name == "control":
            history, _ = reference.scaffold(np.zeros(3), gradient, periods, [rate] * 144)
        elif name == "proximal":
            history = reference.fedprox(np.zeros(3), gradient, periods, rate, drift.pull)
        else:
            history = reference.local_sgd(np.zeros(3), gradient, periods, rate)
        y, u = families.paths(
            family, order, every(4), np.full(144, rate), units_per_step=B, drift=drift
        )
        left.append(np.abs(history.mean(axis=1) - (y + u)).max())
        assert np.abs(u).max() > 10 * left[-1]
    assert 3.5 < left[0] / left[1] < 4.5


def test_the_linear_part_is_parallel_sgd_whatever_the_plan():
    family = families.draw(W * M, W, dimension=3)
    order = order_runs.epochs_of("rr", family.noise, W, 24, seed=0)
    given = dict(rates=np.full(144, 0.3), units_per_step=B)
    (plain, _), *others = (
        families.paths(family, order, every(h), **given, drift=drift)
        for h, drift in ((1, Drift()), (5, Drift()), (40, Drift()), (5, Drift(gain=0.5)))
    )
    for y, _ in others:
        np.testing.assert_allclose(y, plain, atol=1e-12)


def test_formulas_are_the_means_of_runs():
    workers, num_units, b, rate, period = 8, 48, 2, 0.1, 12
    steps = num_units // b
    given = dict(rate=rate, workers=workers, units_per_step=b)
    found, expected = [], []
    for seed in range(4):
        family = families.draw(workers * num_units, workers, least=0.3, spread=0.0, seed=seed)
        order = order_runs.epochs_of("dealt", family.noise, workers, 80, seed)
        run = dict(rates=np.full(80 * steps, rate), units_per_step=b)
        plain, own = (
            families.paths(family, order, every(h, 80, steps), **run) for h in (1, period)
        )
        errors = families.errors(family, plain, own, steps=steps, epochs=40)
        found.append((errors.order, errors.bias))
        order_error = families.order_formula(family, steps=steps, **given)
        expected.append((order_error, families.local_formula(family, period=period, **given)))
    # Forty epochs of four draws; what neither formula counts is of the next order.
    np.testing.assert_allclose(np.mean(found, axis=0), np.mean(expected, axis=0), rtol=0.15)
    assert families.border(family, steps=steps, **given) == 4096  # not even long rounds err more
    family = family._replace(cubic=4.0)
    at = families.border(family, steps=steps, **given)
    values = [families.local_formula(family, period=h, **given) for h in (at, at + 1)]
    assert values[0] < expected[-1][0] <= values[1]


def test_every_order_takes_every_unit_once_and_balanced_ones_are_the_papers():
    vectors = families.draw(W * M, W, dimension=3).noise
    own, start = vectors.reshape(W, M, 3), np.arange(W)[:, None] * M
    for name, order in order_runs.ORDERS.items():
        found = order_runs.epochs_of(name, vectors, W, 3, seed=0)
        for epoch in found:
            assert sorted(epoch.ravel()) == list(range(W * M))
            if order.shards:
                np.testing.assert_array_equal(np.sort(epoch, axis=1), start + np.arange(M))
        before, after, _ = found - start
        if name == "cd_grab":
            np.testing.assert_array_equal(after, reference.cd_grab_epoch(before, own))
        elif name == "id_pair":
            for o, g, then in zip(before, own, after, strict=True):
                np.testing.assert_array_equal(then, reference.pair_balance_epoch(o, g))


def test_the_sign_is_that_of_whole_tensors():
    model = models.softmax_regression(num_features=2, num_classes=2, l2=0.1)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 2)).astype(np.float32)
    train = {"x": x, "y": (x[:, 0] + rng.normal(size=12) > 0).astype(np.int32)}
    found = families.sign(model, train, sample=12)
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
    curvature = own.mean(axis=0)
    gram = parts @ np.linalg.solve(curvature, parts.T)
    cosine = gram[0, 1] / np.sqrt(gram[0, 0] * gram[1, 1])
    assert found.cosine == pytest.approx(cosine, abs=1e-3)
    noise = np.mean(np.sum(z**2, axis=1)) / np.trace(curvature)
    assert found.noise == pytest.approx(noise, rel=1e-3)


def test_every_question_is_a_table(tmp_path, monkeypatch, capsys):
    small = dict(num_units=16, epochs=6)
    settings = order_runs.Setting(4, 2, **small), order_runs.Setting(2, 4, **small)
    for name, value in zip(("SMALL", "LARGE", "SETTINGS"), (*settings, settings), strict=True):
        monkeypatch.setattr(order_error, name, value)
    monkeypatch.setattr(families, "sign", lambda *args, seed: families.Sign(-0.5, 1.0 + seed))
    monkeypatch.setattr(order_error, "POWER", order_error.POWER._replace(epochs=20))
    values = flags.FlagValues()
    study.define_flags(order_error.STUDY, values)
    order_error.define_flags(values)
    values(["order_error", "--seeds=2", f"--output_dir={tmp_path}"])
    order_error.main([], values)
    said, found = capsys.readouterr().out, records.read(str(tmp_path / "metrics.jsonl"))
    for name in order_error.QUESTIONS:
        text = (tmp_path / f"table_{name}.md").read_text()
        assert text in said and "nan" not in text
        rows = {r["row"] for r in found if r["question"] == name}
        assert len(text.splitlines()) == 2 + len(rows)
    assert (tmp_path / "order_error.png").stat().st_size > 10_000
    assert "data:image/png" in (tmp_path / "report.html").read_text()
    # What no plan changes.
    own = [r for r in found if r["question"] == "errors" and r["seed"] == 0]
    orders = {(r["row"], r["order"]) for r in own}
    assert len(orders) == len({row for row, _ in orders})
