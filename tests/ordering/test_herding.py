"""Herding bounds equal the reference, and orders of fixed vectors behave as published."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from experiments import herding
from tests import reference


@pytest.mark.parametrize("norm", [np.inf, 2])
@pytest.mark.parametrize("workers,units", [(1, 1), (1, 9), (3, 8)])
def test_bounds_equal_the_reference(workers, units, norm):
    rng = np.random.default_rng(units)
    vectors = rng.normal(size=(workers, units, 5)).astype(np.float32)
    orders = np.stack([rng.permutation(units) for _ in range(workers)])
    expected = reference.parallel_herding_bound(vectors, orders, norm)
    actual = ordering.baselines.herding_bound(jnp.asarray(vectors), jnp.asarray(orders), norm=norm)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
    if workers == 1:
        alone = (jnp.asarray(x[0]) for x in (vectors, orders))
        assert ordering.baselines.herding_bound(*alone, norm=norm) == actual


def test_the_bound_of_coordinated_orders_does_not_grow_with_the_workers():
    """The published experiment, smaller: 8,000 vectors of dimension 16, 10 rounds."""
    bounds = {}
    for workers in (4, 20):
        vectors = herding.unit_vectors(workers, 8_000 // workers)
        for name in ("id_pair", "cd_grab"):
            first, *_, last = herding.bounds_over_rounds(vectors, name, rounds=10)
            bounds[name, workers] = last
        assert last < 4 < 30 < first
    assert bounds["id_pair", 20] > 1.5 * bounds["id_pair", 4]
    assert bounds["id_pair", 20] > 3 * bounds["cd_grab", 20]


def test_bound_of_the_training_metric_equals_the_function(monkeypatch):
    """trainer/measure.py, which reads the data twice, against the bound of stacked gradients."""
    import models
    from experiments.trainer import measure

    model = models.softmax_regression(num_features=5, num_classes=3)
    rng = np.random.default_rng(0)
    data = {
        "x": rng.normal(size=(4, 7, 1, 5)).astype(np.float32),
        "y": rng.integers(0, 3, (4, 7, 1)).astype(np.int32),
    }
    params = jax.tree.map(lambda p: p + 0.1, model.init(jax.random.key(0)))
    orders = jnp.asarray(np.stack([rng.permutation(7) for _ in range(4)]))
    monkeypatch.setattr(measure, "HELD", 2 * 18)  # two of seven units at once
    measured = measure.order_bounds(model, 4, num_units=7)

    def unit_gradient(x, y):
        grad = jax.grad(lambda p: model.loss(p, {"x": x, "y": y}, None)[0])(params)
        return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(grad)])

    vectors = jax.jit(jax.vmap(jax.vmap(unit_gradient)))(data["x"], data["y"])
    for actual, norm in zip(measured(params, orders, data), (jnp.inf, 2), strict=True):
        expected = ordering.baselines.herding_bound(vectors, orders, norm=norm)
        np.testing.assert_allclose(actual, expected, rtol=1e-4)
