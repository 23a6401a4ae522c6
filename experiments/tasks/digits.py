"""Digits: scikit-learn's bundled 8 x 8 images. Needs no download."""

import numpy as np
from sklearn import datasets

from experiments.tasks.base import Recipe, Task, abstract_set, split
from syncopate import models

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


MODELS = ("softmax", "mlp", "resnet")
SIDE, CHANNELS = 8, (8, 16, 32)  # of the images; of the stages of "resnet"


def load(
    data_dir: str | None = None,
    model: str = "softmax",
    *,
    num_train: int = 1536,
    width: int = 64,
    depth: int = 1,
    abstract: bool = False,
) -> Task:
    """1,797 images, the first `num_train` of a seeded shuffle to train on, the others to test.

    Pixels in [0, 1].

    Args:
      data_dir: not read.
      model: "softmax", regression whose optimum is computed, "mlp", or "resnet", of eight layers
        with group normalisation.
      num_train: 1 to 1,796.
      width, depth: units of a hidden layer of "mlp", and how many of these.
      abstract: the shapes of the same sets.

    Raises:
      ValueError: for another model, or a number that leaves nothing to train or to test on.
    """
    if model not in MODELS:
        raise ValueError(f"model is {model!r}: digits has the models {sorted(MODELS)}.")
    if not 1 <= num_train < NUM_IMAGES:
        raise ValueError(
            f"num_train is {num_train}: take 1 to {NUM_IMAGES - 1} of the {NUM_IMAGES} images; the "
            "others are tested on."
        )
    if model == "mlp":
        net = models.mlp(num_features=FEATURES, hidden=(width,) * depth, num_classes=10)
    elif model == "resnet":
        net = models.small_resnet(image_shape=(SIDE, SIDE, 1), widths=CHANNELS, norm="group")
    else:
        net = models.softmax_regression(num_features=FEATURES, num_classes=10, l2=L2)
    shape = (SIDE, SIDE, 1) if model == "resnet" else (FEATURES,)
    if abstract:
        train, test = (
            abstract_set(number, x=(shape, np.float32), y=((), np.int32))
            for number in (num_train, NUM_IMAGES - num_train)
        )
        return Task("digits", net, train, test, RECIPE)
    x, y = datasets.load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32).reshape(-1, *shape)
    train, test = split(x, y.astype(np.int32), num_train=num_train)
    optimum = None if model != "softmax" else lambda: models.optimum(net, train)
    return Task("digits", net, train, test, RECIPE, optimum)
