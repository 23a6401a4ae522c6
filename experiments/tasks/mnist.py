"""MNIST: softmax regression or LeNet with ReLU, from a set that tensorflow-datasets prepared."""

import os

import numpy as np

import models
from experiments.tasks.base import Recipe, Task, need_file

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
    train, test = (as_arrays(read_all(source(data_dir, part))) for part in ("train", "test"))
    if model == "softmax":
        chosen = models.softmax_regression(num_features=784, num_classes=10, l2=1e-4)
        return Task(
            "mnist", chosen, train, test, RECIPES[model], lambda: models.optimum(chosen, train)
        )
    return Task("mnist", models.lenet(), train, test, RECIPES[model])


def source(data_dir: str | None, split: str):
    """The random-access source that tensorflow-datasets opens (no TensorFlow pipeline)."""
    how = (
        'Prepare it with python -c "import tensorflow_datasets as tfds; '
        "tfds.builder('mnist', data_dir='DIR', file_format='array_record')"
        '.download_and_prepare()" and pass --data_dir=DIR.'
    )
    if data_dir is None:
        raise ValueError(f"mnist reads a prepared set from --data_dir, which is not set. {how}")
    need_file(os.path.join(data_dir, "mnist"), how)
    import tensorflow_datasets as tfds

    return tfds.data_source("mnist", split=split, data_dir=data_dir)


def read_all(examples) -> list[dict]:
    """All examples of a source, in one batched read."""
    return examples.__getitems__(range(len(examples)))


def as_arrays(rows: list[dict]) -> dict:
    """Examples as arrays: {"x": float32[N, 28, 28, 1] in [0, 1], "y": int32[N]}."""
    x = np.stack([row["image"] for row in rows]).astype(np.float32) / 255
    return {"x": x, "y": np.array([row["label"] for row in rows], np.int32)}
