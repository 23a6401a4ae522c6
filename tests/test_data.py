"""Tasks on real data that lie beside the checkout; skipped, with the reason, where they do not."""

import pathlib

import numpy as np
import pytest

from experiments.tasks import TASKS

DATA = pathlib.Path(__file__).resolve().parents[1].parent / "shared" / "data"


def need(folder):
    if not (DATA / folder).exists():
        pytest.skip(f"no data in ../shared/data/{folder}")
    return str(DATA / folder)


def test_hmda_has_twenty_standardised_features():
    task = TASKS["hmda"](need("hmda"))
    assert task.train["x"].shape == (238666, 20) and task.test["x"].shape == (59667, 20)
    np.testing.assert_allclose(task.train["x"][:, :19].mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(task.train["x"][:, 19], 1)
    assert 0.8 < task.train["y"].mean() < 0.9


def test_mnist_from_a_prepared_set():
    pytest.importorskip("tensorflow_datasets")
    from experiments.tasks import mnist

    source = mnist.source(need("tfds"), "test")
    arrays = mnist.as_arrays([source[i] for i in range(20)])
    assert arrays["x"].shape == (20, 28, 28, 1) and arrays["x"].max() <= 1
    assert arrays["y"].dtype == np.int32
