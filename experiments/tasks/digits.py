"""Digits: scikit-learn's bundled 8 x 8 images, softmax regression. Needs no download."""

import numpy as np
from sklearn import datasets

import models
from experiments.tasks.base import Recipe, Task, split

L2 = 1e-2
RECIPE = Recipe(
    workers=32,
    units_per_step=2,
    unit_size=1,
    epochs=100,
    learning_rates=(0.0625, 0.125, 0.25, 0.5, 1.0),
    momentum=0.0,
    bound_every=10,
)


def load(data_dir: str | None = None, model: str = "softmax", *, num_train: int = 1536) -> Task:
    """1,797 images, the first `num_train` of a seeded shuffle to train on, the others to test.

    Pixels in [0, 1]; the optimum is computed.
    """
    if model != "softmax":
        raise ValueError(f"model is {model!r}: digits has the model 'softmax' only.")
    x, y = datasets.load_digits(return_X_y=True)
    train, test = split((x / 16).astype(np.float32), y.astype(np.int32), num_train=num_train)
    regression = models.softmax_regression(num_features=64, num_classes=10, l2=L2)
    return Task(
        "digits", regression, train, test, RECIPE, lambda: models.optimum(regression, train)
    )
