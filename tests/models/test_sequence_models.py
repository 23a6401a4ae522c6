"""Sequence models and perceptrons: slow references in NumPy, initial values, precision.

NumPy draws the parameters: compiling the draws of `init` takes seconds.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models

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


def norm_by_hand(h, p, epsilon):
    h = h - h.mean(axis=-1, keepdims=True)
    return h / np.sqrt((h**2).mean(axis=-1, keepdims=True) + epsilon) * p["scale"] + p["bias"]


def dense_by_hand(h, p):
    return h @ p["kernel"] + p["bias"]


def attention_by_hand(q, k, v, causal):
    """One head: [L, d]."""
    weights = np.exp(q @ k.T / np.sqrt(q.shape[1]))
    weights = np.tril(weights) if causal else weights
    return weights / weights.sum(axis=-1, keepdims=True) @ v


GELU = {
    "exact": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
    "tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


def gpt2_by_hand(params, x):
    """One sequence and one head at a time, in float64."""
    h = params["tokens"][x] + params["positions"][: len(x)]
    for block in (params["block0"], params["block1"]):
        parts = dense_by_hand(norm_by_hand(h, block["norm1"], 1e-5), block["attention"]["qkv"])
        q, k, v = np.split(parts, 3, axis=-1)
        each = (slice(0, 4), slice(4, 8))
        heads = [attention_by_hand(q[:, head], k[:, head], v[:, head], True) for head in each]
        h = h + dense_by_hand(np.concatenate(heads, axis=-1), block["attention"]["project"])
        u = dense_by_hand(norm_by_hand(h, block["norm2"], 1e-5), block["dense1"])
        h = h + dense_by_hand(GELU["tanh"](u), block["dense2"])
    return norm_by_hand(h, params["norm"], 1e-5) @ params["tokens"].T


def vit_by_hand(params, image, gelu, pool):
    """One image and one head at a time, in float64; patches of 2 x 2 pixels, row by row."""
    places = [(i, j) for i in range(0, len(image), 2) for j in range(0, image.shape[1], 2)]
    patches = np.stack([image[i : i + 2, j : j + 2].ravel() for i, j in places])
    h = dense_by_hand(patches, params["embed"])
    if pool == "class":
        h = np.concatenate([params["class_token"][0], h])
    h = h + params["positions"][0]
    block = params["block0"]
    u, attention = norm_by_hand(h, block["norm1"], 1e-6), block["attention"]
    for i in range(2):
        q, k, v = (
            u @ attention[name]["kernel"][:, i] + attention[name]["bias"][i]
            for name in ("query", "key", "value")
        )
        h = h + attention_by_hand(q, k, v, False) @ attention["out"]["kernel"][i]
    h = h + attention["out"]["bias"]
    u = GELU[gelu](dense_by_hand(norm_by_hand(h, block["norm2"], 1e-6), block["dense1"]))
    h = norm_by_hand(h + dense_by_hand(u, block["dense2"]), params["norm"], 1e-6)
    return dense_by_hand(h[0] if pool == "class" else h.mean(axis=0), params["dense"])


REFERENCES = {
    "lstm": (models.lstm, LSTM, lstm_by_hand),
    "gpt2": (models.gpt2, DECODER, lambda p, x: np.stack([gpt2_by_hand(p, row) for row in x])),
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
    drawn = np.concatenate([np.ravel(p) for p in jax.tree.leaves(params["layer0"])])
    for weights, bound in ((params["tokens"], 0.1), (drawn, 0.2)):  # uniform
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


@pytest.mark.parametrize("gelu,pool", [("exact", "class"), ("tanh", "mean")])
def test_a_vit_equals_the_slow_reference(gelu, pool):
    model = models.vit(**VIT | {"gelu": gelu, "pool": pool})
    params, images = params_of(model, deviation=0.8), normal(2, 4, 4, 3)
    expected = [vit_by_hand(float64(params), image, gelu, pool) for image in float64(images)]
    assert np.ptp(expected, axis=0).max() > 1e-2
    actual = jax.jit(model.predict)(params, images)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)


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
    actual = jax.jit(lambda *a: model.loss(*a))(params, batch, key)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
