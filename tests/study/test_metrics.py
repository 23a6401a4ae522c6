"""Test metrics equal NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

import models
from experiments.tasks import metrics
from experiments.tasks.metrics import METRICS


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(metrics, "CHUNK", 4)


@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_smape_rolls_a_forecast_out(horizon):
    """Each forecast is the sum of the last two known values: Fibonacci."""

    def predict(params, x):
        ahead = [x]
        for _ in range(horizon):
            ahead.append(ahead[-1][:, -1:] + (ahead[-1][:, -2:-1] if ahead[-1].shape[1] > 1
                                              else ahead[-2][:, -1:]))  # fmt: skip
        return jnp.concatenate(ahead[1:], axis=1)

    x = np.array([[1.0, 1.0], [0.0, 2.0]], np.float32)
    y = np.array([[2.0, 2.0, 5.0, 8.0], [2.0, 4.0, -6.0, 10.0]], np.float32)
    forecast = np.array([[2.0, 3.0, 5.0, 8.0], [2.0, 4.0, 6.0, 10.0]])
    expected = np.mean(200 * np.abs(y - forecast) / (np.abs(y) + np.abs(forecast)))
    model = models.Model(None, None, predict)
    found = METRICS["smape"].measure(model)(None, None, {"x": x, "y": y})
    assert float(found) == pytest.approx(expected, rel=1e-6)
