"""Tasks on real data that lie beside the checkout; skipped, with the reason, where they do not."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.measures import sums
from experiments.measures.metrics import METRICS
from experiments.tasks import TASKS, cifar10, prepared, tinyshakespeare
from syncopate import models

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
    [({"model": "alexnet"}, "mobilenet"), ({"size": 8}, "side 32"), ({}, "download_and_prepare")],
)
def test_cifar10_says_what_is_wrong(settings, word):
    with pytest.raises(ValueError, match=word):
        TASKS["cifar10"](**settings)


def test_tinyshakespeare_has_all_windows_of_its_text():
    task = TASKS["tinyshakespeare"](need("tinyshakespeare"))
    assert task.train["x"].shape == (15685, 64) and task.test["x"].shape == (1742, 64)
    assert task.train["x"].dtype == task.train["y"].dtype == np.int32
    assert task.train["y"].max() == 64
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    assert params["tokens"].shape == (65, 64)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "input.txt").write_text("to be\nor not" * 10, encoding="utf-8")
    return str(tmp_path)


def test_windows_of_characters_and_the_next_ones(text):
    task = TASKS["tinyshakespeare"](text, length=4)
    letters = np.array(sorted(set("to be\nor not")))
    assert "".join(letters[task.train["x"][:3].ravel()]) == "to be\nor not"
    assert "".join(letters[task.train["y"][:3].ravel()]) == "o be\nor nott"
    assert task.train["x"].shape == (26, 4) and task.test["x"].shape == (2, 4)


def test_sequences_are_evaluated_by_the_mean_of_their_tokens(text, monkeypatch):
    test = TASKS["tinyshakespeare"](text, length=4).train
    table = np.random.default_rng(0).normal(size=(9, 9)).astype(np.float32)
    bigrams = models.Model(None, None, lambda table, x: table[x])
    logits = table[test["x"]]
    scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    loss = -np.mean(np.take_along_axis(scores, test["y"][..., None], axis=-1))
    share = np.mean(logits.argmax(axis=-1) == test["y"])
    monkeypatch.setattr(sums, "CHUNK", 10)
    assert 0 < share < 1
    for name, expected in (("accuracy", share), ("loss", loss)):
        found = METRICS[name].measure(bigrams)(jnp.asarray(table), None, test)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "settings,word",
    [({"model": "vit"}, "'gpt2' only"), ({"length": 0}, "length is 0"), ({"length": 12}, "has 12")],
)
def test_tinyshakespeare_says_what_is_wrong(settings, word, text):
    with pytest.raises(ValueError, match=word):
        TASKS["tinyshakespeare"](text, **settings)


def test_missing_text_says_where_to_get_it(tmp_path):
    for folder in (None, str(tmp_path)):
        with pytest.raises(ValueError, match=tinyshakespeare.SOURCE):
            TASKS["tinyshakespeare"](folder)


def test_a_subset_is_seeded_and_in_order():
    chosen = prepared.subset(range(100), 30, name="num_train")
    np.testing.assert_array_equal(chosen, prepared.subset(range(100), 30, name="num_train"))
    assert len(set(chosen)) == 30 and np.all(np.diff(chosen) > 0)
    with pytest.raises(ValueError, match="num_train is 101"):
        prepared.subset(range(100), 101, name="num_train")
