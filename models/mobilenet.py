"""MobileNetV2 and V3: the published networks, and a small one for images of CIFAR's size."""

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx

from models import base
from models.base import Model
from models.convolutions import Conv, DepthwiseConv, Keys, Pointwise, batch_norm

# V2: (expansion t, channels c, blocks n, stride s of the first block) for each stage.
IMAGENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
SMALL_STAGES = ((1, 8, 1, 1), (4, 16, 2, 2), (4, 24, 2, 2), (4, 32, 2, 1))

EPSILON, STEM = 1e-3, 16  # V3: of the normalisations; channels after the first convolution
RELU, SWISH = nnx.relu, nnx.hard_swish

# V3: (kernel size, expanded channels, output channels, squeezed channels, activation, stride) for
# each block. Squeezed are a quarter of the expanded channels, a multiple of 8; 0 means no squeeze.
LARGE = (
    (3, 16, 16, 0, RELU, 1),
    (3, 64, 24, 0, RELU, 2),
    (3, 72, 24, 0, RELU, 1),
    (5, 72, 40, 24, RELU, 2),
    (5, 120, 40, 32, RELU, 1),
    (5, 120, 40, 32, RELU, 1),
    (3, 240, 80, 0, SWISH, 2),
    (3, 200, 80, 0, SWISH, 1),
    (3, 184, 80, 0, SWISH, 1),
    (3, 184, 80, 0, SWISH, 1),
    (3, 480, 112, 120, SWISH, 1),
    (3, 672, 112, 168, SWISH, 1),
    (5, 672, 160, 168, SWISH, 2),
    (5, 960, 160, 240, SWISH, 1),
    (5, 960, 160, 240, SWISH, 1),
)
SMALL = (
    (3, 16, 16, 8, RELU, 2),
    (3, 72, 24, 0, RELU, 2),
    (3, 88, 24, 0, RELU, 1),
    (5, 96, 40, 24, SWISH, 2),
    (5, 240, 40, 64, SWISH, 1),
    (5, 240, 40, 64, SWISH, 1),
    (5, 120, 48, 32, SWISH, 1),
    (5, 144, 48, 40, SWISH, 1),
    (5, 288, 96, 72, SWISH, 2),
    (5, 576, 96, 144, SWISH, 1),
    (5, 576, 96, 144, SWISH, 1),
)
# (blocks, channels of the last 1x1 convolution, units of the classifier's hidden layer)
VARIANTS = {"large": (LARGE, 960, 1280), "small": (SMALL, 576, 1024)}
BLOCK_STRIDES = 16  # the product of the blocks' strides, in both variants


class _Excitation(nnx.Module):
    """Squeeze and excitation: x times a gate per channel, computed from the mean over pixels."""

    def __init__(self, channels, squeezed, rngs):
        self.squeeze = nnx.Linear(channels, squeezed, rngs=rngs)
        self.excite = nnx.Linear(squeezed, channels, rngs=rngs)

    def __call__(self, x):
        mean = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        gate = nnx.hard_sigmoid(self.excite(nnx.relu(self.squeeze(mean))))
        return x * gate[:, None, None].astype(x.dtype)


class _Block(nnx.Module):
    def __init__(self, norm, fan_in, size, hidden, fan_out, squeezed, activation, stride, rngs):
        self.expands, self.excites = hidden != fan_in, squeezed > 0
        if self.expands:
            self.expand = Pointwise(fan_in, hidden, rngs)
            self.norm1 = norm(hidden, rngs)
        self.depthwise = DepthwiseConv(hidden, stride, rngs, size=size)
        self.norm2 = norm(hidden, rngs)
        if self.excites:
            self.excitation = _Excitation(hidden, squeezed, rngs)
        self.project = Pointwise(hidden, fan_out, rngs)
        self.norm3 = norm(fan_out, rngs)
        self.activation = activation
        self.residual = stride == 1 and fan_in == fan_out

    def __call__(self, x, given):
        y = x
        if self.expands:
            y = self.activation(self.norm1(self.expand(y), given))
        y = self.activation(self.norm2(self.depthwise(y), given))
        if self.excites:
            y = self.excitation(y)
        # The bottleneck is linear: a rectifier would lose information in few channels.
        y = self.norm3(self.project(y), given)
        return x + y if self.residual else y


class _MobileNet(nnx.Module):
    """A stem, blocks {name: row as in `LARGE`}, a head, and optionally a hidden layer."""

    def __init__(
        self, blocks, channels, num_classes, stem, stride, head, rngs,
        *, hidden, activation, norm, dtype
    ):  # fmt: skip
        self.stem = Conv(channels, stem, stride, rngs)
        self.norm1 = norm(stem, rngs)
        self.names, fan_in = list(blocks), stem
        for name, block in blocks.items():
            setattr(self, name, _Block(norm, fan_in, *block, rngs=rngs))
            fan_in = block[2]
        self.head = Pointwise(fan_in, head, rngs)
        self.norm2 = norm(head, rngs)
        self.activation, self.perceptron, self.dtype = activation, hidden is not None, dtype
        if self.perceptron:
            self.dense1 = nnx.Linear(head, hidden, rngs=rngs)
            self.dense2 = nnx.Linear(hidden, num_classes, rngs=rngs)
        else:
            self.dense = nnx.Linear(head, num_classes, rngs=rngs)

    def __call__(self, x, given):
        x = self.activation(self.norm1(self.stem(x.astype(self.dtype)), given))
        for name in self.names:
            x = getattr(self, name)(x, given)
        x = self.activation(self.norm2(self.head(x), given))
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        if self.perceptron:
            return self.dense2(self.activation(self.dense1(x)))
        return self.dense(x)


