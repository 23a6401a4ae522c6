"""The contract of a model: pure functions; the model library stays behind them."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from syncopate.mesh import platform


class Model(NamedTuple):
    """What is trained.

    Fields:
      init: `key -> params`, a pytree of float arrays.
      loss: `(params, batch, key) -> float32[n]`, one loss per example of the batch.
      predict: `(params, inputs) -> logits`, without randomness; with `statistics` it is
        `(params, inputs, statistics) -> logits`.
      statistics: `(params, inputs) -> tree`, the mean and variance of one batch at every batch
        normalisation, or None for a model that has none.

    A model with statistics carries none of them through training: `loss` normalises with the
    moments of its own batch, so its losses depend on the whole batch, and `predict` with the
    moments it is given. Estimate those on training inputs, at the parameters that are evaluated,
    before every evaluation; the average of `statistics` over several batches serves.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import models
      >>> model = models.softmax_regression(num_features=4, num_classes=3)
      >>> params = model.init(jax.random.key(0))
      >>> batch = {"x": jnp.ones((2, 4)), "y": jnp.array([0, 2])}
      >>> model.loss(params, batch, jax.random.key(1)).shape
      (2,)
      >>> model.statistics is None
      True
    """

    init: Callable
    loss: Callable
    predict: Callable
    statistics: Callable | None = None


def softmax_loss(predict: Callable, l2: float) -> Callable:
    """Per-example cross-entropy, plus l2 / 2 |params|^2 in every example's loss.

    An example that is a sequence has the mean over its tokens.
    """
    check_l2(l2)

    def loss(params, batch, key):
        logits = predict(params, batch["x"])
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        losses = losses if losses.ndim == 1 else jnp.mean(losses, axis=-1)
        return losses + penalty(params, l2)

    return loss


def model_of(make: Callable, l2: float, *, keys: Callable = nnx.Rngs) -> Model:
    """The record of a network; with batch normalisation in it, one with `statistics`.

    Args:
      make: `keys(key) -> net`, where `net(x, given)` gives logits, normalised with the moments in
        the state where `given` is true, and otherwise with those of `x`, left in the state.
      l2: weight of l2/2 |params|^2.
    """

    def build(key):
        return nnx.split(make(keys(key)), nnx.Param, nnx.BatchStat)

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
        logits = net(x, statistics is not None)
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


def penalty(params, l2: float) -> jax.Array:
    """l2 / 2 |params|^2, a scalar."""
    if not l2:  # nothing that would use every parameter
        return 0.0
    return 0.5 * l2 * sum(jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))


def check_l2(l2: float) -> None:
    if not l2 >= 0:
        raise ValueError(f"l2 is {l2}: the weight of the penalty must be 0 or positive.")


def check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} is {value}: it must be at least {least}.")


def check_heads(width: int, heads: int) -> None:
    check_at_least(1, width=width, heads=heads)
    if width % heads:
        raise ValueError(
            f"width is {width} with {heads} heads: the heads share the width equally. Take a "
            "multiple of heads."
        )


def check_dtype(dtype: str) -> jnp.dtype:
    """The type that a model computes with; its parameters are float32 all the same."""
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(
            f"dtype is {dtype!r}: choose 'float32' or 'bfloat16' to compute with; parameters are "
            "float32 under both."
        )
    return jnp.dtype(dtype)


def product(x: jax.Array, weights: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x weights, of factors rounded to `dtype`, summed up and returned in float32."""
    x, weights = x.astype(dtype), weights.astype(dtype)
    contracted = ((x.ndim - 1,), (0,)), ((), ())
    return flat_dot_general(x, weights, contracted, preferred_element_type=jnp.float32)


def flat_dot_general(x: jax.Array, weights: jax.Array, dimension_numbers, **options) -> jax.Array:
    """`lax.dot_general` of x [..., K] and weights [K, N], on a CPU with one axis for all rows.

    A CPU is faster at it; a TPU's compiler joins less to such a product.
    """
    last_and_first = dimension_numbers == (((x.ndim - 1,), (0,)), ((), ()))
    if not last_and_first or weights.ndim != 2 or platform() != "cpu":
        return jax.lax.dot_general(x, weights, dimension_numbers, **options)
    rows = x.reshape(-1, x.shape[-1])
    y = jax.lax.dot_general(rows, weights, (((1,), (0,)), ((), ())), **options)
    return y.reshape(*x.shape[:-1], weights.shape[1])
