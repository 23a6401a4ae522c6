"""MobileNetV2: the published network, and a small one for images of CIFAR's size."""

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


class _Block(nnx.Module):
    def __init__(self, fan_in, hidden, fan_out, stride, rngs):
        self.expands = hidden != fan_in
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
            y = nnx.relu6(self.norm1(self.expand(y), given))
        y = nnx.relu6(self.norm2(self.depthwise(y), given))
        # The bottleneck is linear: a rectifier would lose information in few channels.
        y = self.norm3(self.project(y), given)
        return x + y if self.residual else y


class _MobileNet(nnx.Module):
    """A stem, blocks {name: (channels, expanded, channels out, stride)}, and a head."""

    def __init__(self, blocks, channels, num_classes, stem, stride, head, rngs, *, dtype):
        self.stem = Conv(channels, stem, stride, rngs)
        self.norm1 = batch_norm(stem, rngs)
        self.names, fan_out = list(blocks), stem
        for name, block in blocks.items():
            setattr(self, name, _Block(*block, rngs=rngs))
            fan_out = block[2]
        self.head = Pointwise(fan_out, head, rngs)
        self.norm2 = batch_norm(head, rngs)
        self.dense = nnx.Linear(head, num_classes, rngs=rngs)
        self.dtype = dtype

    def __call__(self, x, given):
        x = nnx.relu6(self.norm1(self.stem(x.astype(self.dtype)), given))
        for name in self.names:
            x = getattr(self, name)(x, given)
        x = nnx.relu6(self.norm2(self.head(x), given))
        return self.dense(jnp.mean(x, axis=(1, 2), dtype=jnp.float32))


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
    adds its input to the result if their shapes are equal. A 3x3 stem precedes the blocks; a 1x1
    head, the mean over pixels and a dense layer follow. There is no dropout.

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
            row = (fan_in, expansion * fan_in, channels, stride if k == 0 else 1)
            blocks[f"stage{stage}_block{k}"], fan_in = row, channels

    def make(rngs):
        return _MobileNet(
            blocks,
            image_shape[2],
            num_classes,
            stem_channels,
            stem_stride,
            head_channels,
            rngs,
            dtype=compute,
        )

    return base.model_of(make, l2, inputs=(None, None, None, image_shape[2]), keys=Keys)
