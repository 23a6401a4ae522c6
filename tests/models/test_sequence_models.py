"""Models of sequences and perceptrons on vectors: published sizes, slow references, precision."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models

VOCABULARY, LENGTH, WIDTH = 13, 5, 6
LSTM = {"vocab_size": VOCABULARY, "width": WIDTH, "depth": 2}
DECODER = {"vocab_size": VOCABULARY, "context": LENGTH, "width": 16, "depth": 1, "heads": 2}
IMAGES = {"image_shape": (4, 4, 3), "num_classes": 3, "patch": 2}
VIT = IMAGES | {"width": 16, "depth": 1, "heads": 2, "pool": "class", "gelu": "exact"}


def count(model):
    return sum(p.size for p in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


def params_of(model, seed=0, deviation=0.3):
    """Drawn by NumPy: to compile the draws of `init` takes seconds."""
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


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def test_lstm_equals_the_slow_reference():
    model = models.lstm(**LSTM, l2=0.1)
    params, batch = params_of(model), tokens_of()
    both = jax.jit(lambda p, b: (model.predict(p, b["x"]), model.loss(p, b, None)))
    logits, losses = both(params, batch)
    assert logits.shape == (3, LENGTH, VOCABULARY)
    expected = lstm_by_hand(float64(params), batch["x"])
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    expected = cross_entropies(expected, batch["y"]).mean(axis=1) + 0.05 * squares(params)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def joined(params):
    return np.concatenate([np.ravel(p) for p in jax.tree.leaves(params)])


def test_lstm_starts_uniform(key):
    params = jax.jit(models.lstm(vocab_size=400, width=25, depth=1).init)(key)
    for weights, bound in ((params["tokens"], 0.1), (joined(params["layer0"]), 0.2)):
        assert 0.98 * bound < np.max(np.abs(weights)) <= bound
        np.testing.assert_allclose(np.std(weights), bound / math.sqrt(3), rtol=0.05)


PRECISE = {"lstm": (models.lstm, LSTM), "gpt2": (models.gpt2, DECODER), "vit": (models.vit, VIT)}


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


def inputs_of(primitive, jaxpr):
    """The types that go into every such operation, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield {x.aval.dtype.name for x in equation.invars}
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            yield from inputs_of(primitive, inner) if hasattr(inner, "eqns") else ()


# per layer: LSTM 2; GPT-2 and ViT scores, values and their dense layers
@pytest.mark.parametrize("name,rounded,rest", [("lstm", 5, 0), ("gpt2", 7, 0), ("vit", 9, 1)])
def test_bfloat16_goes_into_all_products_but_the_head_of_a_vit_and_no_softmax(name, rounded, rest):
    build, settings = PRECISE[name]
    model = build(**settings, dtype="bfloat16")
    x = normal(3, 4, 4, 3) if name == "vit" else tokens_of()["x"]
    jaxpr = jax.make_jaxpr(model.predict)(params_of(model), jnp.asarray(x)).jaxpr
    found = list(inputs_of("dot_general", jaxpr))
    assert found.count({"bfloat16"}) == rounded and found.count({"float32"}) == rest
    assert len(found) == rounded + rest
    assert list(inputs_of("exp", jaxpr)) == [{"float32"}] * (name != "lstm")


def normalised(x, norm, epsilon):
    return (x - x.mean()) / np.sqrt(x.var() + epsilon) * norm["scale"] + norm["bias"]


GELU = {
    "exact": lambda x: 0.5 * x * (1 + np.array([math.erf(a / math.sqrt(2)) for a in x])),
    "tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}


@pytest.mark.parametrize("gelu", GELU)
def test_logits_of_a_vit_are_those_of_its_class_token(gelu):
    """Where attention brings it nothing from the patches, by hand; else it sees the image."""
    epsilon = 0.3
    model = models.vit(**VIT | {"gelu": gelu, "epsilon": epsilon})
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


def perceptron_by_hand(params, x):
    for k, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"]
        x = np.maximum(x, 0) if k < len(params) - 1 else x
    return x


def test_loss_of_the_forecaster_is_the_mean_squared_error_of_an_example():
    model = models.forecaster(lags=4, horizon=3, hidden=(5, 6), l2=0.2)
    params, batch = params_of(model), {"x": normal(7, 4), "y": normal(7, 3, seed=2)}
    assert [layer["w"].shape for layer in params] == [(4, 5), (5, 6), (6, 3)]
    expected = perceptron_by_hand(float64(params), float64(batch["x"]))
    np.testing.assert_allclose(jax.jit(model.predict)(params, batch["x"]), expected, atol=1e-5)
    losses = np.square(expected - float64(batch["y"])).mean(axis=1)
    losses = losses + 0.1 * squares(params)
    np.testing.assert_allclose(jax.jit(model.loss)(params, batch, None), losses, rtol=1e-5)


def test_forecaster_refuses_targets_of_another_horizon():
    model = models.forecaster(lags=4, horizon=3, hidden=(5,))
    params = params_of(model)
    with pytest.raises(ValueError, match=r"y has shape \(2,\) and the forecast \(2, 3\)"):
        model.loss(params, {"x": jnp.ones((2, 4)), "y": jnp.ones(2)}, None)


@pytest.mark.parametrize("hidden", [(), (5,)])
def test_loss_of_the_text_head_is_the_cross_entropy_of_its_logits(hidden):
    model = models.text_head(num_features=4, num_classes=3, hidden=hidden, l2=0.2)
    params, x = params_of(model), normal(6, 4)
    y = np.arange(6) % 3
    assert [layer["b"].shape for layer in params] == [(n,) for n in (*hidden, 3)]
    losses = cross_entropies(perceptron_by_hand(float64(params), float64(x)), y)
    losses = losses + 0.1 * squares(params)
    np.testing.assert_allclose(
        jax.jit(model.loss)(params, {"x": x, "y": jnp.asarray(y)}, None), losses, rtol=1e-5
    )
