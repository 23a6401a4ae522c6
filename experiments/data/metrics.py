"""Test metrics; to add one, add a row to METRICS. All are of sums over chunks of the test set."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

CHUNK = 500  # examples, or tokens, evaluated at once
# Input numbers that a CPU evaluates at once, to fit its caches: evaluating convolutions this way
# takes a third of the time of chunks of 500 images.
CACHED, LEAST = 2**15, 16


class Metric(NamedTuple):
    """How a model is tested."""

    label: str  # in tables, with its unit
    lower: bool  # is better
    measure: Callable  # model -> (params, statistics, batch) -> float32[], a mean over the batch
    form: str = "{:.4f}"  # in tables
    # Applied to the mean over the whole set, which may be read in several batches.
    of_mean: Callable[[float], float] = lambda mean: mean


def _accuracy(model):
    def measure(params, statistics, batch):
        predict = predicting(model, params, statistics)
        return sum_chunks(lambda part: hits(predict(part["x"]), part["y"]), batch)

    return measure


def _perplexity(nats: float) -> float:
    """exp of the mean over all tokens, not the mean of the batches' exp."""
    with np.errstate(over="ignore"):
        return float(np.exp(nats))


def _smape(model):
    """100 mean |y - f| / ((|y| + |f|) / 2), with forecasts f rolled out over y."""
    import jax.numpy as jnp

    def measure(params, statistics, batch):
        predict = predicting(model, params, statistics)
        steps = batch["y"].shape[1]

        def errors(part):
            series, forecast = part["x"], jnp.zeros((part["x"].shape[0], 0))
            while forecast.shape[1] < steps:
                following = predict(series)
                forecast = jnp.concatenate([forecast, following], axis=1)
                series = jnp.concatenate([series, following], axis=1)[:, -series.shape[1] :]
            f, y = forecast[:, :steps], part["y"]
            return sum_examples(200 * jnp.abs(y - f) / (jnp.abs(y) + jnp.abs(f)))

        return sum_chunks(errors, batch)

    return measure


def _loss(model):
    """Cross-entropy of the predictions, without penalties."""
    import optax

    def measure(params, statistics, batch):
        predict = predicting(model, params, statistics)
        nats = optax.softmax_cross_entropy_with_integer_labels
        return sum_chunks(lambda part: sum_examples(nats(predict(part["x"]), part["y"])), batch)

    return measure


METRICS = {
    "accuracy": Metric("test accuracy", False, _accuracy),
    "loss": Metric("test loss", True, _loss),
    "perplexity": Metric("test perplexity", True, _loss, of_mean=_perplexity),
    "smape": Metric("test sMAPE / %", True, _smape),
}


def predicting(model, params, statistics) -> Callable:
    """`x -> predictions`; `statistics` are the model's moments, None if it has none."""
    given = () if model.statistics is None else (statistics,)
    return lambda x: model.predict(params, x, *given)


def hits(logits, y):
    """Number of correct logits [n, C]; for [n, L, V], the sum of the examples' correct shares."""
    import jax.numpy as jnp

    return sum_examples((jnp.argmax(logits, axis=-1) == y).astype(jnp.float32))


def sum_examples(values):
    """The sum of values [n] over examples, or of values [n, L] averaged over tokens."""
    import jax.numpy as jnp

    return jnp.sum(jnp.mean(values, axis=tuple(range(1, values.ndim))))


def sum_chunks(function, batch):
    """The sum of `function` over chunks of the batch, divided by the batch's size."""
    import jax
    import jax.numpy as jnp

    size = jax.tree.leaves(batch)[0].shape[0]
    chunk = _chunk(batch)
    whole = size // chunk * chunk
    total = 0.0

    def cut(start, count):
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count), batch)

    if whole:
        starts = jnp.arange(0, whole, chunk)  # not a stack of chunks: that copies the whole set
        total += jnp.sum(jax.lax.map(lambda start: function(cut(start, chunk)), starts), axis=0)
    if whole < size:
        total += function(cut(whole, size - whole))
    return total / size


def _chunk(batch):
    """Examples per chunk: the logits of a token take as much memory as those of an example."""
    import jax

    from syncopate.mesh import platform

    y = batch["y"]
    if y.ndim > 1 and np.issubdtype(y.dtype, np.integer):
        return max(1, CHUNK // y.shape[1])
    if platform() != "cpu":
        return CHUNK
    numbers = sum(math.prod(x.shape[1:]) for x in jax.tree.leaves(batch["x"]))
    return min(CHUNK, max(LEAST, CACHED // max(1, numbers)))
