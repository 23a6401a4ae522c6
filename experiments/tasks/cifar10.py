"""CIFAR-10 as tensorflow-datasets prepared it, and a small part of it for comparing orders."""

import numpy as np

from experiments.tasks import cifar
from experiments.tasks.base import Task

# Per channel, of the training pixels in [0, 1]: the constants in general use.
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
DEVIATION = np.array([0.2470, 0.2435, 0.2616], np.float32)
IMAGES = cifar.Images("cifar10", 10, MEAN, DEVIATION)


def load(
    data_dir: str | None = None,
    model: str = "resnet",
    *,
    abstract: bool = False,
    size: int | None = None,
    num_train: int = cifar.NUM_TRAIN,
    num_test: int = cifar.NUM_TEST,
) -> Task:
    """50,000 training and 10,000 test images of ten classes; see `cifar.load` for the choices."""
    return cifar.load(
        IMAGES,
        data_dir,
        model,
        abstract=abstract,
        size=size,
        num_train=num_train,
        num_test=num_test,
    )


def load_small(
    data_dir: str | None = None,
    model: str = "lenet",
    *,
    abstract: bool = False,
    size: int = cifar.SIDE,
    num_train: int = 4_096,
    num_test: int = 2_000,
) -> Task:
    """4,096 training images: orders are compared on them on a CPU in minutes."""
    task = load(
        data_dir, model, abstract=abstract, size=size, num_train=num_train, num_test=num_test
    )
    return task._replace(name="cifar10_small")


def read(examples, number: int, size: int, *, name: str = "number") -> dict:
    """A seeded subset as {"x": float32[number, size, size, 3], "y": int32[number]}."""
    return cifar.read(IMAGES, examples, number, size, name=name)
