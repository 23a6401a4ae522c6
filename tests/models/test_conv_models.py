"""Convolutional models: published sizes, layers compared with XLA's, statistics, types.

NumPy draws parameters and images: compiling the draws would take longer than the tests.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import models
from models.convolutions import (
    Conv,
    Convolution,
    DepthwiseConv,
    Pointwise,
    group_norm,
)
from models.resnet import DEPTHS

CLASSES, SHAPE = 7, (16, 16, 3)


@pytest.fixture
def build(monkeypatch):
    """`build[name](**settings)` makes a model with two blocks, which compiles in a second."""
    monkeypatch.setitem(DEPTHS, 18, (DEPTHS[18][0], (1, 1)))
    monkeypatch.setitem(DEPTHS, 50, (DEPTHS[50][0], (1, 1)))
    images = {"image_shape": SHAPE, "num_classes": CLASSES}
    stages = {"stages": ((1, 4, 1, 1), (2, 6, 1, 2)), "stem_channels": 4, "head_channels": 16}
    return {
        "resnet": partial(models.resnet, depth=18, stem="cifar", width=8, **images),
        "mobilenet_v2": partial(models.mobilenet_v2, **stages, **images),
    }


def drawn(shapes):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32), shapes)


def images(shape=SHAPE, n=5, seed=0):
    return np.random.default_rng(seed).normal(size=(n, *shape)).astype(np.float32)


def batch_of(x):
    return {"x": x, "y": np.arange(len(x)) % CLASSES}


def params_of(model, key):
    return drawn(jax.eval_shape(model.init, key))


def layer_of(make):
    """The layer `make(rngs)` with random parameters."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return nnx.merge(graph, drawn(shapes))


