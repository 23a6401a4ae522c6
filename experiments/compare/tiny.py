"""Makes a setting small, for `--tiny`: the same structure, in minutes on two cores.

The data set and the network become small ones of the same kind, the batch at most 64 examples, and
the run some forty steps, of which warmup, decay and horizon keep their shares. Orders, rules,
policies, schedule, optimizer and the number of workers stay. It shows that everything runs; its
results are not those of the setting.
"""

import math

from absl import flags

from experiments.compare import recipes
from experiments.data import TASKS
from experiments.data.base import Recipe, Task
from experiments.data.metrics import METRICS
from experiments.trainer.config import Sizes, sizes_of, total_steps_of

STAND_INS = {  # of data sets, with choices beside the network
    "imagenet2012": ("cifar10", {"size": 16}),
    "cifar10": ("cifar10", {"size": 16}),
    "cifar100": ("cifar10", {"size": 16}),
    "wikitext103": ("wikitext2_small", {}),
    "wikitext2": ("wikitext2_small", {}),
}
MODELS = {
    "resnet152": "resnet8",
    "resnet18": "resnet8",
    "vit_b": "small_vit",
    "mobilenet_v2": "mobilenet",
}
TRAIN, TEST, BATCH, STEPS, EPOCHS = 512, 256, 64, 40, 4  # at most


def stand_in(name: str, **choices) -> tuple[str, dict]:
    """(task, its choices) in place of a setting with these choices."""
    setting = recipes.setting_of(name)
    choices = {**setting.choices, **choices}
    task, more = STAND_INS.get(setting.task, (setting.task, {}))
    if model := choices.get("model"):
        more = more | {"model": MODELS.get(model, model)}
    if model == "lenet":
        more = {name: choice for name, choice in more.items() if name != "size"}  # it needs 32
    options = recipes.choices_of(TASKS[task])
    kept = {k: v for k, v in choices.items() if k in options} if task == setting.task else {}
    first = {"num_train": TRAIN, "num_test": TEST}
    return task, kept | more | {k: min(n, choices.get(k, n)) for k, n in first.items()}


def shrink(recipe: Recipe, sizes: Sizes, task: Task) -> Recipe:
    """The recipe of a run of these sizes, with a small batch and few steps on another task."""
    per_worker = max(1, BATCH // recipe.workers)
    unit_size = min(recipe.unit_size, per_worker)
    small = recipe._replace(
        unit_size=unit_size,
        units_per_step=min(recipe.units_per_step, per_worker // unit_size),
        learning_rates=(recipe.learning_rates[len(recipe.learning_rates) // 2],),
    )
    if recipe.epochs is None:
        small = small._replace(total_steps=min(recipe.total_steps, STEPS))
    else:
        small = small._replace(epochs=min(recipe.epochs, EPOCHS))
    small_sizes = sizes_of(task, small)
    steps, before = total_steps_of(small, small_sizes), total_steps_of(recipe, sizes)
    epochs = steps / small_sizes.loads_per_epoch
    part, of_epochs = steps / before, epochs / (before / sizes.loads_per_epoch)
    scaled = {
        name: math.ceil(part * getattr(recipe, name))
        for name in ("warmup_steps", "horizon", "evaluate_every")
        if getattr(recipe, name) is not None
    }
    if recipe.evaluations is not None:
        scaled["evaluations"] = min(recipe.evaluations, 4)
    if recipe.target is not None:  # soon reached
        scaled["target"] = recipe.target * (1.3 if METRICS[recipe.metric].lower else 0.2)
    return small._replace(
        **scaled,
        decay_every=of_epochs * recipe.decay_every,
        bound_every=min(recipe.bound_every, math.floor(epochs)),
    )


def load(
    name: str, data_dir: str | None, recipe: Recipe, sizes: Sizes, *, abstract: bool, **choices
) -> tuple[Task, Recipe]:
    """The small task in place of a setting, and its recipe, of a run of these sizes, made small."""
    small, choices = stand_in(name, **choices)
    task, _ = recipes.load(small, data_dir, abstract=abstract, **choices)
    return task, shrink(recipe, sizes, task)


def shrink_comparison(values: flags.FlagValues) -> None:
    """Sets the flags of a study: one seed, and one speed of slow input with a short delay."""
    values.seeds = 1
    if "speeds" in values:
        values.speeds = values.speeds[len(values.speeds) // 2 :][:1]
    if "step_seconds" in values and values.step_seconds is None:
        values.step_seconds = 0.01
