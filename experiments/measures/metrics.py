"""What a test set measures: a new metric is one row."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax

from experiments.measures.sums import hits, predicting, sum_chunks, sum_examples


class Metric(NamedTuple):
    """Fields:
    label: for people, with its unit.
    lower: whether less of it is better.
    measure: `model -> (params, statistics, batch) -> float32[]`, a mean over the batch.
    form: of its numbers in tables.
    everywhere: measured of every task, and in the record, the tables and the pictures of every
      study; otherwise only where it is a task's own.
    """

    label: str
    lower: bool
    measure: Callable
    form: str = "{:.4f}"
    everywhere: bool = False


def _accuracy(model):
    def measure(params, statistics, batch):
        predict = predicting(model, params, statistics)
        return sum_chunks(lambda part: hits(predict(part["x"]), part["y"]), batch)

    return measure


def _perplexity(model):
    mean = _loss(model)
    return lambda params, statistics, batch: jnp.exp(mean(params, statistics, batch))


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


def _loss(model):
    """Cross-entropy of the predictions, without any penalty."""

    def measure(params, statistics, batch):
        return sum_chunks(lambda part: _nats(model, params, statistics, part), batch)

    return measure


def _nats(model, params, statistics, part):
    logits = predicting(model, params, statistics)(part["x"])
    return sum_examples(optax.softmax_cross_entropy_with_integer_labels(logits, part["y"]))


METRICS = {
    "accuracy": Metric("test accuracy", False, _accuracy),
    "loss": Metric("test loss", True, _loss),
    "perplexity": Metric("test perplexity", True, _perplexity),
    "smape": Metric("test sMAPE / %", True, _smape),
}
