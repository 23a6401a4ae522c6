"""What a test set measures: a new metric is one row."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from experiments.evaluate import hits, predicting, sum_chunks, sum_examples


class Metric(NamedTuple):
    """Fields:
    label: for people, with its unit.
    lower: whether less of it is better.
    measure: `model -> (params, statistics, batch) -> float32[]`.
    """

    label: str
    lower: bool
    measure: Callable


def _accuracy(model):
    def measure(params, statistics, batch):
        predict = predicting(model, params, statistics)
        return sum_chunks(lambda part: hits(predict(part["x"]), part["y"]), batch)

    return measure


def _perplexity(model):
    def measure(params, statistics, batch):
        predict = predicting(model, params, statistics)

        def nats(part):
            logits = predict(part["x"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, part["y"])
            return sum_examples(losses)

        return jnp.exp(sum_chunks(nats, batch))

    return measure


def _smape(model):
    """100 mean |y - f| / ((|y| + |f|) / 2), forecasts f rolled out over all values of y."""

    def measure(params, statistics, batch):
        predict = predicting(model, params, statistics)
        steps = batch["y"].shape[1]

        def errors(part):
            known, forecast = part["x"], jnp.zeros((part["x"].shape[0], 0))
            while forecast.shape[1] < steps:
                following = predict(known)
                forecast = jnp.concatenate([forecast, following], axis=1)
                known = jnp.concatenate([known, following], axis=1)[:, -known.shape[1] :]
            f, y = forecast[:, :steps], part["y"]
            return sum_examples(200 * jnp.abs(y - f) / (jnp.abs(y) + jnp.abs(f)))

        return sum_chunks(errors, batch)

    return measure


METRICS = {
    "accuracy": Metric("test accuracy", False, _accuracy),
    "perplexity": Metric("test perplexity", True, _perplexity),
    "smape": Metric("test sMAPE / %", True, _smape),
}


def measured(model, name: str) -> Callable:
    """`(params, statistics, batch) -> float32[]`, jitted: a metric over a whole set."""
    return jax.jit(METRICS[name].measure(model))
