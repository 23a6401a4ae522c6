"""The published networks equal those of PyTorch's libraries, given the same weights and moments.

The weights are random: what is compared is the function, in float32, on images of 65 x 48 pixels,
whose odd side shows how a stride of 2 is padded.
"""

import math

import jax
import numpy as np
import pytest

import models
from models.mobilenet import IMAGENET_STAGES
from models.resnet import DEPTHS

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow
SHAPE, CLASSES = (65, 48, 3), 1000


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


def images(key, n=4):
    return np.array(jax.random.normal(key, (n, *SHAPE)))


def logits_of(net, x):
    with torch.no_grad():
        outputs = net(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()))
    return getattr(outputs, "logits", outputs).numpy()


def array(tensor):
    return tensor.detach().numpy()


def kernel(conv):
    assert conv.bias is None
    weight = array(conv.weight).transpose(2, 3, 1, 0)
    return {"kernel": weight[0, 0] if conv.kernel_size == (1, 1) and conv.groups == 1 else weight}


def dense(layer):
    """A linear layer, or a 1x1 convolution that stands for one."""
    weight = array(layer.weight)
    return {"kernel": weight.reshape(weight.shape[:2]).T, "bias": array(layer.bias)}


def scales(norm):
    return {"scale": array(norm.weight), "bias": array(norm.bias)}


def moments(norm):
    return {"mean": array(norm.running_mean), "var": array(norm.running_var)}


def copied(pairs, others=()):
    """(params, statistics) of (path, path, convolution, norm), and of (path, dense layer)."""
    params, statistics = {}, {}
    for conv_path, norm_path, conv, norm in pairs:
        _put(params, conv_path, kernel(conv))
        _put(params, norm_path, scales(norm))
        _put(statistics, norm_path, moments(norm))
    for path, layer in others:
        _put(params, path, dense(layer))
    return params, statistics


def _put(tree, path, leaf):
    *above, last = path.split(".")
    for name in above:
        tree = tree.setdefault(name, {})
    tree[last] = leaf


def assert_equal(model, net, params, statistics, key):
    shapes = jax.tree.map(lambda p: p.shape, jax.eval_shape(model.init, key))
    assert jax.tree.map(lambda p: p.shape, params) == shapes
    x = images(key)
    expected = logits_of(net, x)
    logits = np.asarray(jax.jit(model.predict)(params, x, statistics))
    size = np.max(np.abs(expected))
    assert np.min(np.std(expected, axis=0)) > 1e-4 * size, "the images are told apart"
    # Against float64, the library's own float32 is off by up to 1.4e-5 of the largest logit.
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * size)


def resnet_of(depth):
    transformers = pytest.importorskip("transformers")
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
    pairs = [("stem", "norm", stem.convolution, stem.normalization)]
    for stage, theirs in enumerate(net.resnet.encoder.stages):
        for k, block in enumerate(theirs.layers):
            ours = f"stage{stage}_block{k}"
            for i, layer in enumerate(block.layer, 1):
                names = f"{ours}.conv{i}", f"{ours}.norm{i}"
                pairs.append((*names, layer.convolution, layer.normalization))
            if not isinstance(block.shortcut, torch.nn.Identity):
                names = f"{ours}.shortcut.conv", f"{ours}.shortcut.norm"
                pairs.append((*names, block.shortcut.convolution, block.shortcut.normalization))
    return net, *copied(pairs, [("dense", net.classifier[1])])


@pytest.mark.parametrize("depth,products", [(18, False), (50, False), (50, True)])
def test_resnet_is_that_of_transformers(depth, products, key):
    model = models.resnet(depth=depth, image_shape=SHAPE, products=products)
    assert_equal(model, *resnet_of(depth), key)


def test_resnet_in_training_is_that_of_transformers(key):
    net, params, _ = resnet_of(18)
    model = models.resnet(depth=18, image_shape=SHAPE)
    x = images(key, n=16)
    expected = logits_of(net.train(), x)
    targets = np.arange(16)
    losses = np.asarray(jax.jit(model.loss)(params, {"x": x, "y": targets}, key))
    expected = np.log(np.exp(expected).sum(axis=1)) - expected[targets, targets]
    # Moments of few pixels amplify the rounding of float32.
    np.testing.assert_allclose(losses, expected, rtol=1e-3)


def test_mobilenet_v2_is_that_of_transformers(key):
    transformers = pytest.importorskip("transformers")
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
    assert_equal(model, net, *copied(pairs, [("dense", net.classifier)]), key)


@pytest.mark.parametrize("variant", ["large", "small"])
def test_mobilenet_v3_is_that_of_torchvision(variant, key):
    torchvision = pytest.importorskip("torchvision")
    net = randomised(getattr(torchvision.models, f"mobilenet_v3_{variant}")(weights=None))
    stem, *blocks, head = net.features
    pairs = [("stem", "norm1", stem), ("head", "norm2", head)]
    others = [("dense1", net.classifier[0]), ("dense2", net.classifier[3])]
    for k, block in enumerate(blocks):
        layers = list(block.block)
        excitations = [layer for layer in layers if hasattr(layer, "fc1")]
        convolutions = [layer for layer in layers if not hasattr(layer, "fc1")]
        for layer in excitations:
            others.append((f"block{k}.excitation.squeeze", layer.fc1))
            others.append((f"block{k}.excitation.excite", layer.fc2))
        names = (("expand", "norm1"), ("depthwise", "norm2"), ("project", "norm3"))
        for (conv, norm), layer in zip(names[-len(convolutions) :], convolutions, strict=True):
            pairs.append((f"block{k}.{conv}", f"block{k}.{norm}", layer))
    pairs = [(*names, layer[0], layer[1]) for *names, layer in pairs]
    model = models.mobilenet_v3(variant=variant, image_shape=SHAPE)
    assert_equal(model, net, *copied(pairs, others), key)
