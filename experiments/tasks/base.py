"""What an experiment trains on: data, model and recipe in one record."""

import os
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from models import Model


class Recipe(NamedTuple):
    """The published or tuned setting of a task; flags override it field by field."""

    workers: int
    units_per_step: int  # B, per worker
    unit_size: int  # examples per unit; 1 is per-example ordering
    epochs: int
    learning_rates: tuple[float, ...]  # each order is compared at its own best of these
    momentum: float
    bound_every: int  # epochs between two recordings of the herding bound; 0 never
    optimizer: str = "momentum"  # a name of `experiments.optimizers.OPTIMIZERS`
    weight_decay: float = 0.0
    schedule: str = "constant"  # a name of `experiments.optimizers.SHAPES`
    decay_every: int = 10  # epochs, of the schedule "step"
    decay_factor: float = 0.1


class Task(NamedTuple):
    """Fields:
    name: of the task, as in `TASKS`.
    model: what is trained.
    train, test: {"x": array[N, ...], "y": array[N] or [N, L]} in memory; or, where that is too
      large, a random-access source of such examples. Of an abstract task the leaves are
      `jax.ShapeDtypeStruct`: the shapes of the published data, which a dry run needs.
    recipe: the default setting.
    optimum: `() -> float`, the minimum of the training loss, or None where it is not known.
    metric: what the test set measures, a name of `experiments.metrics.METRICS`.
    """

    name: str
    model: Model
    train: dict
    test: dict
    recipe: Recipe
    optimum: Callable[[], float] | None = None
    metric: str = "accuracy"


def abstract_set(number: int, **fields) -> dict:
    """The shapes of `number` examples; a field is (shape of one, dtype)."""
    return {
        name: jax.ShapeDtypeStruct((number, *shape), dtype)
        for name, (shape, dtype) in fields.items()
    }


def first_of(data: dict, number: int) -> dict:
    """The first `number` examples of arrays, or of shapes."""

    def first(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            size = min(number, leaf.shape[0])
            return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)
        return leaf[:number]

    return jax.tree.map(first, data)


def with_first(task: Task, num_train: int | None) -> Task:
    """The task on its first training examples alone; the optimum over all is not theirs."""
    if num_train is None or not isinstance(task.train, dict):
        return task
    return task._replace(train=first_of(task.train, num_train), optimum=None)


def split(x, y, *, num_train: int, seed: int = 0) -> tuple[dict, dict]:
    """Train and test set of a seeded shuffle: the first `num_train` examples train."""
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[:num_train], order[num_train:]
    return {"x": x[train], "y": y[train]}, {"x": x[test], "y": y[test]}


def need_file(path: str, how: str) -> str:
    """The path, if a file or folder is there; else an error that says how to get it."""
    if not os.path.exists(path):
        raise ValueError(f"{path!r} is not there. {how}")
    return path
