"""What CIFAR-10 and CIFAR-100 share: reading the images, and the models and their recipes."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from experiments.tasks.base import Recipe, Task, abstract_set
from experiments.tasks.prepared import as_arrays, check_number, source, subset
from syncopate import models
from syncopate.models.mobilenet import IMAGENET_STAGES

SIDE = 32
NUM_TRAIN, NUM_TEST = 50_000, 10_000
CHUNK = 5000  # images that are float32 at full size at once

SMALL = Recipe(
    workers=4,
    units_per_step=1,
    unit_size=32,
    epochs=10,
    learning_rates=(0.1,),
    momentum=0.9,
    bound_every=0,
)
SMALL_VIT = SMALL._replace(learning_rates=(1e-3,), optimizer="adamw")
# Cooper et al., CD-GraB, 2023, https://arxiv.org/abs/2302.00845: batches of 64, without
# augmentation, which would change the gradients that orders remember.
LENET = Recipe(
    workers=4,
    units_per_step=1,
    unit_size=16,
    epochs=100,
    learning_rates=(1e-3,),
    momentum=0.9,
    bound_every=10,
    weight_decay=1e-2,
)
# The setting in general use for networks of full size: no paper on orders or syncs has one.
FULL = SMALL._replace(epochs=200, weight_decay=5e-4, schedule="cosine")
# The published network reduces 224 pixels 32 times; here the stem and the second stage keep the
# size, so that 32 pixels are reduced 8 times.
MOBILENET_STAGES = tuple(
    (t, c, n, 1 if stage == 1 else s) for stage, (t, c, n, s) in enumerate(IMAGENET_STAGES)
)


class Choice(NamedTuple):
    """A model on these images: its builder, its recipe, and the side of the images it takes."""

    build: Callable
    recipe: Recipe
    side: int = SIDE


# Matrix products: these networks are also trained with parameters of their own on every worker.
_resnet18 = partial(models.resnet, depth=18, stem="cifar", products=True)
_mobilenet_v2 = partial(
    models.mobilenet_v2,
    stages=MOBILENET_STAGES,
    stem_channels=32,
    stem_stride=1,
    head_channels=1280,
)

CHOICES = {
    "resnet": Choice(models.small_resnet, SMALL, SIDE // 2),
    "resnet8": Choice(partial(models.small_resnet, widths=(8, 16, 32)), SMALL, SIDE // 2),
    "resnet8_gn": Choice(
        partial(models.small_resnet, widths=(8, 16, 32), norm="group"), SMALL, SIDE // 2
    ),
    "mobilenet": Choice(models.mobilenet_v2, SMALL, SIDE // 2),
    "vit": Choice(models.vit, SMALL_VIT, SIDE // 2),
    "small_vit": Choice(partial(models.vit, width=48, depth=3), SMALL_VIT, SIDE // 2),
    "lenet": Choice(models.lenet, LENET),
    "resnet18": Choice(_resnet18, FULL),
    "resnet18_gn": Choice(partial(_resnet18, norm="group"), FULL),
    "mobilenet_v2": Choice(_mobilenet_v2, FULL),
}


class Images(NamedTuple):
    """A set of 32 x 32 images: its name, its classes, and its pixels' moments per channel."""

    name: str
    num_classes: int
    mean: np.ndarray
    deviation: np.ndarray


def load(
    images: Images,
    data_dir: str | None,
    model: str,
    *,
    abstract: bool = False,
    size: int | None = None,
    num_train: int = NUM_TRAIN,
    num_test: int = NUM_TEST,
) -> Task:
    """Images normalised per channel by the training set's mean and deviation, kept in memory.

    Args:
      images: which set; data_dir: folder of the prepared set.
      model: a name of `CHOICES`.
      abstract: the shapes only; nothing is read.
      size: 32, or 16: the means of 2 x 2 pixels, four times cheaper to train on; normalised with
        the constants of the full images. The model's own if None.
      num_train, num_test: a seeded subset of so many training and test images; only they are read.

    Raises:
      ValueError: for another model or size, and where the set is not there or is too small.
    """
    name = images.name
    if model not in CHOICES:
        raise ValueError(f"model is {model!r}: {name} has the models {sorted(CHOICES)}.")
    choice = CHOICES[model]
    size = choice.side if size is None else size
    if size not in (SIDE // 2, SIDE):
        raise ValueError(f"size is {size}: the images have side {SIDE}, or {SIDE // 2} pooled.")
    shape = (size, size, 3)
    built = choice.build(image_shape=shape, num_classes=images.num_classes)

    def part(split, number, held, option):
        if abstract:
            check_number(number, held, name=option)
            return abstract_set(number, x=(shape, np.float32), y=((), np.int32))
        return read(images, source(name, data_dir, split), number, size, name=option)

    train = part("train", num_train, NUM_TRAIN, "num_train")
    test = part("test", num_test, NUM_TEST, "num_test")
    return Task(name, built, train, test, choice.recipe)


def read(images: Images, examples, number: int, size: int, *, name: str = "number") -> dict:
    """A seeded subset as {"x": float32[number, size, size, 3], "y": int32[number]}."""
    chosen = subset(examples, number, name=name)
    chunks = []
    for start in range(0, number, CHUNK):
        rows = examples.__getitems__(chosen[start : start + CHUNK].tolist())
        arrays = as_arrays(rows)
        x = (pool(arrays["x"], size) - images.mean) / images.deviation
        chunks.append({"x": x, "y": arrays["y"]})
    return {field: np.concatenate([chunk[field] for chunk in chunks]) for field in ("x", "y")}


def pool(x: np.ndarray, size: int) -> np.ndarray:
    """Images [n, H, H, C] averaged over squares, to [n, size, size, C]."""
    n, side, _, channels = x.shape
    square = side // size
    return x.reshape(n, size, square, size, square, channels).mean(axis=(2, 4))
