"""MNIST as tensorflow-datasets prepared it: softmax regression, a perceptron or LeNet with ReLU."""

import numpy as np

from experiments.tasks.base import Recipe, Task, abstract_set
from experiments.tasks.prepared import as_arrays, read_all, source
from syncopate import models

RECIPES = {
    "softmax": Recipe(
        workers=8,
        units_per_step=4,
        unit_size=1,
        epochs=20,
        learning_rates=(0.1,),
        momentum=0.9,
        bound_every=5,
    ),
    "mlp": Recipe(
        workers=4,
        units_per_step=32,
        unit_size=1,
        epochs=5,
        learning_rates=(0.05, 0.1, 0.2, 0.4),
    ),
    "lenet": Recipe(
        workers=4,
        units_per_step=1,
        unit_size=16,
        epochs=5,
        learning_rates=(0.05,),
        momentum=0.9,
        bound_every=1,
    ),
}


def load(
    data_dir: str | None = None,
    model: str = "softmax",
    *,
    width: int = 128,
    abstract: bool = False,
) -> Task:
    """60,000 training and 10,000 test images, pixels in [0, 1], kept in memory.

    Args:
      data_dir: folder of the prepared set.
      model: "softmax", "mlp" or "lenet".
      width: units of the hidden layer of "mlp".
      abstract: the shapes only; nothing is read.

    Raises:
      ValueError: for another model, and where the set is not there.
    """
    if model not in RECIPES:
        raise ValueError(f"model is {model!r}: mnist has the models {sorted(RECIPES)}.")
    if abstract:
        train, test = (
            abstract_set(number, x=((28, 28, 1), np.float32), y=((), np.int32))
            for number in (60_000, 10_000)
        )
    else:
        train, test = (
            as_arrays(read_all(source("mnist", data_dir, part))) for part in ("train", "test")
        )
    if model == "lenet":
        return Task("mnist", models.lenet(), train, test, RECIPES[model])
    if model == "mlp":
        perceptron = models.mlp(num_features=784, hidden=(width,), num_classes=10)
        return Task("mnist", perceptron, train, test, RECIPES[model])
    chosen = models.softmax_regression(num_features=784, num_classes=10, l2=1e-4)
    optimum = None if abstract else lambda: models.optimum(chosen, train)
    return Task("mnist", chosen, train, test, RECIPES[model], optimum)