def xla(x, kernel, stride, groups=1):
    edge = kernel.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        ((edge, edge), (edge, edge)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


@pytest.mark.parametrize("size,stride", [(3, 1), (5, 2), (7, 2)])
def test_convolutions_equal_xla(size, stride):
    one = layer_of(lambda rngs: Pointwise(4, 3, rngs, stride=stride))
    full = layer_of(lambda rngs: Convolution(4, 3, stride, rngs, size=size))
    product = layer_of(lambda rngs: Conv(4, 3, stride, rngs, size=size))
    depthwise = layer_of(lambda rngs: DepthwiseConv(4, stride, rngs, size=size))

    @jax.jit
    def pairs(x):
        dense = xla(x, full.kernel[...], stride)
        independent = xla(x, depthwise.kernel[...], stride, groups=4)
        pixel = xla(x, one.kernel[...][None, None], stride)
        return (full(x), product(x), depthwise(x), one(x)), (dense, dense, independent, pixel)

    for ours, expected in zip(*pairs(images((9, 6, 4))), strict=True):
        np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.parametrize("channels,number", [(8, 8), (64, 32)])
def test_group_norm_follows_the_paper(channels, number):
    norm = layer_of(lambda rngs: group_norm(channels, rngs))
    x = 2 + 3 * images((4, 5, channels))
    groups = x.astype(np.float64).reshape(5, 20, number, -1)
    mean = groups.mean(axis=(1, 3), keepdims=True)
    deviation = np.sqrt(groups.var(axis=(1, 3), keepdims=True) + 1e-5)
    expected = ((groups - mean) / deviation).reshape(x.shape)
    expected = expected * np.asarray(norm.scale[...]) + np.asarray(norm.bias[...])
    np.testing.assert_allclose(jax.jit(norm)(x, None), expected, atol=1e-4)


def test_networks_for_cifar_have_the_published_sizes(key):
    settings = {"stem": "cifar", "width": 16, "image_shape": (32, 32, 3), "num_classes": 10}
    for depth, size in ((20, 269_722), (56, 853_018)):
        model = models.resnet(depth=depth, **settings)
        assert sum(p.size for p in jax.tree.leaves(jax.eval_shape(model.init, key))) == size


@pytest.mark.parametrize("norm,independent", [("group", True), ("batch", False)])
def test_examples_are_independent_only_with_group_norm(norm, independent, build, key):
    x, other = images(), images(seed=1)
    batch, mixed = batch_of(x), batch_of(np.concatenate([x[:1], other[1:]]))
    model = build["resnet"](norm=norm)
    assert (model.statistics is None) == independent
    params, loss = params_of(model, key), jax.jit(model.loss)
    change = np.abs(loss(params, batch, None) - loss(params, mixed, None))
    assert np.all(change[1:] > 1e-3)
    assert change[0] < 1e-5 if independent else change[0] > 1e-3


def test_products_compute_the_same_function(build, key):
    settings = {"depth": 50, "stem": "imagenet", "image_shape": (40, 37, 3), "width": 4}
    model = build["resnet"](**settings)
    params, batch = params_of(model, key), batch_of(images(settings["image_shape"]))
    products = build["resnet"](**settings, products=True)
    losses = [jax.jit(m.loss)(params, batch, None) for m in (model, products)]
    assert np.std(losses[0]) > 1e-2
    np.testing.assert_allclose(*losses, rtol=1e-3)
    used = [primitives(m, params, batch["x"]) for m in (model, products)]
    assert ["conv_general_dilated" in names for names in used] == [True, False]


def primitives(model, params, x):
    """{primitive: types of its four-dimensional results} in a forward pass."""
    forward = model.statistics or model.predict
    results = {}
    for equation in jax.make_jaxpr(forward)(params, x).eqns:
        result = equation.outvars[0].aval
        if result.ndim == 4:
            results.setdefault(equation.primitive.name, set()).add(result.dtype)
    return results


@pytest.mark.parametrize("family", ["resnet", "mobilenet_v2"])
def test_statistics_of_a_batch_reproduce_its_training_losses(family, build, key):
    model = build[family]()
    params, batch = params_of(model, key), batch_of(images())

    @jax.jit
    def losses(params, given):
        logits = model.predict(params, batch["x"], model.statistics(params, given))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    in_training = jax.jit(model.loss)(params, batch, None)
    np.testing.assert_allclose(losses(params, batch["x"]), in_training, rtol=1e-4)
    assert np.max(np.abs(losses(params, 2 * batch["x"]) - in_training)) > 1e-2


TYPED = [
    ("resnet", {}),
    ("resnet", {"products": True}),
    ("resnet", {"norm": "group", "depth": 50}),
    ("mobilenet_v2", {}),
]


@pytest.mark.parametrize("family,settings", TYPED)
def test_bfloat16_rounds_products_but_not_parameters(family, settings, build, key):
    model = build[family](**settings, dtype="bfloat16")
    batch = batch_of(images())
    params = jax.eval_shape(model.init, key)
    gradient = jax.eval_shape(jax.grad(lambda p: model.loss(p, batch, None)[0]), params)
    moments = model.statistics and jax.eval_shape(model.statistics, params, batch["x"])
    for leaf in jax.tree.leaves((params, gradient, moments)):
        assert leaf.dtype == jnp.float32
    logits = jax.eval_shape(model.predict, params, batch["x"], *[moments] * (moments is not None))
    assert logits.dtype == jnp.float32
    types = primitives(model, params, batch["x"])
    products = [types[name] for name in ("dot_general", "conv_general_dilated") if name in types]
    assert set.union(*products) == {np.dtype("bfloat16")}


def test_depthwise_sums_are_rounded_once():
    conv, x = layer_of(lambda rngs: DepthwiseConv(4, 1, rngs, size=5)), images((9, 6, 4))
    x = jnp.asarray(x, jnp.bfloat16)
    rounded, exact = jax.jit(lambda x: (conv(x), conv(x.astype(jnp.float32))))(x)
    assert rounded.dtype == jnp.bfloat16
    # half a unit in the last of 8 places, and the rounding of float32
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, rtol=2**-8, atol=1e-5)
