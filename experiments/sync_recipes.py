"""The tasks on which synchronisation rules are compared, each with its setting: one row each."""

from collections.abc import Callable
from typing import NamedTuple

import optax

import models
from experiments import optimizers
from experiments.sync_rules import Setting
from experiments.tasks import Task, cifar10, digits, imagenet2012, mnist

FLOOR = 1e-3  # of our cosines, as a factor of the peak


class Recipe(NamedTuple):
    """A task and the setting in which rules are compared; flags override it field by field."""

    load: Callable[..., Task]  # (data_dir, abstract=False)
    optimizer: str
    weight_decay: float
    total_steps: int
    warmup_steps: int
    h_base: int
    growth: float  # alpha / peak rate
    peak_rates: tuple[float, ...]
    workers: int = 4
    batch_size: int = 32
    schedule: str = "cosine"  # a name of `optimizers.SHAPES`, after the warmup
    floor: float = FLOOR  # a factor of the peak rate
    decay_steps: int = 1  # of the schedule "step"
    decay_factor: float = 0.1


def _digits(data_dir, abstract=False):
    # Few, so that generalisation can differ.
    task = digits.load(data_dir, num_train=800, abstract=abstract)
    return task._replace(model=models.mlp(num_features=64, hidden=(64,), num_classes=10))


def _mnist(data_dir, abstract=False):
    task = mnist.load(data_dir, abstract=abstract)
    return task._replace(model=models.mlp(num_features=784, hidden=(128,), num_classes=10))


def _cifar10(model):
    def load(data_dir, abstract=False):
        task = cifar10.load(
            data_dir, "resnet", size=16, num_train=20_000, num_test=8_000, abstract=abstract
        )
        return task._replace(model=model)

    return load


def _imagenet(model):
    def load(data_dir, abstract=False):
        return imagenet2012.load(data_dir, model, dtype="bfloat16", abstract=abstract)

    return load


RECIPES = {
    "digits": Recipe(
        _digits, "momentum", 1e-4, 2000, 100, 4, 2.0, (0.05, 0.1, 0.2, 0.4, 0.8), batch_size=16
    ),
    "mnist": Recipe(_mnist, "momentum", 1e-4, 2000, 100, 4, 2.0, (0.05, 0.1, 0.2, 0.4)),
    "cifar10_resnet": Recipe(
        _cifar10(models.small_resnet(image_shape=(16, 16, 3), widths=(8, 16, 32))),
        "momentum", 5e-4, 2500, 125, 4, 2.0, (0.1, 0.2, 0.4, 0.8),
    ),
    "cifar10_vit": Recipe(
        _cifar10(models.vit(image_shape=(16, 16, 3), width=48, depth=3)),
        "adamw", 0.05, 2500, 250, 4, 2.0, (1e-3, 2e-3, 4e-3, 8e-3),
    ),
    # The published runs, 312 steps of 4096 examples per epoch: 200 and 300 epochs.
    "imagenet_resnet152": Recipe(
        _imagenet("resnet152"), "momentum", 1e-4, 62_400, 1_560, 2, 0.25, (0.8,),
        workers=16, batch_size=256, floor=1e-6 / 0.8,
    ),
    "imagenet_vit_b": Recipe(
        _imagenet("vit_b"), "adamw", 0.05, 93_600, 10_000, 4, 0.0175 / 0.008, (0.008,),
        workers=16, batch_size=256, floor=1e-6 / 0.008,
    ),
}  # fmt: skip


def shape_of(recipe: Recipe) -> optax.Schedule:
    """The learning rate as a factor of its peak."""
    return optimizers.shape(
        recipe.schedule,
        total_steps=recipe.total_steps,
        warmup_steps=recipe.warmup_steps,
        floor=recipe.floor,
        decay_steps=recipe.decay_steps,
        decay_factor=recipe.decay_factor,
    )


def setting_of(recipe: Recipe, h_max: int | None = None) -> Setting:
    """Rates and alpha in units of the peak rate: plans do not depend on it."""
    return Setting.of(
        shape_of(recipe),
        total_steps=recipe.total_steps,
        warmup_steps=recipe.warmup_steps,
        h_base=recipe.h_base,
        alpha=recipe.growth,
        h_max=h_max,
    )
