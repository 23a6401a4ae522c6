"""What the convolutional networks share: convolutions, normalisations, the record; and LeNet."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.base import Model, check_l2, functions_of, softmax_loss
from syncopate.mesh import platform

EPSILON = 1e-5  # of the normalisations
GROUPS = 32  # of the group normalisations, or as many as there are channels


def _shifted(x, stride, size):
    """The size^2 views of the images [n, H, W, C] that an odd kernel sees, padded by size // 2."""
    _, height, width, _ = x.shape
    edge = (size // 2, size // 2)
    x = jnp.pad(x, ((0, 0), edge, edge, (0, 0)))
    return [
        x[:, i : i + height : stride, j : j + width : stride]
        for i in range(size)
        for j in range(size)
    ]


class Convolution(nnx.Module):
    """Convolution with an odd square kernel, without bias, padded by size // 2 pixels.

    As all layers here it answers in the type of its input; the parameters stay float32.
    """

    def __init__(self, fan_in, fan_out, stride, rngs, *, size=3):
        init = nnx.initializers.he_normal()
        self.kernel = nnx.Param(init(rngs.params(), (size, size, fan_in, fan_out), jnp.float32))
        self.stride = stride

    def __call__(self, x):
        kernel = self.kernel[...].astype(x.dtype)
        edge = kernel.shape[0] // 2
        return jax.lax.conv_general_dilated(
            x,
            kernel,
            (self.stride, self.stride),
            ((edge, edge), (edge, edge)),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )


class Conv(Convolution):
    """The same function as one matrix product.

    On a CPU, XLA runs a convolution inside a loop (scan, map) about ten times slower than this
    product, and vmap over kernels leaves a batched product instead of a grouped convolution. The
    price is memory: size^2 copies of the input.
    """

    def __call__(self, x):
        kernel = self.kernel[...].astype(x.dtype)
        shifted = jnp.concatenate(_shifted(x, self.stride, kernel.shape[0]), axis=-1)
        return shifted @ kernel.reshape(-1, kernel.shape[-1])


class Pointwise(nnx.Module):
    """1x1 convolution without bias, a matrix product over the channels."""

    def __init__(self, fan_in, fan_out, rngs, *, stride=1):
        init = nnx.initializers.he_normal()
        self.kernel = nnx.Param(init(rngs.params(), (fan_in, fan_out), jnp.float32))
        self.stride = stride

    def __call__(self, x):
        return x[:, :: self.stride, :: self.stride] @ self.kernel[...].astype(x.dtype)


class DepthwiseConv(nnx.Module):
    """Convolution of every channel by itself, without bias, as size^2 scaled, shifted images."""

    def __init__(self, channels, stride, rngs, *, size=3):
        init = nnx.initializers.he_normal()
        self.kernel = nnx.Param(init(rngs.params(), (size, size, 1, channels), jnp.float32))
        self.stride = stride

    def __call__(self, x):
        size, _, _, channels = self.kernel.shape
        kernel = self.kernel[...].reshape(-1, 1, 1, 1, channels)
        views = _shifted(x, self.stride, size)
        # The float32 kernel makes the terms float32: no rounding of every partial sum.
        return sum(kernel[k] * view for k, view in enumerate(views)).astype(x.dtype)


def _in_float32(norm, x):
    """norm(x) with moments and arithmetic in float32, of the type of x."""
    return norm(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


class _BatchNorm(nnx.BatchNorm):
    def __call__(self, x, use_running_average):
        norm = super().__call__
        return _in_float32(lambda x: norm(x, use_running_average=use_running_average), x)


class _GroupNorm(nnx.GroupNorm):
    def __call__(self, x, use_running_average):
        """Called as a batch normalisation is; there are no running moments."""
        return _in_float32(super().__call__, x)


def batch_norm(width: int, rngs: nnx.Rngs, *, epsilon: float = EPSILON) -> nnx.BatchNorm:
    # Without momentum a forward pass leaves exactly the moments of its batch in the state.
    return _BatchNorm(width, momentum=0.0, epsilon=epsilon, rngs=rngs)


def group_norm(width: int, rngs: nnx.Rngs, *, groups: int = GROUPS) -> nnx.GroupNorm:
    return _GroupNorm(width, min(groups, width), epsilon=EPSILON, rngs=rngs)


class _Keys:
    """The keys of nnx.Rngs, whose traced counter costs seconds where a network is deep."""

    def __init__(self, key):
        self.key, self.drawn = key, 0

    def params(self):
        self.drawn += 1
        return jax.random.fold_in(self.key, self.drawn - 1)


def model_of(make: Callable, l2: float, dtype: jnp.dtype = jnp.float32) -> Model:
    """The record of a network; with batch normalisation in it, one with `statistics`.

    Args:
      make: `rngs -> net`, where `net(x, given)` gives logits, normalised with the moments in the
        state where `given` is true, and otherwise with those of `x`, left in the state.
      l2: weight of l2/2 |params|^2.
      dtype: of the images as `net` gets them, and so of its activations.
    """

    def build(key):
        return nnx.split(make(_Keys(key)), nnx.Param, nnx.BatchStat)

    graph, _, moments = nnx.eval_shape(lambda: build(jax.random.key(0)))
    # Shapes only: making a model must not start JAX's devices, for tables of recipes make some at
    # import, before `jax.distributed.initialize`.
    moments = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype), nnx.to_pure_dict(moments)
    )

    def zeros():  # overwritten before anything reads them
        return jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), moments)

    def init(key):
        return nnx.to_pure_dict(build(key)[1])

    def forward(params, x, statistics):
        given = zeros() if statistics is None else statistics
        net = nnx.merge(graph, nnx.State(params), nnx.State(given))
        logits = net(x.astype(dtype), statistics is not None)
        return logits, nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))

    def in_training(params, x):
        return forward(params, x, None)[0]

    def predict(params, x, statistics):
        return forward(params, x, statistics)[0]

    def statistics(params, x):
        return forward(params, x, None)[1]

    if not moments:
        return Model(init, softmax_loss(in_training, l2), in_training)
    return Model(init, softmax_loss(in_training, l2), predict, statistics)


