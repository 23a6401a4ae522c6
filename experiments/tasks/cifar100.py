"""CIFAR-100 as tensorflow-datasets prepared it: the hundred fine classes."""

import numpy as np

from experiments.tasks import cifar
from experiments.tasks.base import Task

# Per channel, of the training pixels in [0, 1].
MEAN = np.array([0.5071, 0.4865, 0.4409], np.float32)
DEVIATION = np.array([0.2673, 0.2564, 0.2762], np.float32)
IMAGES = cifar.Images("cifar100", 100, MEAN, DEVIATION)


def load(
    data_dir: str | None = None,
    model: str = "resnet",
    *,
    abstract: bool = False,
    size: int | None = None,
    num_train: int = cifar.NUM_TRAIN,
    num_test: int = cifar.NUM_TEST,
) -> Task:
    """50,000 training and 10,000 test images; see `cifar.load` for the choices."""
    return cifar.load(
        IMAGES,
        data_dir,
        model,
        abstract=abstract,
        size=size,
        num_train=num_train,
        num_test=num_test,
    )
