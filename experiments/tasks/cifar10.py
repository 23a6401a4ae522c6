"""CIFAR-10 as tensorflow-datasets prepared it: a small ResNet, MobileNetV2 or ViT."""

import numpy as np

import models
from experiments.tasks.base import Recipe, Task
from experiments.tasks.prepared import as_arrays, source, subset

# Per channel, of the training pixels in [0, 1]: the constants in general use.
MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
DEVIATION = np.array([0.2470, 0.2435, 0.2616], np.float32)
SIDE = 32
CHUNK = 5000  # images that are float32 at full size at once
CONVOLUTIONAL = Recipe(
    workers=4,
    units_per_step=1,
    unit_size=32,
    epochs=10,
    learning_rates=(0.1,),
    momentum=0.9,
    bound_every=0,
)
RECIPES = {
    "resnet": CONVOLUTIONAL,
    "mobilenet": CONVOLUTIONAL,
    "vit": CONVOLUTIONAL._replace(learning_rates=(1e-3,)),  # of AdamW
}


def load(
    data_dir: str | None = None,
    model: str = "resnet",
    *,
    size: int = 16,
    num_train: int = 50_000,
    num_test: int = 10_000,
) -> Task:
    """Images normalised per channel by the training set's mean and deviation, kept in memory.

    Args:
      data_dir: folder of the prepared set.
      model: "resnet", "mobilenet" or "vit".
      size: 32, or 16: the means of 2 x 2 pixels, four times cheaper to train on; normalised with
        the constants of the full images.
      num_train, num_test: a seeded subset of so many training and test images; only they are read.

    Raises:
      ValueError: for another model or size, and where the set is not there or is too small.
    """
    if model not in RECIPES:
        raise ValueError(f"model is {model!r}: cifar10 has the models {sorted(RECIPES)}.")
    if size not in (SIDE // 2, SIDE):
        raise ValueError(f"size is {size}: the images have side {SIDE}, or {SIDE // 2} pooled.")
    train = read(source("cifar10", data_dir, "train"), num_train, size, name="num_train")
    test = read(source("cifar10", data_dir, "test"), num_test, size, name="num_test")
    shape = (size, size, 3)
    build = {
        "resnet": models.small_resnet,
        "mobilenet": models.mobilenet_v2,
        "vit": models.vit,
    }[model]
    return Task("cifar10", build(image_shape=shape), train, test, RECIPES[model])


def read(examples, number: int, size: int, *, name: str = "number") -> dict:
    """A seeded subset as {"x": float32[number, size, size, 3], "y": int32[number]}."""
    chosen = subset(examples, number, name=name)
    chunks = []
    for start in range(0, number, CHUNK):
        rows = examples.__getitems__(chosen[start : start + CHUNK].tolist())
        arrays = as_arrays(rows)
        chunks.append({"x": normalise(pool(arrays["x"], size)), "y": arrays["y"]})
    return {field: np.concatenate([chunk[field] for chunk in chunks]) for field in ("x", "y")}


def pool(x: np.ndarray, size: int) -> np.ndarray:
    """Images [n, H, H, C] averaged over squares, to [n, size, size, C]."""
    n, side, _, channels = x.shape
    square = side // size
    return x.reshape(n, size, square, size, square, channels).mean(axis=(2, 4))


def normalise(x: np.ndarray) -> np.ndarray:
    return (x - MEAN) / DEVIATION