def check_images(image_shape: tuple[int, int, int], num_classes: int, reduction: int) -> None:
    height, width, channels = image_shape
    if min(height, width) < reduction or channels < 1 or num_classes < 2:
        raise ValueError(
            f"image_shape is {image_shape} with {num_classes} classes: the strides shrink the "
            f"image {reduction} times, so it needs at least {reduction} x {reduction} pixels, and "
            "a channel and two classes. Resize the images or take smaller strides."
        )


class _BiasedConv(nnx.Conv):
    """The same convolution as one matrix product, which CPUs run ten times faster in a loop."""

    def __call__(self, x):
        if platform() != "cpu":
            return super().__call__(x)
        size = self.kernel_size[0]
        if self.padding == "SAME":
            x = jnp.pad(x, ((0, 0), (size // 2, size // 2), (size // 2, size // 2), (0, 0)))
        height, width = (side - size + 1 for side in x.shape[1:3])
        views = [x[:, i : i + height, j : j + width] for i in range(size) for j in range(size)]
        kernel = self.kernel[...]
        product = jnp.concatenate(views, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])
        return product + self.bias[...][None, None, None]


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

    def __call__(self, x):
        for conv in (self.conv1, self.conv2):
            x = nnx.max_pool(nnx.relu(conv(x)), (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        return self.dense3(nnx.relu(self.dense2(nnx.relu(self.dense1(x)))))


def lenet(
    *, image_shape: tuple[int, int, int] = (28, 28, 1), num_classes: int = 10, l2: float = 0.0
) -> Model:
    """LeNet-5 with ReLU: two 5x5 convolutions (6, 16), dense 120, 84, C.

    Args:
      image_shape: (height, width, channels); height and width both 28 or both 32.
      num_classes: C >= 2; l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` for batches {"x": float[n, H, W, channels], "y": int[n]}; 61,706 parameters for
      28 x 28 x 1 and 10 classes.

    Raises:
      ValueError: for another image size.

    Example:
      >>> import jax
      >>> import models
      >>> params = models.lenet().init(jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      61706

    References:
      LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998,
      https://doi.org/10.1109/5.726791
    """
    check_l2(l2)
    height, width, channels = image_shape
    if (height, width) not in ((28, 28), (32, 32)) or channels < 1 or num_classes < 2:
        raise ValueError(
            f"image_shape is {image_shape} with {num_classes} classes: LeNet takes 28 x 28 or "
            "32 x 32 images and at least two classes. Resize the images."
        )

    def make(rngs):
        return _LeNet(height, channels, num_classes, rngs)

    init, apply = functions_of(make)

    def predict(params, x):
        return apply(params, x.astype(jnp.float32))

    return Model(init, softmax_loss(predict, l2), predict)
