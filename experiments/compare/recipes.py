"""Every setting that runs are compared in, once: a new one is one row.

A name of RECIPES or of TASKS is what --task takes; a task by itself brings the recipe of its file.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

from absl import flags

from experiments.data import TASKS, base, images, wikitext
from experiments.data.base import COUNT, FINITE, Recipe, Task
from experiments.trainer.config import sizes_of, total_steps_of
from syncopate.command import meant
from syncopate.refusals import UserError

NOT_CHOICES = ("data_dir", "abstract")
# Choices of every task, which its loader need not have.
EVERYWHERE = ("num_train", "num_test")
PARSERS = {  # of choices, by the type of their default
    int: COUNT,
    float: FINITE,
    bool: flags.BooleanParser(),
    str: flags.ArgumentParser(),
    type(None): COUNT,
}


class Choice(NamedTuple):
    """What a task lets its users choose."""

    parser: flags.ArgumentParser
    model: str | None = None  # which alone has it; None: all have


class Setting(NamedTuple):
    """A row of RECIPES."""

    task: str  # a name of TASKS
    choices: Mapping  # keywords of its loader, or of EVERYWHERE
    recipe: Recipe | Mapping = {}  # whole, or where it differs from the task's own


# Cosines down to a thousandth, on which synchronisation rules are compared.
COSINE = Recipe(
    workers=4,
    units_per_step=32,
    unit_size=1,
    learning_rates=(0.05, 0.1, 0.2, 0.4),
    total_steps=2000,
    weight_decay=1e-4,
    schedule="cosine",
    warmup_steps=100,
    floor=1e-3,
    evaluations=20,
)
# Constant rates and a target, to which arms race when input is slow. Steps are at most those of
# e = 2; the horizon is about as long as the target takes.
RACE = Recipe(
    workers=4,
    units_per_step=16,
    unit_size=1,
    learning_rates=(0.025, 0.05, 0.1, 0.2),
    total_steps=500,
    weight_decay=1e-4,
    horizon=80,
    evaluate_every=5,
    target=0.96,
)
# At full size, for accelerators. Targets and rates are ours: the paper's are not public.
FULL_RACE = RACE._replace(
    units_per_step=32,
    learning_rates=(0.05, 0.1, 0.2),
    total_steps=78_000,
    weight_decay=5e-4,
    horizon=39_000,
    evaluate_every=390,
    target=0.9,
    run="turns",
)
SMALL_CIFAR = {"size": 16, "num_train": 20_000}
LARGE = {"evaluations": 20, "run": "turns"}

# Workers of convolutional networks take turns: vmap over kernels of their own is slow on a CPU.
RECIPES = {
    "digits_cosine": Setting(
        "digits", {},
        images.DIGITS_RECIPE._replace(
            schedule="cosine", floor=1e-3, bound_every=0, evaluations=50
        ),
    ),
    "shakespeare_cosine": Setting(
        "tinyshakespeare", {"num_train": 2048},
        COSINE._replace(
            workers=8, units_per_step=1, unit_size=4, epochs=12, total_steps=None,
            optimizer="adamw", weight_decay=0.01, warmup_steps=48, evaluations=24,
            learning_rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
        ),
    ),
    # Few epochs, as of curricula, and 490 steps each.
    "scored": Setting(
        "tinyshakespeare", {"num_train": 15_680},
        COSINE._replace(
            units_per_step=8, epochs=2, total_steps=None, optimizer="adamw", weight_decay=0.01,
            schedule="constant", floor=0.0, warmup_steps=50, evaluations=4, average=("ema",),
            ema_epochs=(0.1, 0.3), learning_rates=(1e-3, 2e-3, 4e-3, 8e-3), metric="loss",
            target=2.0,
        ),
    ),
    "digits_mlp": Setting(  # few examples, so that generalisation can differ
        "digits", {"model": "mlp", "num_train": 800},
        COSINE._replace(units_per_step=16, learning_rates=(0.05, 0.1, 0.2, 0.4, 0.8)),
    ),
    "mnist_mlp": Setting("mnist", {"model": "mlp"}, COSINE),
    "cifar10_small": Setting(  # to compare orders on a CPU in minutes
        "cifar10", {"model": "lenet", "size": 32, "num_train": 4_096, "num_test": 2_000}
    ),
    "cifar10_resnet8": Setting(
        "cifar10", {"model": "resnet8", "num_test": 8_000, **SMALL_CIFAR},
        COSINE._replace(
            learning_rates=(0.1, 0.2, 0.4, 0.8), total_steps=2500, weight_decay=5e-4,
            warmup_steps=125, run="turns",
        ),
    ),
    "cifar10_vit": Setting(
        "cifar10", {"model": "small_vit", "num_test": 8_000, **SMALL_CIFAR},
        COSINE._replace(
            learning_rates=(1e-3, 2e-3, 4e-3, 8e-3), total_steps=2500, optimizer="adamw",
            weight_decay=0.05, warmup_steps=250,
        ),
    ),
    # Published, as the task's file has them.
    "imagenet_resnet152": Setting(
        "imagenet2012", {"model": "resnet152", "dtype": "bfloat16"}, LARGE
    ),
    "imagenet_vit_b": Setting("imagenet2012", {"model": "vit_b", "dtype": "bfloat16"}, LARGE),
    "digits_wide": Setting(
        "digits", {"model": "mlp", "width": 512, "depth": 2, "num_train": 800}, RACE
    ),
    "mnist_lenet": Setting(
        "mnist", {"model": "lenet", "num_test": 2000},
        RACE._replace(
            learning_rates=(0.0125, 0.025, 0.05, 0.1), horizon=150, evaluate_every=10, target=0.93,
            run="turns",
        ),
    ),
    "cifar10_resnet8_race": Setting(
        "cifar10", {"model": "resnet8", "num_test": 2000, **SMALL_CIFAR},
        RACE._replace(
            workers=2, units_per_step=32, total_steps=700, horizon=250, evaluate_every=25,
            target=0.38, run="turns",
        ),
    ),
    "cifar10_mobilenet_race": Setting(
        "cifar10", {"model": "mobilenet", "num_test": 2000, **SMALL_CIFAR},
        RACE._replace(workers=2, horizon=200, evaluate_every=25, target=0.33, run="turns"),
    ),
    "shakespeare_race": Setting(
        "tinyshakespeare", {"num_test": 400},
        RACE._replace(
            workers=2, units_per_step=8, learning_rates=(1e-3, 2e-3, 4e-3, 8e-3),
            optimizer="adamw", weight_decay=0.01, horizon=150, evaluate_every=20, metric="loss",
            target=2.45,
        ),
    ),
    "cifar10_resnet18": Setting("cifar10", {"model": "resnet18"}, FULL_RACE),
    "cifar100_resnet18": Setting(
        "cifar100", {"model": "resnet18"}, FULL_RACE._replace(target=0.65)
    ),
    "cifar10_mobilenet_v2": Setting("cifar10", {"model": "mobilenet_v2"}, FULL_RACE),
    "cifar100_mobilenet_v2": Setting(
        "cifar100", {"model": "mobilenet_v2"}, FULL_RACE._replace(target=0.65)
    ),
    # After NanoGPT Slowrun's tiny track, an hour on two cores: see docs/results/slowrun.md.
    "slowrun": Setting(
        "wikitext2_small", {"model": "slowrun", "num_train": 1280, "num_test": 1024},
        wikitext.RECIPES["slowrun"]._replace(unit_size=1, epochs=12),
    ),
    "wikitext2_gpt2": Setting(
        "wikitext2", {"model": "gpt2"},
        FULL_RACE._replace(
            units_per_step=8, learning_rates=(2.5e-4, 5e-4, 1e-3), total_steps=30_000,
            optimizer="adamw", weight_decay=0.01, horizon=20_000, evaluate_every=500,
            metric="loss", target=5.5,
        ),
    ),
}  # fmt: skip


def setting_of(name: str) -> Setting:
    """The setting of a name of RECIPES or TASKS."""
    if name in RECIPES:
        return RECIPES[name]
    if name in TASKS:
        return Setting(name, {})
    names = [*RECIPES, *TASKS]
    raise UserError(f"--task is {name}: choose one of {', '.join(names)}.{meant(name, names)}")


def load(
    name: str, data_dir: str | None = None, *, abstract: bool = False, **choices
) -> tuple[Task, Recipe]:
    """The task and the recipe of a setting, a name of RECIPES or of TASKS.

    Args:
      abstract: shapes alone; nothing is read.
      choices: of the task or of EVERYWHERE, in place of the setting's; see `check_choices`.
    """
    setting = setting_of(name)
    loader, choices = TASKS[setting.task], {**setting.choices, **choices}
    more = {k: choices.pop(k) for k in EVERYWHERE if k in {*choices} - {*choices_of(loader)}}
    made = base.check_task(loader(data_dir, abstract=abstract, **choices))
    task = base.with_first(made, **more)
    given = setting.recipe
    return task, given if isinstance(given, Recipe) else task.recipe._replace(**given)


def recipe_of(name: str) -> Recipe:
    """The recipe of a setting."""
    setting = setting_of(name)
    if isinstance(setting.recipe, Recipe):
        return setting.recipe
    if setting.task == "digits":  # without building its model, which takes JAX
        return images.DIGITS_RECIPE
    return load(name, abstract=True)[1]


def choices_of(loader: Callable) -> dict[str, Choice]:
    """A task's choices: its model, and its loader's keyword-only parameters.

    A parameter may be annotated by what parses it and by the model that alone has it, as
    `width: Annotated[int, COUNT, "mlp"] = 64`.
    """
    choices = {}
    for name, p in inspect.signature(loader).parameters.items():
        if name not in NOT_CHOICES and (p.kind is p.KEYWORD_ONLY or name == "model"):
            more = getattr(p.annotation, "__metadata__", ())
            choices[name] = Choice(*(more or [PARSERS[type(p.default)]]))
    return choices


def check_choices(name: str, choices: Mapping) -> None:
    """Raises ValueError for a choice that a setting's task does not have, or not with its model."""
    setting = setting_of(name)
    loader = TASKS[setting.task]
    options = choices_of(loader)
    usual = inspect.signature(loader).parameters["model"].default
    model = {"model": usual, **setting.choices, **choices}["model"]
    for choice, value in choices.items():
        if choice not in options and choice not in EVERYWHERE:
            raise UserError(
                f"--{choice} is {value}: {setting.task} has no such choice. It has "
                f"{', '.join(dict.fromkeys([*options, *EVERYWHERE]))}."
            )
        if choice in options and options[choice].model not in (None, model):
            raise UserError(
                f"--{choice} is {value}: of {setting.task} only --model={options[choice].model} "
                f"has it, and the model is {model}. Leave it out, or choose that model."
            )


def planned(name: str, **fields) -> tuple[Task, Recipe]:
    """A setting by its shapes, with other fields of its recipe, of which the steps are known."""
    task, recipe = load(name, abstract=True)
    recipe = recipe._replace(**fields)
    total = total_steps_of(recipe, sizes_of(task, recipe))
    return task, recipe._replace(total_steps=total)
