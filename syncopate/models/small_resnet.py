"""Small residual networks, for images of the size of CIFAR's."""

import jax.numpy as jnp
from flax import nnx

from syncopate.models.base import Model, check_l2
from syncopate.models.convolutions import Conv, batch_norm, group_norm, model_of

STAGES = 3
GROUP = 4  # channels that a group normalisation takes together: the widths here are small
NORMS = {
    "batch": batch_norm,
    "group": lambda width, rngs: group_norm(width, rngs, groups=max(1, width // GROUP)),
}


class _Block(nnx.Module):
    def __init__(self, norm, fan_in, fan_out, stride, rngs):
        self.conv1 = Conv(fan_in, fan_out, stride, rngs)
        self.norm1 = norm(fan_out, rngs)
        self.conv2 = Conv(fan_out, fan_out, 1, rngs)
        self.norm2 = norm(fan_out, rngs)
        self.stride, self.widened = stride, fan_out - fan_in

    def __call__(self, x, given):
        y = nnx.relu(self.norm1(self.conv1(x), given))
        y = self.norm2(self.conv2(y), given)
        shortcut = x[:, :: self.stride, :: self.stride]
        shortcut = jnp.pad(shortcut, ((0, 0), (0, 0), (0, 0), (0, self.widened)))
        return nnx.relu(y + shortcut)


class _ResNet(nnx.Module):
    def __init__(self, norm, channels, num_classes, widths, blocks, rngs):
        self.stem = Conv(channels, widths[0], 1, rngs)
        self.norm = norm(widths[0], rngs)
        self.names, fan_in = [], widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                self.names.append(f"stage{stage}_block{block}")
                setattr(self, self.names[-1], _Block(norm, fan_in, width, stride, rngs))
                fan_in = width
        self.dense = nnx.Linear(fan_in, num_classes, rngs=rngs)

    def __call__(self, x, given):
        x = nnx.relu(self.norm(self.stem(x), given))
        for name in self.names:
            x = getattr(self, name)(x, given)
        return self.dense(jnp.mean(x, axis=(1, 2)))


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
      >>> from syncopate import models
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
    _check(image_shape, num_classes, widths, blocks)
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}: choose one of {', '.join(NORMS)}.")

    def make(rngs):
        return _ResNet(NORMS[norm], image_shape[2], num_classes, widths, blocks, rngs)

    return model_of(make, l2)


def _check(image_shape, num_classes, widths, blocks):
    height, width, channels = image_shape
    if min(height, width) < 4 or channels < 1 or num_classes < 2:
        raise ValueError(
            f"image_shape is {image_shape} with {num_classes} classes: the image is halved twice, "
            "so it needs at least 4 x 4 pixels, and a channel and two classes. Resize the images."
        )
    if len(widths) != STAGES or widths[0] < 1 or list(widths) != sorted(widths):
        raise ValueError(
            f"widths is {widths}: it must hold the channels of {STAGES} stages, each at least as "
            "wide as the one before, as in (16, 32, 64)."
        )
    if blocks < 1:
        raise ValueError(f"blocks is {blocks}: every stage needs at least one block.")
