"""Digits, MNIST and CIFAR: image sets held in memory, and the models trained on them.

Digits come with scikit-learn; the others are read as prepared by tensorflow-datasets.
"""

import importlib.util
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np

from experiments.data import base
from experiments.data.base import COUNT, DECAY, Recipe, Task, abstract_sets, check_model, split
from experiments.data.sources import as_arrays, check_number, source, subset
from syncopate.refusals import UserError

SIDE = 32  # of CIFAR's images
DIGITS, DIGITS_FEATURES = 1797, 64
DIGITS_RECIPE = Recipe(
    workers=32,
    units_per_step=2,
    unit_size=1,
    epochs=100,
    momentum=0.0,
    bound_every=10,
    learning_rates=(0.0625, 0.125, 0.25, 0.5, 1.0),
)


class Choice(NamedTuple):
    """A model for a set of images, and its recipe."""

    build: Callable
    recipe: Recipe
    side: int = SIDE  # of the images of CIFAR that it takes


def _softmax(num_features: int, *, l2: float, **unused):
    return base.network("softmax_regression", num_features=num_features, num_classes=10, l2=l2)


def _mlp(num_features: int, *, width: int, depth: int = 1, **unused):
    hidden = (width,) * depth
    return base.network("mlp", num_features=num_features, hidden=hidden, num_classes=10)


DIGITS_MODELS = {  # of all choices
    "softmax": partial(_softmax, DIGITS_FEATURES),
    "mlp": partial(_mlp, DIGITS_FEATURES),
}


def digits(
    data_dir: str | None = None,
    model: str = "softmax",
    *,
    num_train: int = 1536,
    l2: Annotated[float, DECAY, "softmax"] = 1e-2,
    width: Annotated[int, COUNT, "mlp"] = 64,
    depth: Annotated[int, COUNT, "mlp"] = 1,
    abstract: bool = False,
) -> Task:
    """1,797 images with pixels in [0, 1], shuffled; the first `num_train` train, the others test.

    Args:
      data_dir: None, as nothing is read.
      model: "softmax" (regression, whose optimum is computed) or "mlp".
      num_train: 1 to 1,796.
      l2: weight of the penalty of "softmax": 0.05 is well conditioned, 1e-4 badly.
      width, depth: units per hidden layer of "mlp", and number of these layers.
    """
    check_model("digits", model, DIGITS_MODELS)
    if data_dir is not None:
        raise UserError(
            f"--data_dir is {data_dir}: digits come with scikit-learn. Leave it out, or pass the "
            "--task whose data lie there."
        )
    check_number(num_train, DIGITS - 1, name="num_train")  # the others are the test set
    net = DIGITS_MODELS[model](l2=l2, width=width, depth=depth)
    if abstract:
        train, test = abstract_sets((num_train, DIGITS - num_train), (DIGITS_FEATURES,))
        return Task("digits", net, train, test, DIGITS_RECIPE)
    table = _digits_table()
    x = (table[:, :-1] / 16).astype(np.float32)
    train, test = split(x, table[:, -1].astype(np.int32), num_train=num_train)
    optimum = None if model != "softmax" else lambda: base.minimum(net, train)
    return Task("digits", net, train, test, DIGITS_RECIPE, optimum)


def _digits_table() -> np.ndarray:
    """float64[1797, 65], pixels and labels, without the second that scikit-learn's import takes."""
    package = importlib.util.find_spec("sklearn")
    if package is None:
        raise UserError("digits come with scikit-learn: pip install scikit-learn.")
    path = pathlib.Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    return np.loadtxt(path, delimiter=",")


MNIST_MODELS = {  # of its choices
    "softmax": Choice(
        partial(_softmax, 784, l2=1e-4),
        Recipe(workers=8, units_per_step=4, unit_size=1, epochs=20, learning_rates=(0.1,),
               bound_every=5),
    ),
    "mlp": Choice(
        partial(_mlp, 784),
        Recipe(workers=4, units_per_step=32, unit_size=1, epochs=5,
               learning_rates=(0.05, 0.1, 0.2, 0.4)),
    ),
    "lenet": Choice(
        lambda width: base.network("lenet"),
        Recipe(workers=4, units_per_step=1, unit_size=16, epochs=5, learning_rates=(0.05,),
               bound_every=1),
    ),
}  # fmt: skip


def mnist(
    data_dir: str | None = None,
    model: str = "softmax",
    *,
    width: Annotated[int, COUNT, "mlp"] = 128,
    abstract: bool = False,
) -> Task:
    """60,000 training and 10,000 test images with pixels in [0, 1], held in memory."""
    check_model("mnist", model, MNIST_MODELS)
    if abstract:
        train, test = abstract_sets((60_000, 10_000), (28, 28, 1))
    else:
        sets = (source("mnist", data_dir, part) for part in ("train", "test"))
        train, test = (as_arrays(read.__getitems__(range(len(read)))) for read in sets)
    net = MNIST_MODELS[model].build(width=width)
    optimum = None if abstract or model != "softmax" else lambda: base.minimum(net, train)
    return Task("mnist", net, train, test, MNIST_MODELS[model].recipe, optimum)


NUM_TRAIN, NUM_TEST = 50_000, 10_000
CHUNK = 5000  # images held as float32 at full size at once

