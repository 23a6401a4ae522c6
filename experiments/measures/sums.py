"""Sums over examples, in chunks: what every measure is made of."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ordering.machine_forms import platform

CHUNK = 500  # examples, or tokens of examples, evaluated at once
# Numbers of inputs that a CPU evaluates at once, for its caches: an evaluation of images by
# convolutions takes a third of the time it takes with 500 of them.
CACHED, LEAST = 2**15, 16


def predicting(model, params, statistics) -> Callable:
    """`x -> predictions`, with the given moments where the model has any (else None)."""
    given = () if model.statistics is None else (statistics,)
    return lambda x: model.predict(params, x, *given)


def hits(logits, y):
    """Right answers among logits [n, C], or of logits [n, L, V] the examples' shares, summed."""
    return sum_examples((jnp.argmax(logits, axis=-1) == y).astype(jnp.float32))


def sum_examples(values):
    """The sum over examples of values [n], or of the means over tokens of values [n, L]."""
    return jnp.sum(jnp.mean(values, axis=tuple(range(1, values.ndim))))


def sum_chunks(function, batch):
    """function summed over chunks of the batch, divided by its size."""
    size = jax.tree.leaves(batch)[0].shape[0]
    chunk = _chunk(batch)
    whole = size // chunk * chunk
    total = 0.0
    if whole:
        chunks = jax.tree.map(lambda x: x[:whole].reshape((-1, chunk, *x.shape[1:])), batch)
        total += jnp.sum(jax.lax.map(function, chunks), axis=0)
    if whole < size:
        total += function(jax.tree.map(lambda x: x[whole:], batch))
    return total / size


def _chunk(batch):
    """Examples at once: the logits of a token take as much memory as those of an example."""
    x, y = batch["x"], batch["y"]
    if y.ndim > 1 and jnp.issubdtype(y.dtype, jnp.integer):
        return max(1, CHUNK // y.shape[1])
    if platform() != "cpu":
        return CHUNK
    return min(CHUNK, max(LEAST, CACHED // max(1, math.prod(x.shape[1:]))))
