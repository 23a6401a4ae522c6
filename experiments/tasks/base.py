"""What an experiment trains on: data, model and recipe in one record."""

import os
from collections.abc import Callable
from typing import NamedTuple

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


class Task(NamedTuple):
    """Fields:
    name: of the task, as in `TASKS`.
    model: what is trained.
    train, test: {"x": array[N, ...], "y": int array[N] or [N, L]}, in memory.
    recipe: the default setting.
    optimum: `() -> float`, the minimum of the training loss, or None where it is not known.
    """

    name: str
    model: Model
    train: dict
    test: dict
    recipe: Recipe
    optimum: Callable[[], float] | None = None


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
