"""A long short-term memory language model with tied embeddings."""

import math

import jax
import jax.numpy as jnp

from models import base
from models.base import Model

RANGE = 0.1  # of the initial embeddings


@base.checked
def lstm(
    *, vocab_size: int, width: int, depth: int = 2, dtype: str = "float32", l2: float = 0.0
) -> Model:
    """Long short-term memory that predicts every next token; tied embeddings, without dropout.

    In each layer, with x_t the output of the layer below (embeddings for the first), h_0 = c_0 = 0,

      i, f, g, o = W x_t + b + U h_(t-1) + b'
      c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g)
      h_t = sigmoid(o) tanh(c_t)

    and logits = h tokens^T of the last layer, without a bias. A layer has two biases, b and b', as
    the usual counts of parameters do. Embeddings are initialised uniformly in [-0.1, 0.1], all
    other parameters uniformly in [-1, 1] / sqrt(width).

    Args:
      vocab_size: V >= 2; tokens are 0 .. V - 1.
      width: features of a token and units of a layer, >= 1.
      depth: layers, >= 1.
      dtype: "float32" or "bfloat16", for the factors of matrix products; sums, states, logits
        and parameters are float32.
      l2: weight of l2/2 |params|^2, >= 0.

    Returns:
      A `Model` without `statistics`, for batches {"x": int[n, L], "y": int[n, L]}, where y holds
      the token after each of x. A sequence is one example and starts from zero states: its loss is
      the mean cross-entropy of its tokens, in nats; `predict` returns logits float32[n, L, V].

    Raises:
      ValueError: if a size is out of range or the dtype is unknown.

    Examples:
      >>> import jax, models
      >>> model = models.lstm(vocab_size=33278, width=32)
      >>> params = jax.eval_shape(model.init, jax.random.key(0))
      >>> sum(p.size for p in jax.tree.leaves(params))
      1081792

    References:
      Hochreiter, Schmidhuber, Long Short-Term Memory, 1997,
      https://doi.org/10.1162/neco.1997.9.8.1735
      Press, Wolf, Using the Output Embedding to Improve Language Models, 2017,
      https://arxiv.org/abs/1608.05859
    """
    compute = base.check_dtype(dtype)
    names = [f"layer{k}" for k in range(depth)]
    shapes = {"input": (width, 4 * width), "recurrent": (width, 4 * width)}
    shapes |= {"bias_input": (4 * width,), "bias_recurrent": (4 * width,)}

    def init(key):
        base.check_key(key)
        layers = {}
        for k, name in enumerate(names, start=1):
            keys = jax.random.split(jax.random.fold_in(key, k), len(shapes))
            layers[name] = {
                weight: _uniform(draw, shape, 1 / math.sqrt(width))
                for draw, (weight, shape) in zip(keys, shapes.items(), strict=True)
            }
        tokens = _uniform(jax.random.fold_in(key, 0), (vocab_size, width), RANGE)
        return {"tokens": tokens, **layers}

    def predict(params, x):
        base.check_array("x", x, (None, None), whole=True)
        h = params["tokens"][x.T]  # [L, n, width]: a scan goes along the first axis
        for name in names:
            h = _layer(params[name], h, compute)
        return base.product(h.swapaxes(0, 1), params["tokens"].T, compute)

    return Model(init, base.softmax_loss(predict, l2), predict)


def _layer(params, x, dtype):
    """The states h [L, n, width] of one layer; x are those of the layer below."""
    bias = params["bias_input"] + params["bias_recurrent"]
    # For all steps at once; the scan computes only what depends on the previous step.
    inputs = base.product(x, params["input"], dtype) + bias[None, None]
    zero = jnp.zeros(x.shape[1:], inputs.dtype)

    def step(state, inputs):
        h, c = state
        i, f, g, o = jnp.split(inputs + base.product(h, params["recurrent"], dtype), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return jax.lax.scan(step, (zero, zero), inputs)[1]


def _uniform(key, shape, bound):
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
