"""The image models: sizes by hand, and batch normalisation with given moments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree

import models

SHAPE, CLASSES = (8, 8, 3), 7
RESNET = models.small_resnet(image_shape=SHAPE, num_classes=CLASSES, widths=(4, 6, 8))
VIT = models.vit(image_shape=SHAPE, num_classes=CLASSES, width=12, depth=2, heads=3, mlp_ratio=2)


def batch_of(key, n=5):
    return {"x": jax.random.normal(key, (n, *SHAPE)), "y": jnp.arange(n) % CLASSES}


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


def test_statistics_of_a_batch_give_its_logits_in_training(key):
    init, first, second = jax.random.split(key, 3)
    params, batch, other = params_of(RESNET, init), batch_of(first), batch_of(second)

    @jax.jit
    def losses(params, given):
        logits = RESNET.predict(params, batch["x"], RESNET.statistics(params, given))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    in_training = jax.jit(RESNET.loss)(params, batch, None)
    np.testing.assert_allclose(losses(params, batch["x"]), in_training, rtol=1e-4)
    assert np.max(np.abs(losses(params, other["x"]) - in_training)) > 1e-2


@pytest.mark.parametrize("stride", [1, 2])
def test_convolution_is_that_of_xla(stride, key):
    from models.resnet import _Conv

    conv, x = _Conv(3, 4, stride, nnx.Rngs(1)), batch_of(key)["x"]
    expected = jax.lax.conv_general_dilated(
        x,
        conv.kernel[...],
        (stride, stride),
        ((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_allclose(conv(x), expected, atol=1e-5)


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


@pytest.mark.parametrize("model", [RESNET, VIT], ids=["resnet", "vit"])
def test_losses_and_gradient(model, key):
    init, data, noise = jax.random.split(key, 3)
    params, batch = params_of(model, init), batch_of(data)

    def mean(params):
        losses = model.loss(params, batch, noise)
        return jnp.mean(losses), losses

    (_, losses), gradient = jax.jit(jax.value_and_grad(mean, has_aux=True))(params)
    assert losses.shape == (5,) and losses.dtype == jnp.float32 and np.all(np.isfinite(losses))
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))


def test_vit_reads_the_patches_in_place(key):
    from models.vit import _patches

    x = batch_of(key)["x"]
    np.testing.assert_array_equal(_patches(x, 4)[:, 1], x[:, :4, 4:].reshape(5, -1))
    assert VIT.statistics is None


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
    ],
)
def test_bad_settings(build, settings, word):
    with pytest.raises(ValueError, match=word):
        build(**settings)