SMALL = Recipe(workers=4, units_per_step=1, unit_size=32, epochs=10, learning_rates=(0.1,))
SMALL_VIT = SMALL._replace(learning_rates=(1e-3,), optimizer="adamw")
# Cooper et al., CD-GraB, 2023, https://arxiv.org/abs/2302.00845: batches of 64. No augmentation,
# because it would change the gradients that orders remember.
LENET = Recipe(
    workers=4,
    units_per_step=1,
    unit_size=16,
    epochs=100,
    learning_rates=(1e-3,),
    bound_every=10,
    weight_decay=1e-2,
)
# The usual setting for networks of full size; the papers on orders and syncs have none.
FULL = SMALL._replace(epochs=200, weight_decay=5e-4, schedule="cosine")


# Convolutions as matrix products, faster when every worker has its own parameters.
_resnet18 = partial(base.network, "resnet", depth=18, stem="cifar", products=True)
_resnet8 = partial(base.network, "resnet", depth=8, stem="cifar", products=True)


def mobilenet_stages() -> tuple:
    """The published network reduces 224 pixels 32 times. Here the stem and the second stage keep
    the size, so that 32 pixels are reduced only 8 times.
    """
    from models.mobilenet import IMAGENET_STAGES

    return tuple((*of, 1 if at == 1 else s) for at, (*of, s) in enumerate(IMAGENET_STAGES))


def _mobilenet_v2(**sizes):
    table = {"stages": mobilenet_stages(), "stem_channels": 32, "stem_stride": 1}
    return base.network("mobilenet_v2", head_channels=1280, **table, **sizes)


CHOICES = {
    "resnet": Choice(partial(_resnet8, width=16), SMALL, SIDE // 2),
    "resnet8": Choice(partial(_resnet8, width=8), SMALL, SIDE // 2),
    "resnet8_gn": Choice(partial(_resnet8, width=8, norm="group"), SMALL, SIDE // 2),
    "mobilenet": Choice(partial(base.network, "mobilenet_v2"), SMALL, SIDE // 2),
    "vit": Choice(partial(base.network, "vit"), SMALL_VIT, SIDE // 2),
    "small_vit": Choice(partial(base.network, "vit", width=48, depth=3), SMALL_VIT, SIDE // 2),
    "lenet": Choice(partial(base.network, "lenet"), LENET),
    "resnet18": Choice(_resnet18, FULL),
    "resnet18_gn": Choice(partial(_resnet18, norm="group"), FULL),
    "mobilenet_v2": Choice(_mobilenet_v2, FULL),
}


class Images(NamedTuple):
    """A set of 32 x 32 images: its prepared name, its number of classes, and the usual mean and
    deviation per channel of training pixels in [0, 1].
    """

    name: str
    num_classes: int
    mean: np.ndarray
    deviation: np.ndarray


CIFAR10 = Images(
    "cifar10",
    10,
    np.array([0.4914, 0.4822, 0.4465], np.float32),
    np.array([0.2470, 0.2435, 0.2616], np.float32),
)
CIFAR100 = Images(  # the 100 fine classes
    "cifar100",
    100,
    np.array([0.5071, 0.4865, 0.4409], np.float32),
    np.array([0.2673, 0.2564, 0.2762], np.float32),
)


def cifar(
    images: Images,
    data_dir: str | None = None,
    model: str = "resnet",
    *,
    abstract: bool = False,
    size: int | None = None,
    num_train: int = NUM_TRAIN,
    num_test: int = NUM_TEST,
) -> Task:
    """Images normalised per channel with the training set's moments, held in memory.

    Args:
      size: 32, or 16 for means of 2 x 2 pixels, four times cheaper to train on; normalised
        with the moments of the full images. None takes the model's own.
      num_train, num_test: sizes of seeded subsets; only these images are read.
    """
    check_model(images.name, model, CHOICES)
    choice = CHOICES[model]
    size = choice.side if size is None else size
    if size not in (SIDE // 2, SIDE):
        raise UserError(f"size is {size}: the images have side {SIDE}, or {SIDE // 2} pooled.")
    shape = (size, size, 3)
    built = choice.build(image_shape=shape, num_classes=images.num_classes)
    if abstract:
        check_number(num_train, NUM_TRAIN, name="num_train")
        check_number(num_test, NUM_TEST, name="num_test")
        train, test = abstract_sets((num_train, num_test), shape)
    else:
        train, test = (
            read(images, source(images.name, data_dir, part), number, size, name=f"num_{part}")
            for part, number in (("train", num_train), ("test", num_test))
        )
    return Task(images.name, built, train, test, choice.recipe)


def read(images: Images, examples, number: int, size: int, *, name: str = "number") -> dict:
    """A seeded subset as {"x": float32[number, size, size, 3], "y": int32[number]}."""
    chosen = subset(examples, number, name=name)
    chunks = []
    for start in range(0, number, CHUNK):
        arrays = as_arrays(examples.__getitems__(chosen[start : start + CHUNK].tolist()))
        x = (pool(arrays["x"], size) - images.mean) / images.deviation
        chunks.append({"x": x, "y": arrays["y"]})
    return {field: np.concatenate([chunk[field] for chunk in chunks]) for field in ("x", "y")}


def pool(x: np.ndarray, size: int) -> np.ndarray:
    """Images [n, H, H, C] averaged over squares, to [n, size, size, C]."""
    n, side, _, channels = x.shape
    square = side // size
    return x.reshape(n, size, square, size, square, channels).mean(axis=(2, 4))
