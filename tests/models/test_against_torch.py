"""The published networks give PyTorch's logits for the same parameters and moments.

Needs torch, torchvision and transformers (5 or later). Nothing is downloaded: parameters and
moments are random. Images have 65 x 48 pixels; the odd side tests the padding of strides of 2.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.gpt2 import SIZES as GPT2_SIZES
from models.mobilenet import IMAGENET_STAGES
from models.resnet import DEPTHS
from models.vit import SIZES as VIT_SIZES

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.slow

TOLERANCE = 1e-4  # relative to the largest logit: float32 sums in another order
SHAPE, CLASSES = (65, 48, 3), 1000
RNG = np.random.default_rng(0)


def array(tensor):
    return tensor.detach().numpy()


def logits_of(net, *args):
    with torch.no_grad():
        found = net(*(torch.as_tensor(np.ascontiguousarray(x)) for x in args))
    return getattr(found, "logits", found).numpy()


def images(n=4):
    return np.float32(RNG.standard_normal((n, *SHAPE)))


def first(x):
    """Images as PyTorch has them: channels first."""
    return x.transpose(0, 3, 1, 2)


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


def copied(pairs, others):
    """(params, statistics) of (path, path, convolution, norm), and of (path, dense layer)."""
    params, statistics = {}, {}
    for conv_path, norm_path, conv, norm in pairs:
        put(params, conv_path, kernel(conv))
        put(params, norm_path, {"scale": array(norm.weight), "bias": array(norm.bias)})
        moments = {"mean": array(norm.running_mean), "var": array(norm.running_var)}
        put(statistics, norm_path, moments)
    for path, layer in others:
        put(params, path, dense(layer))
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
                (f"{ours}.conv{i}", f"{ours}.norm{i}", own) for i, own in enumerate(block.layer, 1)
            ]
            if not isinstance(block.shortcut, torch.nn.Identity):
                pairs.append((f"{ours}.shortcut.conv", f"{ours}.shortcut.norm", block.shortcut))
    pairs = [(*names, layer.convolution, layer.normalization) for *names, layer in pairs]
    model = models.resnet(depth=depth, image_shape=SHAPE, products=products)
    return model, net, copied(pairs, [("dense", net.classifier[1])])


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
        image_shape=SHAPE, num_classes=CLASSES, stages=IMAGENET_STAGES, stem_channels=32,
        stem_stride=2, head_channels=1280,
    )  # fmt: skip
    return model, net, copied(pairs, [("dense", net.classifier)])


def shaken(net, deviation):
    """(net, its parameters by name), in evaluation, after noise on every parameter."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(deviation * torch.randn_like(p))
    names = {name.split(".", 1)[-1] if name[:3] in ("vit", "tra") else name: array(p)
             for name, p in net.named_parameters()}  # fmt: skip
    return net.eval(), names


def norm(p, name, weight="scale"):
    return {weight: p[f"{name}.weight"], "bias": p[f"{name}.bias"]}


def linear(p, name):  # torch keeps a matrix as [outputs, inputs]
    return {"kernel": p[f"{name}.weight"].T, "bias": p[f"{name}.bias"]}


