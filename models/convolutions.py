"""LeNet, and the convolutions and normalisations of the convolutional networks."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from models.base import Model, check_images, checked, model_of
from syncopate.mesh import platform

EPSILON = 1e-5  # of the normalisations


def groups(channels: int) -> int:
    """The number of groups of a group normalisation: 32, or one per channel if there are fewer."""
    return min(32, channels)


def _padded(x, size):
    """The images [n, H, W, C], padded with size // 2 zeros on each side."""
    edge = (size // 2, size // 2)
    return jnp.pad(x, ((0, 0), edge, edge, (0, 0)))


def _views(x, size, stride=1):
    """The size^2 shifted images that a kernel's entries are multiplied with."""
    height, width = (side - size + 1 for side in x.shape[1:3])
    return [
        x[:, i : i + height : stride, j : j + width : stride]
        for i in range(size)
        for j in range(size)
    ]


def _kernel(rngs, *shape):
    return nnx.Param(nnx.initializers.he_normal()(rngs.params(), shape, jnp.float32))


class Convolution(nnx.Module):
    """Convolution with an odd square kernel, without bias, padded by size // 2 pixels.

    Like all layers here it returns the type of its input; its parameters are float32.
    """

    def __init__(self, fan_in, fan_out, stride, rngs, *, size=3):
        self.kernel = _kernel(rngs, size, size, fan_in, fan_out)
        self.stride = stride

    def __call__(self, x):
        kernel = self.kernel[...].astype(x.dtype)
        edge = kernel.shape[0] // 2
        strides, edges = (self.stride, self.stride), ((edge, edge), (edge, edge))
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, strides, edges, dimension_numbers=names)


class Conv(Convolution):
    """`Convolution` as one matrix product.

    On a CPU this is about ten times faster than XLA's convolution inside a loop (scan, map), and
    vmap over kernels gives a batched product, not a grouped convolution. It needs memory for
    size^2 copies of the input.
    """

    def __call__(self, x):
        kernel = self.kernel[...].astype(x.dtype)
        size = kernel.shape[0]
        views = jnp.concatenate(_views(_padded(x, size), size, self.stride), axis=-1)
        return views @ kernel.reshape(-1, kernel.shape[-1])


class Pointwise(nnx.Module):
    """1x1 convolution without bias, a matrix product over the channels."""

    def __init__(self, fan_in, fan_out, rngs, *, stride=1):
        self.kernel = _kernel(rngs, fan_in, fan_out)
        self.stride = stride

    def __call__(self, x):
        return x[:, :: self.stride, :: self.stride] @ self.kernel[...].astype(x.dtype)


class DepthwiseConv(nnx.Module):
    """Convolution of each channel, without bias, as a sum of size^2 shifted, scaled images."""

    def __init__(self, channels, stride, rngs, *, size=3):
        self.kernel = _kernel(rngs, size, size, 1, channels)
        self.stride = stride

    def __call__(self, x):
        size, _, _, channels = self.kernel.shape
        kernel = self.kernel[...].reshape(-1, 1, 1, 1, channels)
        views = _views(_padded(x, size), size, self.stride)
        # The float32 kernel makes the terms float32, so that only the sum is rounded.
        terms = [kernel[k] * view for k, view in enumerate(views)]
        return sum(terms[1:], start=terms[0]).astype(x.dtype)


def _in_float32(norm, x):
    """norm(x), computed in float32 and returned in the type of x."""
    return norm(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


class _BatchNorm(nnx.BatchNorm):
    def __call__(self, x, use_running_average):
        norm = super().__call__
        return _in_float32(lambda x: norm(x, use_running_average=use_running_average), x)


class _GroupNorm(nnx.GroupNorm):
    def __call__(self, x, use_running_average):
        """The second argument is that of a batch normalisation, and is not used."""
        return _in_float32(super().__call__, x)


def batch_norm(width: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    """Batch normalisation without momentum: the state holds the moments of the last batch."""
    return _BatchNorm(width, momentum=0.0, epsilon=EPSILON, rngs=rngs)


def group_norm(
    width: int, rngs: nnx.Rngs, *, groups_of: Callable[[int], int] = groups
) -> nnx.GroupNorm:
    """Group normalisation with `groups_of(width)` groups."""
    return _GroupNorm(width, groups_of(width), epsilon=EPSILON, rngs=rngs)


class Keys:
    """The keys of nnx.Rngs without its traced counter, which takes seconds for deep networks."""

    def __init__(self, key: Key[Array, ""]):
        self.key, self.drawn = key, 0

    def params(self) -> Key[Array, ""]:
        """The next key."""
        self.drawn += 1
        return jax.random.fold_in(self.key, self.drawn - 1)


class _BiasedConv(nnx.Conv):
    """On a CPU a matrix product, as in `Conv`."""

    def __call__(self, x):
        if platform() != "cpu":
            return super().__call__(x)
        kernel = self.kernel[...]
        size, bias = kernel.shape[0], 0.0 if self.bias is None else self.bias[...]
        views = _views(_padded(x, size) if self.padding == "SAME" else x, size)
        product = jnp.concatenate(views, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])
        return product + jnp.reshape(bias, (1, 1, 1, -1))


class _LeNet(nnx.Module):
    def __init__(self, side, channels, num_classes, rngs):
        # A 28 x 28 image is padded to the 32 x 32 of the paper.
        self.conv1 = _BiasedConv(
            channels, 6, (5, 5), padding="SAME" if side == 28 else "VALID", rngs=rngs
        )
        self.conv2 = _BiasedConv(6, 16, (5, 5), padding="VALID", rngs=rngs)
        self.dense1 = nnx.Linear(400, 120, rngs=rngs)
        self.dense2 = nnx.Linear(120, 84, rngs=rngs)
        self.dense3 = nnx.Linear(84, num_classes, rngs=rngs)

    def __call__(self, x, given):
        x = x.astype(jnp.float32)
        for conv in (self.conv1, self.conv2):
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        return self.dense3(nnx.relu(self.dense2(nnx.relu(self.dense1(x)))))


@checked
def lenet(
    *, image_shape: tuple[int, int, int] = (28, 28, 1), num_classes: int = 10, l2: float = 0.0
) -> Model:
    """LeNet-5 with ReLU: two 5x5 convolutions (6, 16), dense 120, 84, C.

    Args:
      image_shape: (height, width, channels); height and width both 28 or both 32.
      num_classes: C >= 2.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` for batches {"x": float[n, H, W, channels], "y": int[n]}; 61,706 parameters for
      28 x 28 x 1 and 10 classes.

    Raises:
      ValueError: for another image size.

    Examples:
      >>> import jax, models
      >>> params = models.lenet().init(jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      61706

    References:
      LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998,
      https://doi.org/10.1109/5.726791
    """
    check_images(image_shape)
    height, width, channels = image_shape
    if (height, width) not in ((28, 28), (32, 32)):
        raise ValueError(
            f"image_shape is {image_shape}: LeNet takes 28 x 28 or 32 x 32 images. Resize yours."
        )

    return model_of(
        lambda rngs: _LeNet(height, channels, num_classes, rngs), l2, inputs=(None, *image_shape)
    )
