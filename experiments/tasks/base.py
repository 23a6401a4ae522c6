"""What an experiment trains on: data, model and recipe."""

import os
from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple

import jax
import numpy as np

from models import Model


class Recipe(NamedTuple):
    """The setting of a run, in any study. Every field is a flag, with the text given here."""

    workers: Annotated[int, "number of workers, W"]
    units_per_step: Annotated[int, "units per worker and step, B"]
    unit_size: Annotated[int, "examples per unit; 1 orders single examples"]
    learning_rates: Annotated[tuple[float, ...], "peak rates; each arm takes its own best"]
    epochs: Annotated[int | None, "epochs without echoing; or total_steps"] = None
    total_steps: Annotated[int | None, "number of steps, T; or epochs"] = None
    optimizer: Annotated[str, "optimizer of every worker"] = "momentum"
    momentum: Annotated[float, "momentum of SGD, b1 of AdamW"] = 0.9
    weight_decay: Annotated[float, "weight decay of the optimizer"] = 0.0
    schedule: Annotated[str, "learning rate schedule after the warmup"] = "constant"
    warmup_steps: Annotated[int, "steps of learning rate warmup"] = 0
    floor: Annotated[float, "last rate / peak rate, of cosine and linear schedules"] = 0.0
    decay_every: Annotated[float, "epochs between the drops of a step schedule"] = 10.0
    decay_factor: Annotated[float, "factor of a step schedule's drops"] = 0.1
    h_base: Annotated[int, "smallest number of steps per round, H"] = 4
    growth: Annotated[float, "alpha / peak rate, of QSR"] = 2.0
    echo_factor: Annotated[int, "uses of a batch, e; a falling p ends at 1 / e"] = 4
    horizon: Annotated[int | None, "steps over which p falls; T if None"] = None
    evaluations: Annotated[int | None, "evaluations over the run; every epoch if None"] = None
    evaluate_every: Annotated[int | None, "steps between evaluations; or evaluations"] = None
    bound_every: Annotated[int, "epochs between herding bounds; 0 for none"] = 0
    metric: Annotated[str, "test metric of the target"] = "accuracy"
    target: Annotated[float | None, "metric to reach on both halves of the test set"] = None
    run: Annotated[str, "vmap or turns: workers share a device; mesh: one device each"] = "vmap"


class Task(NamedTuple):
    """Fields:
    name: as in `TASKS`.
    model: the model to train.
    train, test: {"x": array[N, ...], "y": array[N] or [N, L]} in memory; or, if that is too
      large, a random-access source of such examples. An abstract task has
      `jax.ShapeDtypeStruct` leaves with the published shapes, for dry runs.
    recipe: the default setting.
    optimum: `() -> float`, the minimum of the training loss; None if unknown.
    metric: test metric, a name of `tasks.metrics.METRICS`.
    """

    name: str
    model: Model
    train: dict
    test: dict
    recipe: Recipe
    optimum: Callable[[], float] | None = None
    metric: str = "accuracy"


def check_recipe(recipe: Recipe) -> None:
    """Raises ValueError for a recipe that cannot run, before anything is compiled."""
    if (recipe.epochs is None) == (recipe.total_steps is None) and not recipe.total_steps:
        raise ValueError("a recipe needs epochs or total_steps: pass --epochs or --total_steps.")
    if recipe.epochs is not None and recipe.epochs < 1:
        raise ValueError(f"epochs is {recipe.epochs}: train for at least one.")
    for rate in recipe.learning_rates:
        if not 0 < rate <= float(np.finfo(np.float32).max):  # the dtype of the steps
            raise ValueError(f"a learning rate is {rate}: it must be positive and finite.")
    if not 0 <= recipe.momentum < 1:
        raise ValueError(f"momentum is {recipe.momentum}: it must lie in [0, 1).")
    if not recipe.weight_decay >= 0:
        raise ValueError(f"weight_decay is {recipe.weight_decay}: it must be 0 or positive.")
    if not 0 < recipe.decay_every < np.inf or not 0 < recipe.decay_factor <= 1:
        raise ValueError(
            f"decay_every is {recipe.decay_every} and decay_factor {recipe.decay_factor}: the rate "
            "falls after a positive, finite number of epochs, by a factor in (0, 1]."
        )
    if not 0 <= recipe.floor <= 1:
        raise ValueError(f"floor is {recipe.floor}: last rate / peak rate must lie in [0, 1].")
    if not 0 < recipe.growth < np.inf:
        raise ValueError(
            f"--growth is {recipe.growth}: alpha / peak rate of QSR must be positive and finite."
        )
    for name in ("echo_factor", "horizon", "evaluations", "evaluate_every"):
        value = getattr(recipe, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}: pass a whole number >= 1.")
    if recipe.bound_every < 0:
        raise ValueError(
            f"bound_every is {recipe.bound_every}: pass 0 for none, or a number of epochs."
        )


