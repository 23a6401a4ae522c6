"""The residual networks and MobileNet give PyTorch's logits for the same parameters and moments.

Needs torch and transformers (5 or later). Nothing is downloaded: parameters and
moments are random. Images have 65 x 48 pixels; the odd side tests the padding of strides of 2.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.mobilenet import IMAGENET_STAGES
from models.resnet import DEPTHS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # relative to the largest logit: float32 sums in another order
SHAPE, CLASSES = (65, 48, 3), 1000
RNG = np.random.default_rng(0)


def array(tensor):
    return tensor.detach().numpy()


def logits_of(net, x):
    """PyTorch has the channels of images first."""
    with torch.no_grad():
        return net(torch.as_tensor(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))).logits.numpy()


def images(n=4):
    return np.float32(RNG.standard_normal((n, *SHAPE)))


def randomised(net):
    """The network in evaluation, with scales, biases and moments that differ in every channel."""
    torch.manual_seed(0)
    for layer in net.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            for values in (layer.weight.data, layer.running_var):
                values.uniform_(0.5, 1.5)
            for values in (layer.bias.data, layer.running_mean):
                values.normal_(0.0, 0.3)
        if isinstance(layer, torch.nn.Conv2d):
            fan_in = math.prod(layer.weight.shape[1:])
            layer.weight.data.normal_(0.0, math.sqrt(2 / fan_in))
    return net.eval()


def kernel(conv):
    weight = array(conv.weight).transpose(2, 3, 1, 0)
    return {"kernel": weight[0, 0] if conv.kernel_size == (1, 1) and conv.groups == 1 else weight}


def dense(layer):
    """A linear layer, or a 1x1 convolution that stands for one."""
    weight = array(layer.weight)
    return {"kernel": weight.reshape(weight.shape[:2]).T, "bias": array(layer.bias)}


def copied(pairs, last):
    """(params, statistics) of (path, path, convolution, norm), and of the last layer."""
    params, statistics = {}, {}
    for conv_path, norm_path, conv, norm in pairs:
        put(params, conv_path, kernel(conv))
        put(params, norm_path, {"scale": array(norm.weight), "bias": array(norm.bias)})
        moments = {"mean": array(norm.running_mean), "var": array(norm.running_var)}
        put(statistics, norm_path, moments)
    put(params, "dense", dense(last))
    return params, statistics


def put(tree, path, leaf):
    *above, last = path.split(".")
    for name in above:
        tree = tree.setdefault(name, {})
    tree[last] = leaf


def resnet(depth, products=False):
    block, stages = DEPTHS[depth]
    config = transformers.ResNetConfig(
        layer_type="basic" if block.expansion == 1 else "bottleneck",
        depths=list(stages),
        embedding_size=64,
        hidden_sizes=[block.expansion * 64 * 2**stage for stage in range(4)],
        num_labels=CLASSES,
    )
    net = randomised(transformers.ResNetForImageClassification(config))
    stem = net.resnet.embedder.embedder
    pairs = [("stem", "norm", stem)]
    for stage, theirs in enumerate(net.resnet.encoder.stages):
        for k, block in enumerate(theirs.layers):
            ours = f"stage{stage}_block{k}"
            pairs += [
                (f"{ours}.conv{i}", f"{ours}.norm{i}", layer)
                for i, layer in enumerate(block.layer, 1)
            ]
            if not isinstance(block.shortcut, torch.nn.Identity):
                pairs.append((f"{ours}.shortcut.conv", f"{ours}.shortcut.norm", block.shortcut))
    pairs = [(*names, layer.convolution, layer.normalization) for *names, layer in pairs]
    model = models.resnet(depth=depth, image_shape=SHAPE, products=products)
    return model, net, copied(pairs, net.classifier[1])


def mobilenet_v2():
    # The published weights were converted from a network padded on one side; ours pads both.
    config = transformers.MobileNetV2Config(
        tf_padding=False, layer_norm_eps=1e-5, num_labels=CLASSES
    )
    net = randomised(transformers.MobileNetV2ForImageClassification(config))
    inner = net.mobilenet_v2
    names = [
        f"stage{stage}_block{k}"
        for stage, (_, _, blocks, _) in enumerate(IMAGENET_STAGES)
        for k in range(blocks)
    ]
    pairs = [("stem", "norm1", inner.conv_stem.first_conv), ("head", "norm2", inner.conv_1x1)]
    for name, block in zip(names, (inner.conv_stem, *inner.layer), strict=True):
        pairs.append((f"{name}.depthwise", f"{name}.norm2", block.conv_3x3))
        pairs.append((f"{name}.project", f"{name}.norm3", block.reduce_1x1))
        if block.expand_1x1 is not None:
            pairs.append((f"{name}.expand", f"{name}.norm1", block.expand_1x1))
    pairs = [(*names, layer.convolution, layer.normalization) for *names, layer in pairs]
    model = models.mobilenet_v2(
        image_shape=SHAPE,
        num_classes=CLASSES,
        stages=IMAGENET_STAGES,
        stem_channels=32,
        stem_stride=2,
        head_channels=1280,
    )
    return model, net, copied(pairs, net.classifier)


CASES = {
    "resnet 18": partial(resnet, 18),
    "resnet 50, products": partial(resnet, 50, products=True),
    "mobilenet v2": mobilenet_v2,
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_torch(name):
    model, net, (params, moments) = CASES[name]()
    x = images()
    expected = logits_of(net, x)
    shapes = jax.tree.map(lambda p: p.shape, jax.eval_shape(model.init, jax.random.key(0)))
    assert jax.tree.map(np.shape, params) == shapes
    actual = jax.jit(model.predict)(jax.tree.map(jnp.asarray, params), x, moments)
    size = np.max(np.abs(expected))
    assert np.mean(np.std(expected, axis=0)) > 1e-3 * size, "the examples are told apart"
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * size)


def test_resnet_in_training_equals_transformers(key):
    model, net, (params, _) = resnet(18)
    x, targets = images(n=16), np.arange(16)
    expected = logits_of(net.train(), x)
    losses = np.asarray(jax.jit(model.loss)(params, {"x": x, "y": targets}, key))
    expected = np.log(np.exp(expected).sum(axis=1)) - expected[targets, targets]
    # Moments of few pixels amplify the rounding of float32.
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
