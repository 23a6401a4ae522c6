"""MobileNetV3, large and small."""

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

EPSILON = 1e-3  # of the normalisations
STEM = 16
RELU, SWISH = nnx.relu, nnx.hard_swish

# Of every block: (kernel size, expanded channels, output channels, units of the squeeze,
# activation, stride). A squeeze has a quarter of the expanded channels, as a multiple of 8, and 0
# stands for none.
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
BLOCK_STRIDES = 16  # the product over the blocks, of both variants


def _norm(width, rngs):
    return batch_norm(width, rngs, epsilon=EPSILON)


class _Excitation(nnx.Module):
    """x times a gate per channel, from the mean over the pixels: squeeze and excitation."""

    def __init__(self, channels, squeezed, rngs):
        self.squeeze = nnx.Linear(channels, squeezed, rngs=rngs)
        self.excite = nnx.Linear(squeezed, channels, rngs=rngs)

    def __call__(self, x):
        mean = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        gate = nnx.hard_sigmoid(self.excite(nnx.relu(self.squeeze(mean))))
        return x * gate[:, None, None].astype(x.dtype)


class _Block(nnx.Module):
    def __init__(self, fan_in, size, hidden, fan_out, squeezed, activation, stride, rngs):
        self.expands, self.excites = hidden != fan_in, squeezed > 0
        if self.expands:
            self.expand = Pointwise(fan_in, hidden, rngs)
            self.norm1 = _norm(hidden, rngs)
        self.depthwise = DepthwiseConv(hidden, stride, rngs, size=size)
        self.norm2 = _norm(hidden, rngs)
        if self.excites:
            self.excitation = _Excitation(hidden, squeezed, rngs)
        self.project = Pointwise(hidden, fan_out, rngs)
        self.norm3 = _norm(fan_out, rngs)
        self.activation = activation
        self.residual = stride == 1 and fan_in == fan_out

    def __call__(self, x, given):
        y = x
        if self.expands:
            y = self.activation(self.norm1(self.expand(y), given))
        y = self.activation(self.norm2(self.depthwise(y), given))
        if self.excites:
            y = self.excitation(y)
        # The bottleneck is linear: a rectifier would lose what few channels hold.
        y = self.norm3(self.project(y), given)
        return x + y if self.residual else y


class _MobileNetV3(nnx.Module):
    def __init__(self, channels, num_classes, stem_stride, blocks, head, hidden, rngs):
        self.stem = Conv(channels, STEM, stem_stride, rngs)
        self.norm1 = _norm(STEM, rngs)
        self.names, fan_in = [], STEM
        for k, block in enumerate(blocks):
            self.names.append(f"block{k}")
            setattr(self, self.names[-1], _Block(fan_in, *block, rngs))
            fan_in = block[2]
        self.head = Pointwise(fan_in, head, rngs)
        self.norm2 = _norm(head, rngs)
        self.dense1 = nnx.Linear(head, hidden, rngs=rngs)
        self.dense2 = nnx.Linear(hidden, num_classes, rngs=rngs)

    def __call__(self, x, given):
        x = nnx.hard_swish(self.norm1(self.stem(x), given))
        for name in self.names:
            x = getattr(self, name)(x, given)
        x = nnx.hard_swish(self.norm2(self.head(x), given))
        x = jnp.mean(x, axis=(1, 2), dtype=jnp.float32)
        return self.dense2(nnx.hard_swish(self.dense1(x)))


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

    A block takes its channels by a 1x1 convolution to more of them, filters each with a 3x3 or 5x5
    kernel, multiplies each by a gate from the means of all (in some blocks), and projects them by
    a 1x1 convolution without an activation; it adds its input where the shapes agree. The
    activation x relu6(x + 3) / 6 or a rectifier follows every other batch normalisation, whose
    epsilon is 1e-3. A 1x1 convolution, the mean over pixels and a perceptron with one hidden layer
    stand after the blocks. The published dropout in the perceptron and in the blocks is left out.

    Args:
      variant: "large" or "small", the published two.
      image_shape: (height, width, channels); height and width at least 16 * stem_stride.
      num_classes: C >= 2.
      stem_stride: of the first convolution, 1 or 2 (as published).
      dtype: "float32" or "bfloat16", of activations and products; parameters, moments, gates and
        the perceptron are float32 all the same.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` with `statistics`, for batches {"x": float[n, H, W, channels], "y": int[n]} of
      n >= 2 examples.

    Raises:
      ValueError: for sizes out of range, or an unknown variant or dtype.

    Example:
      >>> import jax
      >>> from syncopate import models
      >>> model = models.mobilenet_v3(variant="small")
      >>> params = jax.eval_shape(model.init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      2542856

    References:
      Howard et al., Searching for MobileNetV3, 2019, https://arxiv.org/abs/1905.02244
      Hu, Shen, Albanie, Sun, Wu, Squeeze-and-Excitation Networks, 2018,
      https://arxiv.org/abs/1709.01507
    """
    check_l2(l2)
    if variant not in VARIANTS:
        raise ValueError(f"variant is {variant!r}: take one of 'large' and 'small'.")
    if stem_stride not in (1, 2):
        raise ValueError(f"stem_stride is {stem_stride}: take a stride of 1 or 2.")
    check_images(image_shape, num_classes, stem_stride * BLOCK_STRIDES)
    blocks, head, hidden = VARIANTS[variant]

    def make(rngs):
        return _MobileNetV3(image_shape[2], num_classes, stem_stride, blocks, head, hidden, rngs)

    return model_of(make, l2, check_dtype(dtype))
