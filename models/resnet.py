"""Residual networks, as published for ImageNet and small ones for images of CIFAR's size."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from models.base import Model, check_dtype, check_l2
from models.convolutions import (
    GROUPS,
    Conv,
    Convolution,
    Pointwise,
    batch_norm,
    check_images,
    group_norm,
    model_of,
)

STEMS = ("imagenet", "cifar")
NORMS = {"batch": batch_norm, "group": group_norm}
GROUP = 4  # channels that their group normalisation takes together, for their widths are small
SMALL_NORMS = {
    "batch": batch_norm,
    "group": lambda width, rngs: group_norm(width, rngs, groups=max(1, width // GROUP)),
}


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


# The block, and how many of them in every stage.
DEPTHS = {
    18: (_Basic, (2, 2, 2, 2)),
    34: (_Basic, (3, 4, 6, 3)),
    50: (_Bottleneck, (3, 4, 6, 3)),
    101: (_Bottleneck, (3, 4, 23, 3)),
    152: (_Bottleneck, (3, 8, 36, 3)),
}


class _ResNet(nnx.Module):
    """Stages of (channels, blocks), after a stem with the channels of the first."""

    def __init__(self, layers, block, stages, channels, num_classes, stem, rngs):
        self.pools = stem == "imagenet"
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
        x = nnx.relu(self.norm(self.stem(x), given))
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
    """Residual network of 18, 34, 50, 101 or 152 layers, the published one of that depth.

    Four stages of basic blocks (two 3x3 convolutions; 18 and 34 layers) or bottlenecks (1x1, 3x3,
    and 1x1 to four times the channels); a stage after the first has twice the channels and half
    the image. In a bottleneck its 3x3 convolution has the stride, as in Goyal et al., not the
    first 1x1. Shortcuts are 1x1 projections where the shapes differ. All scales start at one.

    Args:
      depth: 18, 34, 50, 101 or 152.
      image_shape: (height, width, channels); height and width at least 32, or 8 with the stem
        "cifar".
      num_classes: C >= 2.
      norm: "batch", or "group": 32 groups of channels, or one per channel where there are fewer.
        With groups no example depends on another, and the model has no `statistics`.
      stem: "imagenet", a 7x7 convolution of stride 2 and a 3x3 maximum of stride 2, or "cifar", a
        3x3 convolution of stride 1.
      width: channels of the stem and of the 3x3 convolutions of the first stage, >= 1; for groups
        at most 32 and a power of two, or a multiple of 32.
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
    check_l2(l2)
    _check_names(depth, norm, stem)
    reduction = 32 if stem == "imagenet" else 8
    check_images(image_shape, num_classes, reduction)
    _check_width(width, norm, [-(-side // reduction) for side in image_shape[:2]])
    block, blocks = DEPTHS[depth]
    stages = [(width * 2**stage, number) for stage, number in enumerate(blocks)]
    layers = _Layers(Conv if products else Convolution, NORMS[norm], _Projection)

    def make(rngs):
        return _ResNet(layers, block, stages, image_shape[2], num_classes, stem, rngs)

    return model_of(make, l2, check_dtype(dtype))


def _check_names(depth, norm, stem):
    tables = (("depth", depth, DEPTHS), ("norm", norm, NORMS), ("stem", stem, STEMS))
    for name, value, known in tables:
        if value not in known:
            raise ValueError(f"{name} is {value!r}: take one of {', '.join(map(repr, known))}.")


def _check_width(width, norm, last):
    if width < 1:
        raise ValueError(f"width is {width}: the stem needs at least one channel.")
    if norm == "batch":
        return
    inner = [width * 2**stage for stage in range(4)]
    if any(channels % min(GROUPS, channels) for channels in inner):
        raise ValueError(
            f"width is {width}: {GROUPS} groups must share the channels of every stage equally. "
            f"Take a multiple of {GROUPS}, or a smaller power of two, or norm 'batch'."
        )
    if last[0] * last[1] * max(1, inner[-1] // GROUPS) < 2:
        raise ValueError(
            f"width is {width} and the last stage has one pixel: a group of a single value is "
            "normalised to nothing. Take a larger width or larger images."
        )


def small_resnet(
    *,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    widths: tuple[int, int, int] = (16, 32, 64),
    blocks: int = 1,
    norm: str = "batch",
    l2: float = 0.0,
) -> Model:
    """Residual network of 6 * blocks + 2 layers: a 3x3 stem and three stages of basic blocks.

    The shortcuts have no parameters (option A of the paper, its choice for CIFAR): where a stage
    begins they take every second pixel and fill the new channels with zeros.

    Args:
      image_shape: (height, width, channels); height and width at least 4.
      num_classes: C >= 2.
      widths: channels of the three stages, not falling; every stage but the first halves the image.
      blocks: basic blocks (two 3x3 convolutions) per stage, >= 1.
      norm: "batch", or "group" (of four channels), which leaves the examples of a batch apart.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model`, with `statistics` under batch normalisation, for batches
      {"x": float[n, H, W, channels], "y": int[n]} of n >= 2 examples.

    Raises:
      ValueError: for sizes out of range, or another norm.

    Example:
      >>> import jax
      >>> import models
      >>> params = jax.eval_shape(models.small_resnet().init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      75290

    References:
      He, Zhang, Ren, Sun, Deep Residual Learning for Image Recognition, 2016,
      https://arxiv.org/abs/1512.03385
      Ioffe, Szegedy, Batch Normalization: Accelerating Deep Network Training by Reducing Internal
      Covariate Shift, 2015, https://arxiv.org/abs/1502.03167
    """
    check_l2(l2)
    _check_small(image_shape, num_classes, widths, blocks)
    if norm not in SMALL_NORMS:
        raise ValueError(f"norm is {norm!r}: choose one of {', '.join(SMALL_NORMS)}.")
    stages = [(width, blocks) for width in widths]
    layers = _Layers(Conv, SMALL_NORMS[norm], _Padding)

    def make(rngs):
        return _ResNet(layers, _Basic, stages, image_shape[2], num_classes, "cifar", rngs)

    return model_of(make, l2)


def _check_small(image_shape, num_classes, widths, blocks):
    height, width, channels = image_shape
    if min(height, width) < 4 or channels < 1 or num_classes < 2:
        raise ValueError(
            f"image_shape is {image_shape} with {num_classes} classes: the image is halved twice, "
            "so it needs at least 4 x 4 pixels, and a channel and two classes. Resize the images."
        )
    if len(widths) != 3 or widths[0] < 1 or list(widths) != sorted(widths):
        raise ValueError(
            f"widths is {widths}: it must hold the channels of 3 stages, each at least as "
            "wide as the one before, as in (16, 32, 64)."
        )
    if blocks < 1:
        raise ValueError(f"blocks is {blocks}: every stage needs at least one block.")
