"""Published runs, as far as a plan needs them: a new one is a row."""

from typing import NamedTuple

import optax

from experiments.sync_rules import RULES, Setting
from local_opt import SyncPlan

ASSUMED_STEP_SECONDS = 0.5  # of ResNet-152: chosen, not measured


class Recipe(NamedTuple):
    """A run: warmup from 0 to the peak, then a cosine down to the floor. None: to be given."""

    label: str
    num_params: int | None = None
    total_steps: int | None = None
    peak_lr: float | None = None
    alpha: float | None = None
    h_base: int | None = None
    step_seconds: float | None = None
    seconds_are: str = "given"
    warmup_steps: int = 0
    floor_lr: float = 1e-6
    h_max: int | None = None


VIT_B = Recipe("ViT-B, AdamW, 300 epochs", 86_567_656, 93_600, 0.008, 0.0175, 4,
               seconds_are="derived from published times", warmup_steps=10_000)  # fmt: skip
RESNET152 = Recipe("ResNet-152, SGD, 200 epochs", 60_192_808, 62_400, 0.8, 0.2, 2,
                   ASSUMED_STEP_SECONDS, "an assumption, not measured", 1_560)  # fmt: skip
RECIPES = {"vit_b": VIT_B, "resnet152": RESNET152, "custom": Recipe("custom")}


def schedule_of(recipe: Recipe) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        0.0, recipe.peak_lr, recipe.warmup_steps, recipe.total_steps, recipe.floor_lr
    )


def plans_of(recipe: Recipe, rules, switch: float | None = None) -> dict[str, SyncPlan]:
    """The plans of rules by name; `switch` is where post-local and SWAP change, a share of T."""
    setting = Setting.of(
        schedule_of(recipe),
        total_steps=recipe.total_steps,
        warmup_steps=recipe.warmup_steps,
        h_base=recipe.h_base,
        alpha=recipe.alpha,
        h_max=recipe.h_max,
    )
    if switch is not None:
        setting = setting._replace(post_local_until=switch, swap_until=switch)
    return {name: RULES[name].plan(setting) for name in rules}
