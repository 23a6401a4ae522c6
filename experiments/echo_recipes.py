"""The tasks on which echoing is compared, each with its setting: a new one is one row."""

from collections.abc import Callable
from typing import NamedTuple

import models
from experiments.echo_arms import ARMS
from experiments.tasks import Task, cifar10, cifar100, digits, mnist, tinyshakespeare, wikitext
from experiments.tasks.base import first_of


class Recipe(NamedTuple):
    """A task and the setting in which arms are compared; flags override it field by field."""

    load: Callable[..., Task]  # (data_dir, abstract=False)
    metric: str
    target: float
    rates: tuple[float, ...]
    total_steps: int  # at most, per run at e = 2; at a larger factor e / 2 times as many
    horizon: int  # of a falling p: about the steps that the target takes
    evaluate_every: int
    optimizer: str = "momentum"
    weight_decay: float = 1e-4
    workers: int = 4
    batch_size: int = 16
    proximal: float = 0.1
    speeds: tuple[float, ...] = (1, 2, 4, 8)
    arms: tuple[str, ...] = tuple(ARMS)


# Of the tasks that take minutes per arm.
MAIN_ARMS = (
    "none", "larger_lr", "accumulate", "local", "fixed", "bernoulli", "diffusion",
    "diffusion_cosine", "diffusion_every", "measured", "proximal",
)  # fmt: skip
FEW_ARMS = ("none", "local", "diffusion", "diffusion_cosine", "measured", "proximal")


def _digits(data_dir, abstract=False):
    task = digits.load(data_dir, num_train=800, abstract=abstract)
    return task._replace(model=models.mlp(num_features=64, hidden=(512, 512), num_classes=10))


def _mnist(data_dir, abstract=False):
    return _evaluated_on(2000, mnist.load(data_dir, "lenet", abstract=abstract))


def _cifar10(model):
    def load(data_dir, abstract=False):
        task = cifar10.load(
            data_dir, "resnet", size=16, num_train=20_000, num_test=2000, abstract=abstract
        )
        return task._replace(model=model)

    return load


def _shakespeare(data_dir, abstract=False):
    return _evaluated_on(400, tinyshakespeare.load(data_dir, length=64, abstract=abstract))


def _wikitext2(data_dir, abstract=False):
    return wikitext.load(data_dir, "gpt2", abstract=abstract)


def _evaluated_on(number, task):
    return task._replace(test=first_of(task.test, number))


def _whole(load, model):
    return lambda data_dir, abstract=False: load(data_dir, model, abstract=abstract)


FULL = {
    "rates": (0.05, 0.1, 0.2), "total_steps": 78_000, "horizon": 39_000, "evaluate_every": 390,
    "weight_decay": 5e-4, "batch_size": 32, "arms": MAIN_ARMS,
}  # fmt: skip
RECIPES = {
    "digits": Recipe(_digits, "accuracy", 0.96, (0.025, 0.05, 0.1, 0.2), 500, 80, 5),
    "mnist": Recipe(_mnist, "accuracy", 0.93, (0.0125, 0.025, 0.05, 0.1), 500, 150, 10),
    "cifar10_resnet": Recipe(
        _cifar10(models.small_resnet(image_shape=(16, 16, 3), widths=(8, 16, 32))),
        "accuracy", 0.38, (0.025, 0.05, 0.1, 0.2), 700, 250, 25,
        workers=2, batch_size=32, arms=MAIN_ARMS,
    ),
    "cifar10_mobilenet": Recipe(
        _cifar10(models.mobilenet_v2(image_shape=(16, 16, 3))),
        "accuracy", 0.33, (0.025, 0.05, 0.1, 0.2), 500, 200, 25,
        workers=2, arms=FEW_ARMS,
    ),
    "shakespeare": Recipe(
        _shakespeare, "loss", 2.45, (1e-3, 2e-3, 4e-3, 8e-3), 500, 150, 20,
        optimizer="adamw", weight_decay=0.01, workers=2, batch_size=8, arms=FEW_ARMS,
    ),
    # At full size, for accelerators. Targets and rates are ours: the paper's are not public.
    "cifar10_resnet18": Recipe(_whole(cifar10.load, "resnet18"), "accuracy", 0.9, **FULL),
    "cifar100_resnet18": Recipe(_whole(cifar100.load, "resnet18"), "accuracy", 0.65, **FULL),
    "cifar10_mobilenet_v2": Recipe(_whole(cifar10.load, "mobilenet_v2"), "accuracy", 0.9, **FULL),
    "cifar100_mobilenet_v2": Recipe(
        _whole(cifar100.load, "mobilenet_v2"), "accuracy", 0.65, **FULL
    ),
    "wikitext2_gpt2": Recipe(
        _wikitext2, "loss", 5.5, (2.5e-4, 5e-4, 1e-3), 30_000, 20_000, 500,
        optimizer="adamw", weight_decay=0.01, batch_size=8, arms=MAIN_ARMS,
    ),
}  # fmt: skip
