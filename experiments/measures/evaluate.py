"""What is measured where the run is looked at: losses and metrics."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import ordering.input
from experiments.measures.metrics import METRICS
from experiments.measures.sums import CHUNK, predicting, sum_chunks
from experiments.tasks.base import Recipe, Task
from experiments.training.config import size_of

BATCHES = 16  # of training data, behind the moments of a normalisation layer


def evaluator(
    task: Task, recipe: Recipe, *, halves: bool = False, train_examples: int | None = None
) -> Callable:
    """`params -> {"train/loss": float, "test/METRIC": float, ...}`, equal on all processes.

    METRIC is the task's own, and every one that is measured everywhere. The moments of
    normalisation layers are measured first, on training inputs at these parameters.

    Args:
      task, recipe: what is trained, in which setting.
      halves: the first half of the test set is "valid", which tunes, the other one "test".
      train_examples: the first ones, for the training loss; None is all of arrays, and as many of
        a source as there are to test.
    """
    size, tested = size_of(task.train), size_of(task.test)
    if train_examples is None:
        train_examples = size if isinstance(task.train, dict) else tested
    middle = tested // 2 if halves else 0
    parts = {"test": part_of(task.test, middle, 2 * middle or tested)}
    if halves:
        parts = {"valid": part_of(task.test, 0, middle)} | parts
    train = part_of(task.train, 0, min(size, train_examples))
    batch_size = recipe.workers * recipe.units_per_step * recipe.unit_size
    moments_at = moments(task.model, task.train, batch_size)
    asked = {task.metric} | ({recipe.metric} if recipe.target is not None else set())
    names = [name for name, metric in METRICS.items() if name in asked or metric.everywhere]
    measures = {name: jax.jit(METRICS[name].measure(task.model)) for name in names}
    loss = mean_loss(task.model)

    def run(params) -> dict:
        statistics = moments_at(params)
        found = {"train/loss": mean_over(loss, params, statistics, train())}
        for part, batches in parts.items():
            for name, measure in measures.items():
                found[f"{part}/{name}"] = mean_over(measure, params, statistics, batches())
        return found

    return run


def mean_over(measure: Callable, params, statistics, batches) -> float:
    """A measure of batches, averaged by their sizes."""
    found = [(size_of(batch), float(measure(params, statistics, batch))) for batch in batches]
    sizes, values = zip(*found, strict=True)
    return float(np.average(values, weights=sizes))


def part_of(data, start: int, stop: int) -> Callable:
    """`() -> iterator of batches`, the examples from `start` to `stop`.

    Arrays are placed on the device once, as one batch; a source is read anew, in pieces.
    """
    if isinstance(data, dict):
        part = jax.device_put(jax.tree.map(lambda x: x[start:stop], data))
        return lambda: iter([part])
    _, read = ordering.input.reader(data)
    starts = range(start, stop, CHUNK)
    return lambda: (read(np.arange(first, min(first + CHUNK, stop))) for first in starts)


def moments(model, train, batch_size: int) -> Callable:
    """`params -> statistics`, jitted: moments of the first training inputs at these parameters."""
    if model.statistics is None:
        return lambda params: None
    size, read = ordering.input.reader(train)
    count = max(1, min(BATCHES, size // batch_size))
    used = read(np.arange(min(count * batch_size, size)))["x"]
    batches = jax.device_put(used.reshape(count, -1, *used.shape[1:]))
    return jax.jit(lambda params: local_opt.reestimate(model.statistics, params, batches))


def mean_loss(model) -> Callable:
    """`(params, statistics, batch) -> float32[]`, jitted: the mean loss over a whole set.

    With the penalty on the parameters, which is trained on too; a model with statistics is
    measured as it is used, by the cross-entropy of its predictions.
    """

    def loss(params, statistics, batch):
        def total(part):
            if model.statistics is None:
                return jnp.sum(model.loss(params, part, None))
            logits = predicting(model, params, statistics)(part["x"])
            return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, part["y"]))

        return sum_chunks(total, batch)

    return jax.jit(loss)
