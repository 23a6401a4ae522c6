"""Residual networks, as published for ImageNet and for CIFAR."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from models.base import Model, check_at_least, check_dtype, model_of
from models.convolutions import (
    Conv,
    Convolution,
    Keys,
    Pointwise,
    batch_norm,
    check_images,
    group_norm,
    groups,
)

STEMS = ("imagenet", "cifar")
NORMS = ("batch", "group")


class _Layers(NamedTuple):
    """What the blocks are built of."""

    conv: type
    norm: Callable
    shortcut: type


class _Padding(nnx.Module):
    """Every second pixel where there is a stride, and zeros as the new channels."""

    def __init__(self, layers, fan_in, fan_out, stride, rngs):
        self.stride, self.widened = stride, fan_out - fan_in

    def __call__(self, x, given):
        x = x[:, :: self.stride, :: self.stride]
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.widened)))


class _Projection(nnx.Module):
    """The input itself where the shapes agree, and elsewhere a projection of it."""

    def __init__(self, layers, fan_in, fan_out, stride, rngs):
        self.projects = stride > 1 or fan_in != fan_out
        if self.projects:
            self.conv = Pointwise(fan_in, fan_out, rngs, stride=stride)
            self.norm = layers.norm(fan_out, rngs)

    def __call__(self, x, given):
        return self.norm(self.conv(x), given) if self.projects else x


class _Basic(nnx.Module):
    expansion = 1

    def __init__(self, layers, fan_in, width, stride, rngs):
        self.conv1 = layers.conv(fan_in, width, stride, rngs)
        self.norm1 = layers.norm(width, rngs)
        self.conv2 = layers.conv(width, width, 1, rngs)
        self.norm2 = layers.norm(width, rngs)
        self.shortcut = layers.shortcut(layers, fan_in, width, stride, rngs)

    def __call__(self, x, given):
        y = nnx.relu(self.norm1(self.conv1(x), given))
        y = self.norm2(self.conv2(y), given)
        return nnx.relu(y + self.shortcut(x, given))


class _Bottleneck(nnx.Module):
    expansion = 4

    def __init__(self, layers, fan_in, width, stride, rngs):
        fan_out = self.expansion * width
        self.conv1 = Pointwise(fan_in, width, rngs)
        self.norm1 = layers.norm(width, rngs)
        self.conv2 = layers.conv(width, width, stride, rngs)
        self.norm2 = layers.norm(width, rngs)
        self.conv3 = Pointwise(width, fan_out, rngs)
        self.norm3 = layers.norm(fan_out, rngs)
        self.shortcut = layers.shortcut(layers, fan_in, fan_out, stride, rngs)

    def __call__(self, x, given):
        y = nnx.relu(self.norm1(self.conv1(x), given))
        y = nnx.relu(self.norm2(self.conv2(y), given))
        y = self.norm3(self.conv3(y), given)
        return nnx.relu(y + self.shortcut(x, given))


# The block, and how many of them in every stage: of ImageNet's networks four, of CIFAR's three.
DEPTHS = {
    18: (_Basic, (2, 2, 2, 2)),
    34: (_Basic, (3, 4, 6, 3)),
    50: (_Bottleneck, (3, 4, 6, 3)),
    101: (_Bottleneck, (3, 4, 23, 3)),
    152: (_Bottleneck, (3, 8, 36, 3)),
}
DEPTHS |= {6 * n + 2: (_Basic, (n, n, n)) for n in (1, 2, 3, 5, 7, 9, 18)}


class _ResNet(nnx.Module):
    """Stages of (channels, blocks), after a stem with the channels of the first."""

    def __init__(self, layers, block, stages, channels, num_classes, stem, dtype, rngs):
        self.pools, self.dtype = stem == "imagenet", dtype
        size, stride = (7, 2) if self.pools else (3, 1)
        fan_in = stages[0][0]
        self.stem = layers.conv(channels, fan_in, stride, rngs, size=size)
        self.norm = layers.norm(fan_in, rngs)
        self.names = []
        for stage, (width, blocks) in enumerate(stages):
            for k in range(blocks):
                stride = 2 if stage > 0 and k == 0 else 1
                self.names.append(f"stage{stage}_block{k}")
                setattr(self, self.names[-1], block(layers, fan_in, width, stride, rngs))
                fan_in = block.expansion * width
        self.dense = nnx.Linear(fan_in, num_classes, rngs=rngs)

    def __call__(self, x, given):
        x = nnx.relu(self.norm(self.stem(x.astype(self.dtype)), given))
        if self.pools:
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
        for name in self.names:
            x = getattr(self, name)(x, given)
        return self.dense(jnp.mean(x, axis=(1, 2), dtype=jnp.float32))


def resnet(
    *,
    depth: int = 50,
    image_shape: tuple[int, int, int] = (224, 224, 3),
    num_classes: int = 1000,
    norm: str = "batch",
    stem: str = "imagenet",
    width: int = 64,
    products: bool = False,
    dtype: str = "float32",
    l2: float = 0.0,
) -> Model:
    """Residual network of the published layers.

    Four stages of basic blocks (two 3x3 convolutions; 18 and 34 layers) or bottlenecks (1x1, 3x3,
    and 1x1 to four times the channels; 50, 101 and 152); a stage after the first has twice the
    channels and half the image. In a bottleneck its 3x3 convolution has the stride, as in Goyal et
    al., not the first 1x1. Shortcuts are 1x1 projections where the shapes differ.

    The networks for CIFAR, of 8, 14, 20, 32, 44, 56 or 110 layers, have three stages of basic
    blocks and shortcuts without parameters (option A of the paper): where a stage begins they take
    every second pixel and fill the new channels with zeros. Their stem is "cifar", their width 16.

    Args:
      depth: one of those.
      image_shape: (height, width, channels), at least 2 x 2 where the last stage begins.
      num_classes: C >= 2.
      norm: "batch", or "group": 32 groups of channels, or one per channel where there are fewer; in
        the networks for CIFAR groups of four channels. With groups no example depends on another,
        and the model has no `statistics`.
      stem: "imagenet", a 7x7 convolution of stride 2 and a 3x3 maximum of stride 2, or "cifar", a
        3x3 convolution of stride 1.
      width: channels of the stem and of the 3x3 convolutions of the first stage, >= 1; for 32
        groups at most 32 and a power of two, or a multiple of 32.
      products: whether convolutions are done as matrix products, the same function: faster inside
        loops on a CPU, and batched over workers, for nine times the memory.
      dtype: "float32" or "bfloat16", of activations and products; parameters, moments and logits
        are float32 all the same.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model`, with `statistics` unless norm is "group", for batches
      {"x": float[n, H, W, channels], "y": int[n]}; n >= 2 with batch normalisation.

    Raises:
      ValueError: for sizes out of range, or an unknown depth, norm, stem or dtype.

    Example:
      >>> import jax
      >>> import models
      >>> params = jax.eval_shape(models.resnet(depth=18).init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      11689512

    References:
      He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, 2016,
      https://arxiv.org/abs/1512.03385
      Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
      https://arxiv.org/abs/1706.02677
      Wu, He, Group Normalization, 2018, https://arxiv.org/abs/1803.08494
    """
    tables = (("depth", depth, DEPTHS), ("norm", norm, NORMS), ("stem", stem, STEMS))
    for name, value, known in tables:
        if value not in known:
            raise ValueError(f"{name} is {value!r}: take one of {', '.join(map(repr, known))}.")
    check_at_least(1, width=width)
    block, numbers = DEPTHS[depth]
    for_cifar = len(numbers) == 3
    stages = [(width * 2**stage, number) for stage, number in enumerate(numbers)]
    reduction = 2 ** (len(stages) - 1) * (4 if stem == "imagenet" else 1)
    check_images(image_shape, num_classes, reduction)
    groups_of = (lambda channels: max(1, channels // 4)) if for_cifar else groups
    if norm == "group":
        last = [-(-side // reduction) for side in image_shape[:2]]
        _check_groups([channels for channels, _ in stages], groups_of, last[0] * last[1])
    layers = _Layers(
        conv=Conv if products else Convolution,
        norm=batch_norm if norm == "batch" else partial(group_norm, groups_of=groups_of),
        shortcut=_Padding if for_cifar else _Projection,
    )

    dtype = check_dtype(dtype)

    def make(rngs):
        return _ResNet(layers, block, stages, image_shape[2], num_classes, stem, dtype, rngs)

    return model_of(make, l2, keys=Keys)


def _check_groups(widths, groups_of, last_pixels):
    if any(channels % groups_of(channels) for channels in widths):
        raise ValueError(
            f"width is {widths[0]}: groups must share the channels of every stage equally. Take a "
            "power of two, or norm 'batch'."
        )
    if last_pixels * (widths[-1] // groups_of(widths[-1])) < 2:
        raise ValueError(
            f"width is {widths[0]} and the last stage has one pixel: a group of a single value is "
            "normalised to nothing. Take a larger width or larger images."
        )