def gpt2(vocab_size, context, sizes, noise):
    config = transformers.GPT2Config(
        vocab_size=vocab_size, n_positions=context, n_embd=sizes["width"], n_layer=sizes["depth"],
        n_head=sizes["heads"], bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    net, p = shaken(transformers.GPT2LMHeadModel(config), noise)
    params = {"tokens": p["wte.weight"], "positions": p["wpe.weight"], "norm": norm(p, "ln_f")}
    matrix = partial(norm, p, weight="kernel")  # GPT-2 keeps them as [inputs, outputs]
    for k in range(sizes["depth"]):
        params[f"block{k}"] = {
            "norm1": norm(p, f"h.{k}.ln_1"),
            "attention": {
                "qkv": matrix(f"h.{k}.attn.c_attn"), "project": matrix(f"h.{k}.attn.c_proj"),
            },
            "norm2": norm(p, f"h.{k}.ln_2"),
            "dense1": matrix(f"h.{k}.mlp.c_fc"), "dense2": matrix(f"h.{k}.mlp.c_proj"),
        }  # fmt: skip
    x = RNG.integers(vocab_size, size=(2, min(context, 100)))
    model = models.gpt2(vocab_size=vocab_size, context=context, **sizes)
    return model, (params,), x, logits_of(net, x)


def vit(side, classes, sizes, noise, gelu):
    width, heads, embed = sizes["width"], sizes["heads"], "embeddings.patch_embeddings.projection"
    config = transformers.ViTConfig(
        image_size=side, patch_size=sizes["patch"], hidden_size=width, num_labels=classes,
        num_hidden_layers=sizes["depth"], num_attention_heads=heads, layer_norm_eps=1e-6,
        intermediate_size=sizes["mlp_ratio"] * width,
        hidden_act={"exact": "gelu", "tanh": "gelu_new"}[gelu],
    )  # fmt: skip
    net, p = shaken(transformers.ViTForImageClassification(config), noise)
    params = {
        "class_token": p["embeddings.cls_token"],
        "positions": p["embeddings.position_embeddings"],
        # a convolution [outputs, channels, rows, columns] over patches [rows, columns, channels]
        "embed": {
            "kernel": p[f"{embed}.weight"].transpose(2, 3, 1, 0).reshape(-1, width),
            "bias": p[f"{embed}.bias"],
        },
        "norm": norm(p, "layernorm"),
        "dense": linear(p, "classifier"),
    }
    for k in range(sizes["depth"]):
        layer, attention = f"layers.{k}", {}
        for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
            found = linear(p, f"{layer}.attention.{theirs}")
            attention[ours] = {
                "kernel": found["kernel"].reshape(width, heads, -1),
                "bias": found["bias"].reshape(heads, -1),
            }
        out = linear(p, f"{layer}.attention.o_proj")
        attention["out"] = {**out, "kernel": out["kernel"].reshape(heads, -1, width)}
        params[f"block{k}"] = {
            "norm1": norm(p, f"{layer}.layernorm_before"),
            "attention": attention,
            "norm2": norm(p, f"{layer}.layernorm_after"),
            "dense1": linear(p, f"{layer}.mlp.fc1"),
            "dense2": linear(p, f"{layer}.mlp.fc2"),
        }
    x = np.float32(RNG.standard_normal((2, side, side, 3)))
    model = models.vit(
        image_shape=(side, side, 3), num_classes=classes, pool="class", gelu=gelu, **sizes
    )
    return model, (params,), x, logits_of(net, first(x))


def of_images(build):
    model, net, variables = build()
    x = images()
    return model, variables, x, logits_of(net, first(x))


FEW = {"width": 24, "depth": 3, "heads": 4}
SMALL_VIT = FEW | {"mlp_ratio": 2, "patch": 4}
CASES = {
    "resnet 18": partial(of_images, partial(resnet, 18)),
    "resnet 50, products": partial(of_images, partial(resnet, 50, products=True)),
    "mobilenet v2": partial(of_images, mobilenet_v2),
    "gpt2": partial(gpt2, 50, 12, FEW, 0.2),
    "gpt2, published": partial(gpt2, 50257, 1024, GPT2_SIZES["small"], 0.02),
    "vit, tanh": partial(vit, 8, 5, SMALL_VIT, 0.2, "tanh"),
    "vit, published": partial(vit, 224, 1000, VIT_SIZES["base"], 0.02, "exact"),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_torch(name):
    model, variables, x, expected = CASES[name]()
    shapes = jax.tree.map(lambda p: p.shape, jax.eval_shape(model.init, jax.random.key(0)))
    assert jax.tree.map(np.shape, variables[0]) == shapes
    found = jax.jit(model.predict)(jax.tree.map(jnp.asarray, variables[0]), x, *variables[1:])
    size = np.max(np.abs(expected))
    assert np.mean(np.std(expected, axis=0)) > 1e-3 * size, "the examples are told apart"
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE * size)


def test_resnet_in_training_equals_transformers(key):
    model, net, (params, _) = resnet(18)
    x, targets = images(n=16), np.arange(16)
    expected = logits_of(net.train(), first(x))
    losses = np.asarray(jax.jit(model.loss)(params, {"x": x, "y": targets}, key))
    expected = np.log(np.exp(expected).sum(axis=1)) - expected[targets, targets]
    # Moments of few pixels amplify the rounding of float32.
    np.testing.assert_allclose(losses, expected, rtol=1e-3)
