"""Models: sizes by hand, batch normalisation with given moments, and who sees which token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import models

SHAPE, CLASSES = (8, 8, 3), 7
RESNET = models.small_resnet(image_shape=SHAPE, num_classes=CLASSES, widths=(4, 6, 8))
VIT = models.vit(image_shape=SHAPE, num_classes=CLASSES, width=12, depth=2, heads=3, mlp_ratio=2)
MOBILENET = models.mobilenet_v2(
    image_shape=SHAPE,
    num_classes=CLASSES,
    stages=((1, 4, 1, 1), (2, 6, 1, 2)),
    stem_channels=4,
    head_channels=16,
)
VOCABULARY, CONTEXT = 11, 6
DECODER = {"vocab_size": VOCABULARY, "context": CONTEXT, "width": 8, "depth": 2, "heads": 2}
GPT2 = models.gpt2(**DECODER)


def batch_of(key, n=5):
    return {"x": jax.random.normal(key, (n, *SHAPE)), "y": jnp.arange(n) % CLASSES}


def tokens_of(key, n=5, length=CONTEXT):
    text = jax.random.randint(key, (n, length + 1), 0, VOCABULARY)
    return {"x": text[:, :-1], "y": text[:, 1:]}


def params_of(model, key):
    """Random parameters from one draw: to compile the draws of `init` takes ten seconds."""
    flat, unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, jax.eval_shape(model.init, key)))
    return unravel(0.3 * jax.random.normal(key, flat.shape))


def count(model, key):
    return sum(p.size for p in jax.tree.leaves(jax.eval_shape(model.init, key)))


def blocks_of_resnet():
    pairs = [(4, 4), (4, 4), (4, 6), (6, 6), (6, 8), (8, 8)]
    return sum(9 * a * b + 2 * b + 9 * b * b + 2 * b for a, b in pairs)


GPT2_BLOCK = 2 * 16 + (8 * 24 + 24 + 8 * 8 + 8) + (8 * 32 + 32 + 32 * 8 + 8)
VIT_BLOCK = 2 * (2 * 12) + 4 * (12 * 12 + 12) + (12 * 24 + 24) + (24 * 12 + 12)
PLAIN, EXPANDED = 9 * 4 + 2 * 4 + 4 * 4 + 2 * 4, 4 * 8 + 2 * 8 + 9 * 8 + 2 * 8 + 8 * 6 + 2 * 6


def test_sizes_by_hand(key):
    two = models.small_resnet(image_shape=SHAPE, num_classes=CLASSES, widths=(4, 6, 8), blocks=2)
    assert count(two, key) == 27 * 4 + 2 * 4 + blocks_of_resnet() + 8 * CLASSES + CLASSES
    default = jax.tree.leaves(jax.eval_shape(models.small_resnet().init, key))
    assert sum(p.ndim > 1 for p in default) == 6 * 1 + 2
    embed = 4 * 4 * 3 * 12 + 12 + 4 * 12
    assert count(VIT, key) == embed + 2 * VIT_BLOCK + 2 * 12 + 12 * CLASSES + CLASSES
    ends = 27 * 4 + 2 * 4 + 6 * 16 + 2 * 16
    assert count(MOBILENET, key) == ends + PLAIN + EXPANDED + 16 * CLASSES + CLASSES
    assert count(GPT2, key) == VOCABULARY * 8 + CONTEXT * 8 + 2 * GPT2_BLOCK + 16


@pytest.mark.parametrize(
    "channels,width,scaled",
    [(20, 1.0, 20), (16, 0.5, 8), (24, 0.75, 24), (32, 1.4, 48), (96, 0.35, 32), (8, 0.25, 8)],
)
def test_scaled_channels_are_multiples_of_eight(channels, width, scaled):
    from models.mobilenet import _scaled

    assert _scaled(channels, width) == scaled


def test_vit_reads_the_patches_in_place(key):
    from models.vit import _patches

    x = batch_of(key)["x"]
    np.testing.assert_array_equal(_patches(x, 4)[:, 1], x[:, :4, 4:].reshape(5, -1))
    assert VIT.statistics is None


def decoder(params, x):
    """GPT-2 in numpy, one sequence and one head at a time."""

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


def test_gpt2_is_the_published_decoder(key):
    init, data = jax.random.split(key)
    params, batch = params_of(GPT2, init), tokens_of(data, n=2, length=4)
    exact = jax.tree.map(lambda p: np.asarray(p, np.float64), params)
    expected = np.stack([decoder(exact, np.asarray(x)) for x in batch["x"]])
    np.testing.assert_allclose(jax.jit(GPT2.predict)(params, batch["x"]), expected, atol=1e-4)
    scores = expected - np.log(np.exp(expected).sum(axis=-1, keepdims=True))
    chosen = np.take_along_axis(scores, np.asarray(batch["y"])[..., None], axis=-1)
    losses = jax.jit(GPT2.loss)(params, batch, None)
    np.testing.assert_allclose(losses, -chosen[..., 0].mean(axis=1), atol=1e-4)


def test_gpt2_starts_as_published(key):
    model = models.gpt2(vocab_size=200, context=50, width=64, depth=1, heads=4)
    params = jax.jit(model.init)(key)
    block = params["block0"]
    for weights in (params["tokens"], params["positions"], block["attention"]["qkv"]["kernel"]):
        np.testing.assert_allclose(np.std(weights), 0.02, rtol=0.05)
    for weights in (block["attention"]["project"]["kernel"], block["dense2"]["kernel"]):
        np.testing.assert_allclose(np.std(weights), 0.02 / np.sqrt(2), rtol=0.05)
    assert not np.any(block["dense1"]["bias"]) and not np.any(block["attention"]["qkv"]["bias"])


def test_gpt2_refuses_a_sequence_longer_than_its_context(key):
    params = jax.eval_shape(GPT2.init, key)
    with pytest.raises(ValueError, match="have 7 tokens and context is 6"):
        jax.eval_shape(GPT2.predict, params, jnp.zeros((1, CONTEXT + 1), jnp.int32))


def test_the_convolutions_of_lenet_are_those_of_flax():
    from models.convolutions import _LeNet

    net = _LeNet(28, 1, 10, nnx.Rngs(0))
    image = jax.random.normal(jax.random.key(0), (2, 28, 28, 1))
    inner = jax.random.normal(jax.random.key(1), (2, 14, 14, 6))
    for conv, x in ((net.conv1, image), (net.conv2, inner)):
        expected = nnx.Conv.__call__(conv, x)
        # float32 sums of up to 150 products of numbers of order one, in another order
        np.testing.assert_allclose(conv(x), expected, atol=1e-5)


FORMS = {  # what the program for a CPU lacks
    "lenet": (models.lenet, {"x": np.ones((2, 28, 28, 1)), "y": np.zeros(2, int)}, "conv_general"),
    "gpt2": (
        lambda: models.gpt2(vocab_size=7, context=5, width=4, depth=1, heads=1),
        {"x": np.ones((2, 5), int), "y": np.zeros((2, 5), int)},
        "f32[2,5,7] = dot_general",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_only_for_a_cpu_are_products_and_convolutions_rearranged(name, monkeypatch, key):
    build, batch, form = FORMS[name]
    model = build()
    params, batch = params_of(model, key), jax.tree.map(jnp.asarray, batch)
    # A new function each time: what was traced is kept.
    program = lambda: str(jax.make_jaxpr(lambda *a: model.loss(*a))(params, batch, key))  # noqa: E731
    assert form not in program()
    expected = model.loss(params, batch, key)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert form in program()
    np.testing.assert_allclose(model.loss(params, batch, key), expected, rtol=1e-5)
