"""MobileNetV2: the published network, and a small one for images of the size of CIFAR's."""

import math
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx

from syncopate.models.base import Model, check_dtype, check_l2
from syncopate.models.convolutions import (
    Conv,
    DepthwiseConv,
    Pointwise,
    batch_norm,
    check_images,
    model_of,
)

# (expansion t, channels c, blocks n, stride s of the first block) of every stage.
IMAGENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
SMALL_STAGES = (
    (1, 8, 1, 1),
    (4, 16, 2, 2),
    (4, 24, 2, 2),
    (4, 32, 2, 1),
)


class _Block(nnx.Module):
    def __init__(self, fan_in, fan_out, expansion, stride, rngs):
        hidden = expansion * fan_in
        self.expands = expansion > 1
        if self.expands:
            self.expand = Pointwise(fan_in, hidden, rngs)
            self.norm1 = batch_norm(hidden, rngs)
        self.depthwise = DepthwiseConv(hidden, stride, rngs)
        self.norm2 = batch_norm(hidden, rngs)
        self.project = Pointwise(hidden, fan_out, rngs)
        self.norm3 = batch_norm(fan_out, rngs)
        self.residual = stride == 1 and fan_in == fan_out

    def __call__(self, x, given):
        y = x
        if self.expands:
            y = nnx.relu6(self.norm1(self.expand(y), use_running_average=given))
        y = nnx.relu6(self.norm2(self.depthwise(y), use_running_average=given))
        # The bottleneck is linear: a rectifier would lose what few channels hold.
        y = self.norm3(self.project(y), use_running_average=given)
        return x + y if self.residual else y


class _MobileNet(nnx.Module):
    def __init__(self, channels, num_classes, stem, stem_stride, stages, head, rngs):
        self.stem = Conv(channels, stem, stem_stride, rngs)
        self.norm1 = batch_norm(stem, rngs)
        self.names, fan_in = [], stem
        for stage, (expansion, fan_out, blocks, stride) in enumerate(stages):
            for block in range(blocks):
                self.names.append(f"stage{stage}_block{block}")
                step = stride if block == 0 else 1
                setattr(self, self.names[-1], _Block(fan_in, fan_out, expansion, step, rngs))
                fan_in = fan_out
        self.head = Pointwise(fan_in, head, rngs)
        self.norm2 = batch_norm(head, rngs)
        self.dense = nnx.Linear(head, num_classes, rngs=rngs)

    def __call__(self, x, given):
        x = nnx.relu6(self.norm1(self.stem(x), use_running_average=given))
        for name in self.names:
            x = getattr(self, name)(x, given)
        x = nnx.relu6(self.norm2(self.head(x), use_running_average=given))
        return self.dense(jnp.mean(x, axis=(1, 2), dtype=jnp.float32))


def _scaled(channels, width):
    """width * channels, as published: the nearest multiple of 8 that loses at most a tenth."""
    if width == 1:
        return channels
    rounded = max(8, int(width * channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * width * channels else rounded + 8


def mobilenet_v2(
    *,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    width: float = 1.0,
    stages: Sequence[tuple[int, int, int, int]] = SMALL_STAGES,
    stem_channels: int = 8,
    stem_stride: int = 1,
    head_channels: int = 128,
    dtype: str = "float32",
    l2: float = 0.0,
) -> Model:
    """MobileNetV2: inverted residuals with linear bottlenecks, ReLU6 and batch normalisation.

    A block of expansion t takes c channels by a 1x1 convolution to t c, filters each with a 3x3
    kernel, and projects them by a 1x1 convolution without a rectifier; it adds its input where
    the shapes agree. For t = 1 there is no first convolution. A 3x3 stem stands before the
    blocks, a 1x1 head, the mean over pixels and a dense layer after them; there is no dropout.

    The defaults make a small network for images of the size of CIFAR's. The published one has
    images of (224, 224, 3), 1000 classes, `models.mobilenet.IMAGENET_STAGES`, stem_channels 32,
    stem_stride 2 and head_channels 1280.

    Args:
      image_shape: (height, width, channels); height and width at least the product of all strides.
      num_classes: C >= 2.
      width: multiplies all channels, > 0; unless 1 they are rounded to multiples of 8, and those of
        the head only grow.
      stages: (expansion, channels, blocks, stride) of each, all >= 1, strides 1 or 2; the stride is
        that of a stage's first block.
      stem_channels, stem_stride: of the first convolution; the stride is 1 or 2.
      head_channels: of the last 1x1 convolution, >= 1.
      dtype: "float32" or "bfloat16", of activations and products; parameters, moments and logits
        are float32 all the same.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` with `statistics`, for batches {"x": float[n, H, W, channels], "y": int[n]} of
      n >= 2 examples.

    Raises:
      ValueError: for sizes out of range, or another dtype.

    Example:
      >>> import jax
      >>> from syncopate import models
      >>> params = jax.eval_shape(models.mobilenet_v2().init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      36122

    References:
      Sandler, Howard, Zhu, Zhmoginov, Chen, MobileNetV2: Inverted Residuals and Linear Bottlenecks,
      2018, https://arxiv.org/abs/1801.04381
      Ioffe, Szegedy, Batch Normalization: Accelerating Deep Network Training by Reducing Internal
      Covariate Shift, 2015, https://arxiv.org/abs/1502.03167
    """
    check_l2(l2)
    _check_layers(stages, width, stem_channels, stem_stride, head_channels)
    check_images(image_shape, num_classes, stem_stride * math.prod(s for *_, s in stages))
    scaled = tuple((t, _scaled(c, width), n, s) for t, c, n, s in stages)
    stem, head = _scaled(stem_channels, width), _scaled(head_channels, max(1.0, width))

    def make(rngs):
        return _MobileNet(image_shape[2], num_classes, stem, stem_stride, scaled, head, rngs)

    return model_of(make, l2, check_dtype(dtype))


def _check_layers(stages, width, stem_channels, stem_stride, head_channels):
    if not 0 < width < math.inf:
        raise ValueError(f"width is {width}: the factor of all channels must be positive.")
    for stage in stages:
        if len(stage) != 4 or min(stage) < 1 or stage[3] > 2:
            raise ValueError(
                f"stages holds {stage}: a stage is (expansion, channels, blocks, stride), all at "
                "least 1 and the stride 1 or 2, as in (6, 24, 2, 2)."
            )
    if not stages:
        raise ValueError("stages is empty: give at least one, as in ((6, 24, 2, 2),).")
    if min(stem_channels, head_channels) < 1 or stem_stride not in (1, 2):
        raise ValueError(
            f"stem_channels is {stem_channels}, stem_stride {stem_stride} and head_channels "
            f"{head_channels}: take at least one channel, and a stride of 1 or 2."
        )
