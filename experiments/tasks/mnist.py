"""MNIST: softmax regression or LeNet with ReLU, from a set that tensorflow-datasets prepared."""

import models
from experiments.tasks.base import Recipe, Task
from experiments.tasks.prepared import as_arrays, read_all, source

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


def load(data_dir: str | None = None, model: str = "softmax") -> Task:
    """60,000 training and 10,000 test images, pixels in [0, 1], kept in memory."""
    if model not in RECIPES:
        raise ValueError(f"model is {model!r}: mnist has the models {sorted(RECIPES)}.")
    train, test = (
        as_arrays(read_all(source("mnist", data_dir, part))) for part in ("train", "test")
    )
    if model == "softmax":
        chosen = models.softmax_regression(num_features=784, num_classes=10, l2=1e-4)
        return Task(
            "mnist", chosen, train, test, RECIPES[model], lambda: models.optimum(chosen, train)
        )
    return Task("mnist", models.lenet(), train, test, RECIPES[model])
