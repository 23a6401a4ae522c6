"""Tasks on real data that lie beside the checkout; skipped, with the reason, where they do not."""

import pathlib

import numpy as np
import pytest

from experiments.tasks import TASKS, cifar10, prepared

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
    source = prepared.source("mnist", need("tfds"), "test")
    arrays = prepared.as_arrays([source[i] for i in range(20)])
    assert arrays["x"].shape == (20, 28, 28, 1) and arrays["x"].max() <= 1
    assert arrays["y"].dtype == np.int32


def test_cifar10_from_a_prepared_set():
    pytest.importorskip("tensorflow_datasets")
    folder = need("tfds")
    task = TASKS["cifar10"](folder, "vit", num_train=500, num_test=100)
    assert task.train["x"].shape == (500, 16, 16, 3) and task.test["x"].shape == (100, 16, 16, 3)
    assert task.train["x"].dtype == np.float32 and task.train["y"].dtype == np.int32
    np.testing.assert_allclose(task.train["x"].mean(axis=(0, 1, 2)), 0, atol=0.15)
    assert set(task.test["y"]) == set(range(10))
    source = prepared.source("cifar10", folder, "test")
    first = prepared.subset(source, 100, name="num_test")[0]
    image = (source[int(first)]["image"] / 255 - cifar10.MEAN) / cifar10.DEVIATION
    corner = image[:2, :2].mean(axis=(0, 1))
    np.testing.assert_allclose(task.test["x"][0, 0, 0], corner, atol=1e-4)
    whole = cifar10.read(source, 100, 32)
    np.testing.assert_allclose(whole["x"][0], image, atol=1e-5)


@pytest.mark.parametrize(
    "settings,word",
    [({"model": "lenet"}, "models"), ({"size": 8}, "side 32"), ({}, "download_and_prepare")],
)
def test_cifar10_says_what_is_wrong(settings, word):
    with pytest.raises(ValueError, match=word):
        TASKS["cifar10"](**settings)


def test_a_subset_is_seeded_and_in_order():
    chosen = prepared.subset(range(100), 30, name="num_train")
    np.testing.assert_array_equal(chosen, prepared.subset(range(100), 30, name="num_train"))
    assert len(set(chosen)) == 30 and np.all(np.diff(chosen) > 0)
    with pytest.raises(ValueError, match="num_train is 101"):
        prepared.subset(range(100), 101, name="num_train")