def abstract_set(number: int, **fields) -> dict:
    """Shapes of `number` examples; each field is (shape of one example, dtype)."""
    return {
        name: jax.ShapeDtypeStruct((number, *shape), dtype)
        for name, (shape, dtype) in fields.items()
    }


def abstract_sets(numbers: Iterable[int], shape: tuple[int, ...]) -> list[dict]:
    """Shapes of sets of these sizes: examples x, float32, and classes y, int32."""
    return [abstract_set(n, x=(shape, np.float32), y=((), np.int32)) for n in numbers]


def check_model(task: str, model: str, known: Iterable[str]) -> None:
    if model not in known:
        raise ValueError(f"model is {model!r}: {task} has the models {sorted(known)}.")


def first_of(data: dict, number: int) -> dict:
    """The first `number` examples, of arrays or of their shapes."""

    def first(leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            size = min(number, leaf.shape[0])
            return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)
        return leaf[:number]

    return jax.tree.map(first, data)


def with_first(task: Task, *, num_train: int | None = None, num_test: int | None = None) -> Task:
    """The task restricted to its first examples; None keeps all.

    Raises:
      ValueError: for less than one example, or if the sets are not in memory.
    """
    given = {"train": num_train, "test": num_test}
    given = {part: number for part, number in given.items() if number is not None}
    for part, number in given.items():
        if number < 1 or not isinstance(task.train, dict):
            raise ValueError(
                f"num_{part} is {number}: pass at least 1, and only for a task whose sets are in "
                f"memory; {task.name} has them "
                f"{'in memory' if isinstance(task.train, dict) else 'on disk'}."
            )
    parts = {part: first_of(getattr(task, part), number) for part, number in given.items()}
    # The optimum was that of all training examples.
    return task._replace(**parts, **({"optimum": None} if "train" in parts else {}))


def with_label_noise(task: Task, share: float, *, seed: int = 0) -> Task:
    """The task with this share of the training labels redrawn uniformly from all classes.

    Raises:
      ValueError: for a share outside [0, 1], or if the labels are not classes in memory.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"label_noise is {share}: pass a share of the labels, in [0, 1].")
    y = task.train["y"] if isinstance(task.train, dict) else None
    if y is None or y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise ValueError(
            f"label_noise needs class labels in memory, which {task.name} lacks: leave it out."
        )
    if isinstance(y, jax.ShapeDtypeStruct) or not share:
        return task
    draw = np.random.default_rng(seed)
    drawn = draw.integers(0, y.max() + 1, len(y)).astype(y.dtype)
    noisy = np.where(draw.random(len(y)) < share, drawn, y)
    return task._replace(train={**task.train, "y": noisy}, optimum=None)


def split(x, y, *, num_train: int, seed: int = 0) -> tuple[dict, dict]:
    """Train and test set: a seeded shuffle, whose first `num_train` examples are for training."""
    order = np.random.default_rng(seed).permutation(len(x))
    train, test = order[:num_train], order[num_train:]
    return {"x": x[train], "y": y[train]}, {"x": x[test], "y": y[test]}


def need_file(task: str, data_dir: str | None, *names: str, how: str) -> str:
    """The path of the first of these files or folders that exists.

    Raises:
      ValueError: if none exists; it says how to get the last one.
    """
    if data_dir is None:
        raise ValueError(f"{task} reads {names[-1]} from --data_dir, which is not set. {how}")
    paths = [os.path.join(data_dir, name) for name in names]
    found = next(filter(os.path.exists, paths), None)
    if found is None:
        raise ValueError(f"{paths[-1]!r} does not exist. {how}")
    return found
