"""Sequence models and perceptrons: slow references in NumPy, initial values, precision.

NumPy draws the parameters: compiling the draws of `init` takes seconds.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.vit import _patches

VOCABULARY, LENGTH, WIDTH = 13, 5, 6
LSTM = {"vocab_size": VOCABULARY, "width": WIDTH, "depth": 2}
DECODER = {"vocab_size": VOCABULARY, "context": LENGTH, "width": 8, "depth": 2, "heads": 2}
IMAGES = {"image_shape": (4, 4, 3), "num_classes": 3, "patch": 2}
VIT = IMAGES | {"width": 16, "depth": 1, "heads": 2, "pool": "class", "gelu": "exact"}


def params_of(model, seed=0, deviation=0.3):
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda p: np.float32(deviation * rng.standard_normal(p.shape)), shapes)


def normal(*shape, seed=1):
    return np.float32(np.random.default_rng(seed).standard_normal(shape))


def tokens_of(seed=1, n=3):
    text = np.random.default_rng(seed).integers(VOCABULARY, size=(n, LENGTH + 1), dtype=np.int32)
    return {"x": text[:, :-1], "y": text[:, 1:]}


def squares(params):
    return sum(np.sum(np.square(p)) for p in jax.tree.leaves(float64(params)))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def cross_entropies(logits, y):
    scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return -np.take_along_axis(scores, y[..., None], axis=-1)[..., 0]


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def lstm_by_hand(params, x):
    """One sequence, one token, one layer at a time, in float64."""
    logits = np.empty((*x.shape, VOCABULARY))
    names = [name for name in params if name.startswith("layer")]
    for n, sequence in enumerate(x):
        h, c = {name: np.zeros(WIDTH) for name in names}, {name: np.zeros(WIDTH) for name in names}
        for t, token in enumerate(sequence):
            below = params["tokens"][token]
            for name in names:
                layer = params[name]
                gates = below @ layer["input"] + layer["bias_input"]
                gates = gates + h[name] @ layer["recurrent"] + layer["bias_recurrent"]
                i, f, g, o = gates.reshape(4, WIDTH)
                c[name] = sigmoid(f) * c[name] + sigmoid(i) * np.tanh(g)
                below = h[name] = sigmoid(o) * np.tanh(c[name])
            logits[n, t] = params["tokens"] @ below
    return logits


def gpt2_by_hand(params, x):
    """One sequence and one head at a time, in float64."""

    def norm(h, p):
        h = h - h.mean(axis=-1, keepdims=True)
        return h / np.sqrt((h**2).mean(axis=-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def dense(h, p):
        return h @ p["kernel"] + p["bias"]

    def attention(h, p):
        q, k, v = np.split(dense(h, p["qkv"]), 3, axis=-1)
        outputs = []
        for head in (slice(0, 4), slice(4, 8)):
            weights = np.tril(np.exp(q[:, head] @ k[:, head].T / 2))
            outputs.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, head])
        return dense(np.concatenate(outputs, axis=-1), p["project"])

    h = params["tokens"][x] + params["positions"][: len(x)]
    for block in (params["block0"], params["block1"]):
        h = h + attention(norm(h, block["norm1"]), block["attention"])
        u = dense(norm(h, block["norm2"]), block["dense1"])
        u = u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))
        h = h + dense(u, block["dense2"])
    return norm(h, params["norm"]) @ params["tokens"].T


REFERENCES = {
    "lstm": (models.lstm, LSTM, lstm_by_hand),
    "gpt2": (models.gpt2, DECODER, lambda p, x: np.stack([gpt2_by_hand(p, own) for own in x])),
}


@pytest.mark.parametrize("build,settings,by_hand", REFERENCES.values(), ids=REFERENCES)
def test_a_language_model_equals_the_slow_reference(build, settings, by_hand):
    model = build(**settings, l2=0.1)
    params, batch = params_of(model), tokens_of()
    both = jax.jit(lambda p, b: (model.predict(p, b["x"]), model.loss(p, b, None)))
    logits, losses = both(params, batch)
    assert logits.shape == (3, LENGTH, VOCABULARY)
    expected = by_hand(float64(params), batch["x"])
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    expected = cross_entropies(expected, batch["y"]).mean(axis=1) + 0.05 * squares(params)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_language_models_start_as_published(key):
    params = jax.jit(models.lstm(vocab_size=400, width=25, depth=1).init)(key)
    own = np.concatenate([np.ravel(p) for p in jax.tree.leaves(params["layer0"])])
    for weights, bound in ((params["tokens"], 0.1), (own, 0.2)):  # uniform
        assert 0.98 * bound < np.max(np.abs(weights)) <= bound
        np.testing.assert_allclose(np.std(weights), bound / math.sqrt(3), rtol=0.05)
    params = jax.jit(models.gpt2(vocab_size=200, context=50, width=64, depth=1, heads=4).init)(key)
    attention, last = params["block0"]["attention"], params["block0"]["dense2"]["kernel"]
    for weights in (params["tokens"], params["positions"], attention["qkv"]["kernel"]):
        np.testing.assert_allclose(np.std(weights), 0.02, rtol=0.05)
    for weights in (attention["project"]["kernel"], last):
        np.testing.assert_allclose(np.std(weights), 0.02 / np.sqrt(2), rtol=0.05)
    assert not np.any(params["block0"]["dense1"]["bias"]) and not np.any(attention["qkv"]["bias"])


PRECISE = {
    "lstm": (models.lstm, LSTM),
    "gpt2": (models.gpt2, DECODER | {"depth": 1}),
    "vit": (models.vit, VIT),
}


@pytest.mark.parametrize("name", PRECISE)
def test_bfloat16_is_near_float32_and_leaves_parameters_and_logits_float32(name, key):
    build, settings = PRECISE[name]
    plain, rounded = build(**settings), build(**settings, dtype="bfloat16")
    shapes = jax.eval_shape(rounded.init, key)
    assert jax.tree.all(jax.tree.map(lambda p: p.dtype == jnp.float32, shapes))
    params, data = params_of(plain), tokens_of()
    if name == "vit":
        data = {"x": normal(3, 4, 4, 3), "y": np.arange(3)}
    both = jax.jit(lambda params: [m.predict(params, data["x"]) for m in (plain, rounded)])
    logits, close = both(params)
    assert logits.dtype == close.dtype == jnp.float32
    error = float(jnp.std(close - logits) / jnp.std(logits))
    assert 1e-4 < error < 2e-2  # a rounding is 2^-9 of a number, 0.2 %
    assert np.any(close != close.astype(jnp.bfloat16)), "logits are not rounded"
    losses = jax.eval_shape(rounded.loss, params, data, None)
    assert losses.dtype == jnp.float32


def normalised(x, norm, epsilon):
    return (x - x.mean()) / np.sqrt(x.var() + epsilon) * norm["scale"] + norm["bias"]


GELU = {
    "exact": lambda x: 0.5 * x * (1 + np.array([math.erf(a / math.sqrt(2)) for a in x])),
    "tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("gelu", GELU)
def test_a_vit_computes_logits_from_its_class_token(gelu):
    """Where attention brings it nothing from the patches, by hand; else it sees the image."""
    epsilon = 1e-6
    model = models.vit(**VIT | {"gelu": gelu})
    params, images = params_of(model, deviation=0.8), normal(2, 4, 4, 3)
    predict = jax.jit(model.predict)
    seen = np.asarray(predict(params, images))
    assert np.max(np.abs(seen[0] - seen[1])) > 1e-2

    params["block0"]["attention"]["out"] = jax.tree.map(
        np.zeros_like, params["block0"]["attention"]["out"]
    )
    p = float64(params)
    block, x = p["block0"], p["class_token"][0, 0] + p["positions"][0, 0]
    hidden = normalised(x, block["norm2"], epsilon) @ block["dense1"]["kernel"]
    hidden = GELU[gelu](hidden + block["dense1"]["bias"])
    x = x + hidden @ block["dense2"]["kernel"] + block["dense2"]["bias"]
    expected = normalised(x, p["norm"], epsilon) @ p["dense"]["kernel"] + p["dense"]["bias"]
    np.testing.assert_allclose(predict(params, images), [expected] * 2, rtol=2e-5, atol=2e-5)


def test_patches_of_a_vit_are_cut_row_by_row():
    x = normal(5, 8, 8, 3)
    np.testing.assert_array_equal(_patches(x, 4)[:, 1], x[:, :4, 4:].reshape(5, -1))


def perceptron_by_hand(params, x):
    for k, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"]
        x = np.maximum(x, 0) if k < len(params) - 1 else x
    return x


@pytest.mark.parametrize("hidden", [(), (5, 6)])
def test_losses_of_perceptrons_follow_from_their_outputs(hidden):
    batch = {"x": normal(7, 4), "y": np.arange(7) % 3}
    targets = normal(7, 3, seed=2)
    classes = models.mlp(num_features=4, num_classes=3, hidden=hidden, l2=0.2)
    values = models.forecaster(lags=4, horizon=3, hidden=hidden, l2=0.2)
    params = params_of(classes)
    assert [layer["b"].shape for layer in params] == [(n,) for n in (*hidden, 3)]
    outputs = perceptron_by_hand(float64(params), float64(batch["x"]))
    np.testing.assert_allclose(jax.jit(values.predict)(params, batch["x"]), outputs, atol=1e-5)
    expected = cross_entropies(outputs, batch["y"]) + 0.1 * squares(params)
    np.testing.assert_allclose(jax.jit(classes.loss)(params, batch, None), expected, rtol=1e-5)
    expected = np.square(outputs - float64(targets)).mean(axis=1) + 0.1 * squares(params)
    losses = jax.jit(values.loss)(params, {**batch, "y": targets}, None)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


FORMS = {  # what the program for a CPU lacks
    "lenet": (models.lenet, {"x": np.ones((2, 28, 28, 1)), "y": np.zeros(2, int)}, "conv_general"),
    "gpt2": (
        lambda: models.gpt2(vocab_size=7, context=5, width=4, depth=1, heads=1),
        {"x": np.ones((2, 5), int), "y": np.zeros((2, 5), int)},
        "f32[2,5,7] = dot_general",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_products_and_convolutions_are_rearranged_only_for_cpus(name, monkeypatch, key):
    build, batch, form = FORMS[name]
    model = build()
    params, batch = jax.tree.map(jnp.asarray, (params_of(model), batch))
    # A new function each time: what was traced is kept.
    program = lambda: str(jax.make_jaxpr(lambda *a: model.loss(*a))(params, batch, key))  # noqa: E731
    assert form not in program()
    expected = jax.jit(lambda *a: model.loss(*a))(params, batch, key)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert form in program()
    found = jax.jit(lambda *a: model.loss(*a))(params, batch, key)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
