"""What the networks with batch normalisation share: 3x3 convolutions, moments, the record."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.base import Model, softmax_loss


def _shifted(x, stride):
    """The nine views of the images [n, H, W, C] that a 3x3 kernel sees, padded by one pixel."""
    _, height, width, _ = x.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return [
        x[:, i : i + height : stride, j : j + width : stride] for i in range(3) for j in range(3)
    ]


class Conv(nnx.Module):
    """3x3 convolution without bias, padded by one pixel, as one matrix product.

    On a CPU, XLA runs a convolution inside a loop (scan, map) about ten times slower than this
    product, and vmap over kernels leaves a batched product instead of a grouped convolution. The
    price is memory: nine copies of the input.
    """

    def __init__(self, fan_in, fan_out, stride, rngs):
        init = nnx.initializers.he_normal()
        self.kernel = nnx.Param(init(rngs.params(), (3, 3, fan_in, fan_out), jnp.float32))
        self.stride = stride

    def __call__(self, x):
        kernel = self.kernel[...]
        shifted = jnp.concatenate(_shifted(x, self.stride), axis=-1)
        return shifted @ kernel.reshape(-1, kernel.shape[-1])


class DepthwiseConv(nnx.Module):
    """3x3 convolution of every channel by itself, without bias, as nine scaled, shifted images."""

    def __init__(self, channels, stride, rngs):
        init = nnx.initializers.he_normal()
        self.kernel = nnx.Param(init(rngs.params(), (3, 3, 1, channels), jnp.float32))
        self.stride = stride

    def __call__(self, x):
        kernel = self.kernel[...].reshape(9, 1, 1, 1, -1)
        return sum(kernel[k] * view for k, view in enumerate(_shifted(x, self.stride)))


def norm(width: int, rngs: nnx.Rngs) -> nnx.BatchNorm:
    # Without momentum a forward pass leaves exactly the moments of its batch in the state.
    return nnx.BatchNorm(width, momentum=0.0, rngs=rngs)


def model_of(make: Callable, l2: float) -> Model:
    """The record of a network with batch normalisation.

    Args:
      make: `rngs -> net`, where `net(x, given)` gives logits, normalised with the moments in the
        state where `given` is true, and otherwise with those of `x`, left in the state.
      l2: weight of l2/2 |params|^2.
    """

    def build(key):
        return nnx.split(make(nnx.Rngs(key)), nnx.Param, nnx.BatchStat)

    graph, _, moments = nnx.eval_shape(lambda: build(jax.random.key(0)))
    # They are overwritten before anything reads them.
    zeros = jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), nnx.to_pure_dict(moments))

    def init(key):
        return nnx.to_pure_dict(build(key)[1])

    def forward(params, x, statistics):
        given = zeros if statistics is None else statistics
        net = nnx.merge(graph, nnx.State(params), nnx.State(given))
        logits = net(x.astype(jnp.float32), statistics is not None)
        return logits, nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))

    def in_training(params, x):
        return forward(params, x, None)[0]

    def predict(params, x, statistics):
        return forward(params, x, statistics)[0]

    def statistics(params, x):
        return forward(params, x, None)[1]

    return Model(init, softmax_loss(in_training, l2), predict, statistics)
