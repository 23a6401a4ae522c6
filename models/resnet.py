"""Residual networks, as published for ImageNet and for CIFAR."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from models.base import Model, check_choice, check_dtype, check_images, checked, model_of
from models.convolutions import (
    Conv,
    Convolution,
    Keys,
    Pointwise,
    batch_norm,
    group_norm,
    groups,
)

STEMS = ("imagenet", "cifar")
NORMS = ("batch", "group")


class _Layers(NamedTuple):
    """The layers that blocks consist of."""

    conv: type
    norm: Callable
    shortcut: type


class _Padding(nnx.Module):
    """The shortcut without parameters: subsamples pixels and pads new channels with zeros."""

    def __init__(self, layers, fan_in, fan_out, stride, rngs):
        self.stride, self.widened = stride, fan_out - fan_in

    def __call__(self, x, given):
        x = x[:, :: self.stride, :: self.stride]
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, self.widened)))


class _Projection(nnx.Module):
    """The shortcut that is the identity if shapes agree, and a 1x1 projection otherwise."""

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


# The block and the blocks per stage. Networks for ImageNet have four stages, for CIFAR three.
DEPTHS = {
    18: (_Basic, (2, 2, 2, 2)),
    34: (_Basic, (3, 4, 6, 3)),
    50: (_Bottleneck, (3, 4, 6, 3)),
    101: (_Bottleneck, (3, 4, 23, 3)),
    152: (_Bottleneck, (3, 8, 36, 3)),
}
DEPTHS |= {6 * n + 2: (_Basic, (n, n, n)) for n in (1, 2, 3, 5, 7, 9, 18)}


class _ResNet(nnx.Module):
    """A stem, then the stages, given as (channels, blocks)."""

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
            edges = ((1, 1), (1, 1))  # Flax takes pairs, too, but does not annotate them
            x = nnx.max_pool(x, (3, 3), (2, 2), edges)  # pyright: ignore[reportArgumentType]
        for name in self.names:
            x = getattr(self, name)(x, given)
        return self.dense(jnp.mean(x, axis=(1, 2), dtype=jnp.float32))


@checked
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
    """Residual network, as published for ImageNet or for CIFAR.

    The networks for ImageNet have four stages of basic blocks (two 3x3 convolutions; 18 and 34
    layers) or bottlenecks (1x1, 3x3, and 1x1 to four times the channels; 50, 101 and 152 layers).
    Each stage after the first doubles the channels and halves the image; in a bottleneck the 3x3
    convolution has the stride, as in Goyal et al. Shortcuts are 1x1 projections if shapes differ.

    The networks for CIFAR, with 8, 14, 20, 32, 44, 56 or 110 layers, have three stages of basic
    blocks. Their shortcuts have no parameters (option A of the paper): they take every second
    pixel and pad the new channels with zeros. Use stem "cifar" and width 16.

    Args:
      depth: number of layers, one of those above.
      image_shape: (height, width, channels), at least 2 x 2 where the last stage begins.
      num_classes: C >= 2.
      norm: "batch", or "group": 32 groups of channels, or one per channel if there are fewer;
        groups of four channels in the networks for CIFAR. With "group" examples are independent,
        and the model has no `statistics`.
      stem: "imagenet", a 7x7 convolution of stride 2 and 3x3 max pooling of stride 2, or "cifar",
        a 3x3 convolution of stride 1.
      width: channels of the stem and of the 3x3 convolutions of the first stage, >= 1; for 32
        groups at most 32 and a power of two, or a multiple of 32.
      products: whether convolutions are computed as matrix products. This is faster inside loops on
        a CPU, and batches over workers, but takes nine times the memory.
      dtype: "float32" or "bfloat16", for activations and products; parameters, moments and logits
        are float32.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model`, with `statistics` unless norm is "group", for batches
      {"x": float[n, H, W, channels], "y": int[n]}; n >= 2 with batch normalisation.

    Raises:
      ValueError: if a size is out of range, or the depth, norm, stem or dtype is unknown.

    Examples:
      >>> import jax, models
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
    check_choice(DEPTHS, depth=depth)
    check_choice(NORMS, norm=norm)
    check_choice(STEMS, stem=stem)
    block, numbers = DEPTHS[depth]
    for_cifar = len(numbers) == 3
    stages = [(width * 2**stage, number) for stage, number in enumerate(numbers)]
    reduction = 2 ** (len(stages) - 1) * (4 if stem == "imagenet" else 1)
    check_images(image_shape, reduction)
    groups_of = (lambda channels: max(1, channels // 4)) if for_cifar else groups
    if norm == "group":
        last = [-(-side // reduction) for side in image_shape[:2]]
        _check_groups([channels for channels, _ in stages], groups_of, last[0] * last[1])
    layers = _Layers(
        conv=Conv if products else Convolution,
        norm=batch_norm if norm == "batch" else partial(group_norm, groups_of=groups_of),
        shortcut=_Padding if for_cifar else _Projection,
    )
    compute = check_dtype(dtype)

    def make(rngs):
        return _ResNet(layers, block, stages, image_shape[2], num_classes, stem, compute, rngs)

    return model_of(make, l2, inputs=(None, None, None, image_shape[2]), keys=Keys)


def _check_groups(widths, groups_of, last_pixels):
    if any(channels % groups_of(channels) for channels in widths):
        raise ValueError(
            f"width is {widths[0]}: groups must divide the channels of every stage. Use a power of "
            "two, or norm 'batch'."
        )
    if last_pixels * (widths[-1] // groups_of(widths[-1])) < 2:
        raise ValueError(
            f"width is {widths[0]} and the last stage has one pixel: a group of a single value is "
            "normalised to 0. Use a larger width or larger images."
        )