@base.checked
def mobilenet_v2(
    *,
    image_shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    stages: Sequence[tuple[int, int, int, int]] = SMALL_STAGES,
    stem_channels: int = 8,
    stem_stride: int = 1,
    head_channels: int = 128,
    dtype: str = "float32",
    l2: float = 0.0,
) -> Model:
    """MobileNetV2: inverted residuals with linear bottlenecks, ReLU6 and batch normalisation.

    A block with expansion t expands c channels to t c by a 1x1 convolution (left out for t = 1),
    filters each with a 3x3 kernel, and projects them by a 1x1 convolution without a rectifier. It
    adds its input if the shapes agree. A 3x3 stem precedes the blocks; a 1x1 head, the mean over
    pixels and a dense layer follow. There is no dropout.

    The defaults give a small network for images of CIFAR's size. The published one has images of
    (224, 224, 3), 1000 classes, `models.mobilenet.IMAGENET_STAGES`, stem_channels 32, stem_stride
    2 and head_channels 1280.

    Args:
      image_shape: (height, width, channels); height and width at least the product of all strides.
      num_classes: C >= 2.
      stages: (expansion, channels, blocks, stride of the first block) for each, all >= 1, the
        stride 1 or 2.
      stem_channels, stem_stride: of the first convolution; the stride is 1 or 2.
      head_channels: of the last 1x1 convolution, >= 1.
      dtype: "float32" or "bfloat16", for activations and products; parameters, moments and logits
        are float32.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` with `statistics`, for batches {"x": float[n, H, W, channels], "y": int[n]} of
      n >= 2 examples.

    Raises:
      ValueError: if a size is out of range or the dtype is unknown.

    Examples:
      >>> import jax, models
      >>> params = jax.eval_shape(models.mobilenet_v2().init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      36122

    References:
      Sandler, Howard, Zhu, Zhmoginov, Chen, MobileNetV2: Inverted Residuals and Linear Bottlenecks,
      2018, https://arxiv.org/abs/1801.04381
    """
    rows = stages if isinstance(stages, tuple | list) else ()
    if not rows or not all(base.are_sizes(row, 4) and row[3] <= 2 for row in rows):
        raise ValueError(
            f"stages is {stages}: pass at least one (expansion, channels, blocks, stride), all at "
            "least 1 and the stride 1 or 2, for example ((6, 24, 2, 2),)."
        )
    compute = base.check_dtype(dtype)
    base.check_choice((1, 2), stem_stride=stem_stride)
    base.check_images(image_shape, stem_stride * math.prod(s for *_, s in stages))
    blocks, fan_in = {}, stem_channels
    for stage, (expansion, channels, number, stride) in enumerate(stages):
        for k in range(number):
            row = (3, expansion * fan_in, channels, 0, nnx.relu6, stride if k == 0 else 1)
            blocks[f"stage{stage}_block{k}"], fan_in = row, channels

    def make(rngs):
        return _MobileNet(
            blocks, image_shape[2], num_classes, stem_channels, stem_stride, head_channels, rngs,
            hidden=None, activation=nnx.relu6, norm=batch_norm, dtype=compute,
        )  # fmt: skip

    return base.model_of(make, l2, inputs=(None, None, None, image_shape[2]), keys=Keys)


@base.checked
def mobilenet_v3(
    *,
    variant: str = "large",
    image_shape: tuple[int, int, int] = (224, 224, 3),
    num_classes: int = 1000,
    stem_stride: int = 2,
    dtype: str = "float32",
    l2: float = 0.0,
) -> Model:
    """MobileNetV3: inverted residuals with squeeze and excitation, and hard-swish.

    The blocks are those of `mobilenet_v2` with 3x3 or 5x5 kernels, the activation
    x relu6(x + 3) / 6 or a rectifier, and in some blocks squeeze and excitation. A perceptron with
    one hidden layer computes the logits. There is no dropout.

    Args:
      variant: "large" or "small", as published.
      image_shape: (height, width, channels); height and width at least 16 * stem_stride.
      num_classes, stem_stride, dtype, l2: see `mobilenet_v2`; the published stride is 2.

    Returns:
      A `Model` with `statistics`, for batches {"x": float[n, H, W, channels], "y": int[n]} of
      n >= 2 examples.

    Raises:
      ValueError: if a size is out of range, or the variant or dtype is unknown.

    Examples:
      >>> import jax, models
      >>> model = models.mobilenet_v3(variant="small")
      >>> params = jax.eval_shape(model.init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      2542856

    References:
      Howard et al., Searching for MobileNetV3, 2019, https://arxiv.org/abs/1905.02244
    """
    base.check_choice(VARIANTS, variant=variant)
    compute = base.check_dtype(dtype)
    base.check_choice((1, 2), stem_stride=stem_stride)
    base.check_images(image_shape, stem_stride * BLOCK_STRIDES)
    blocks, head, hidden = VARIANTS[variant]
    rows = {f"block{k}": block for k, block in enumerate(blocks)}
    norm = functools.partial(batch_norm, epsilon=EPSILON)

    def make(rngs):
        return _MobileNet(
            rows, image_shape[2], num_classes, STEM, stem_stride, head, rngs,
            hidden=hidden, activation=nnx.hard_swish, norm=norm, dtype=compute,
        )  # fmt: skip

    return base.model_of(make, l2, inputs=(None, None, None, image_shape[2]), keys=Keys)
