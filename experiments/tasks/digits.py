"""Digits: scikit-learn's bundled 8 x 8 images, softmax regression. Needs no download."""

import numpy as np
from sklearn import datasets

import models
from experiments.tasks.base import Recipe, Task, abstract_set, split

L2 = 1e-2
NUM_IMAGES, FEATURES = 1797, 64
RECIPE = Recipe(
    workers=32,
    units_per_step=2,
    unit_size=1,
    epochs=100,
    learning_rates=(0.0625, 0.125, 0.25, 0.5, 1.0),
    momentum=0.0,
    bound_every=10,
)


def load(
    data_dir: str | None = None,
    model: str = "softmax",
    *,
    num_train: int = 1536,
    abstract: bool = False,
) -> Task:
    """1,797 images, the first `num_train` of a seeded shuffle to train on, the others to test.

    Pixels in [0, 1]; the optimum is computed. With `abstract` the shapes of the same sets.
    """
    if model != "softmax":
        raise ValueError(f"model is {model!r}: digits has the model 'softmax' only.")
    regression = models.softmax_regression(num_features=FEATURES, num_classes=10, l2=L2)
    if abstract:
        train, test = (
            abstract_set(number, x=((FEATURES,), np.float32), y=((), np.int32))
            for number in (num_train, NUM_IMAGES - num_train)
        )
        return Task("digits", regression, train, test, RECIPE)
    x, y = datasets.load_digits(return_X_y=True)
    train, test = split((x / 16).astype(np.float32), y.astype(np.int32), num_train=num_train)
    return Task(
        "digits", regression, train, test, RECIPE, lambda: models.optimum(regression, train)
    )
