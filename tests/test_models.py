"""Models: sizes by hand, batch normalisation with given moments, and who sees which token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

from syncopate import models

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


def test_resnet_size(key):
    stem = 27 * 4 + 2 * 4
    pairs = [(4, 4), (4, 4), (4, 6), (6, 6), (6, 8), (8, 8)]
    blocks = sum(9 * a * b + 2 * b + 9 * b * b + 2 * b for a, b in pairs)
    model = models.small_resnet(image_shape=SHAPE, num_classes=CLASSES, widths=(4, 6, 8), blocks=2)
    assert count(model, key) == stem + blocks + 8 * CLASSES + CLASSES


def test_depth_of_the_default_resnet(key):
    leaves = jax.tree.leaves(jax.eval_shape(models.small_resnet().init, key))
    assert sum(p.ndim > 1 for p in leaves) == 6 * 1 + 2


def test_vit_size(key):
    embed = 4 * 4 * 3 * 12 + 12 + 4 * 12
    block = 2 * (2 * 12) + 4 * (12 * 12 + 12) + (12 * 24 + 24) + (24 * 12 + 12)
    assert count(VIT, key) == embed + 2 * block + 2 * 12 + 12 * CLASSES + CLASSES


def test_mobilenet_size(key):
    stem, head = 27 * 4 + 2 * 4, 6 * 16 + 2 * 16
    plain = 9 * 4 + 2 * 4 + 4 * 4 + 2 * 4
    expanded = 4 * 8 + 2 * 8 + 9 * 8 + 2 * 8 + 8 * 6 + 2 * 6
    assert count(MOBILENET, key) == stem + plain + expanded + head + 16 * CLASSES + CLASSES


@pytest.mark.parametrize(
    "channels,width,scaled",
    [(20, 1.0, 20), (16, 0.5, 8), (24, 0.75, 24), (32, 1.4, 48), (96, 0.35, 32), (8, 0.25, 8)],
)
def test_scaled_channels_are_multiples_of_eight(channels, width, scaled):
    from syncopate.models.mobilenet import _scaled

    assert _scaled(channels, width) == scaled


def test_gpt2_size(key):
    embedding = VOCABULARY * 8 + CONTEXT * 8
    attention, perceptron = 8 * 24 + 24 + 8 * 8 + 8, 8 * 32 + 32 + 32 * 8 + 8
    assert count(GPT2, key) == embedding + 2 * (2 * 16 + attention + perceptron) + 16
    small = models.gpt2(vocab_size=50257, context=1024, width=768, depth=12, heads=12)
    assert count(small, key) == 124_439_808


def test_statistics_are_the_moments_of_the_first_convolution(key):
    init, data = jax.random.split(key)
    params, x = params_of(RESNET, init), batch_of(data)["x"]
    moments = jax.jit(RESNET.statistics)(params, x)["norm"]
    kernel = params["stem"]["kernel"]
    y = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(moments["mean"], jnp.mean(y, axis=(0, 1, 2)), atol=1e-5)
    np.testing.assert_allclose(moments["var"], jnp.var(y, axis=(0, 1, 2)), rtol=1e-4)


@pytest.mark.parametrize(
    "model,draw",
    [(RESNET, batch_of), (VIT, batch_of), (MOBILENET, batch_of), (GPT2, tokens_of)],
    ids=["resnet", "vit", "mobilenet", "gpt2"],
)
def test_losses_and_gradient(model, draw, key):
    init, data, noise = jax.random.split(key, 3)
    params, batch = params_of(model, init), draw(data)

    def mean(params):
        losses = model.loss(params, batch, noise)
        return jnp.mean(losses), losses

    (_, losses), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    assert losses.shape == (5,) and losses.dtype == jnp.float32 and np.all(np.isfinite(losses))
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))


def test_vit_reads_the_patches_in_place(key):
    from syncopate.models.vit import _patches

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


@pytest.mark.parametrize(
    "build,settings,word",
    [
        (models.small_resnet, {"image_shape": (2, 8, 3)}, "image_shape"),
        (models.small_resnet, {"widths": (16, 8, 4)}, "widths"),
        (models.small_resnet, {"widths": (16, 32)}, "widths"),
        (models.small_resnet, {"blocks": 0}, "blocks"),
        (models.small_resnet, {"l2": -1.0}, "l2"),
        (models.vit, {"num_classes": 1}, "classes"),
        (models.vit, {"patch": 5}, "patch"),
        (models.vit, {"width": 30}, "heads"),
        (models.vit, {"depth": 0}, "depth"),
        (models.gpt2, DECODER | {"vocab_size": 1}, "vocab_size"),
        (models.gpt2, DECODER | {"context": 0}, "context"),
        (models.gpt2, DECODER | {"heads": 3}, "heads"),
        (models.gpt2, DECODER | {"depth": 0}, "depth"),
        (models.gpt2, DECODER | {"l2": -1.0}, "l2"),
        (models.mobilenet_v2, {"image_shape": (3, 8, 3)}, "image_shape"),
        (models.mobilenet_v2, {"num_classes": 1}, "classes"),
        (models.mobilenet_v2, {"width": 0.0}, "width"),
        (models.mobilenet_v2, {"stages": ()}, "stages"),
        (models.mobilenet_v2, {"stages": ((6, 24, 2, 3),)}, "stages"),
        (models.mobilenet_v2, {"stages": ((6, 24, 2),)}, "stages"),
        (models.mobilenet_v2, {"stem_stride": 3}, "stem_stride"),
        (models.mobilenet_v2, {"head_channels": 0}, "head_channels"),
        (models.mobilenet_v2, {"l2": -1.0}, "l2"),
    ],
)
def test_bad_settings(build, settings, word):
    with pytest.raises(ValueError, match=word):
        build(**settings)


@pytest.mark.parametrize("side", [28, 32])
def test_the_convolutions_of_lenet_are_those_of_flax(side):
    from syncopate.models.lenet import _LeNet

    net = _LeNet(side, 1, 10, nnx.Rngs(0))
    image = jax.random.normal(jax.random.key(0), (2, side, side, 1))
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
    params, batch = model.init(key), jax.tree.map(jnp.asarray, batch)
    # A new function each time: what was traced is kept.
    program = lambda: str(jax.make_jaxpr(lambda *a: model.loss(*a))(params, batch, key))  # noqa: E731
    assert form not in program()
    expected = model.loss(params, batch, key)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert form in program()
    np.testing.assert_allclose(model.loss(params, batch, key), expected, rtol=1e-5)
