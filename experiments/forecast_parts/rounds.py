"""How often a run synchronises under each rule, and what that costs: plans and table."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import local_opt
from experiments.results.tables import markdown
from experiments.studies import recipes
from experiments.studies.tables import SYNC_RULES
from experiments.tasks import Recipe
from experiments.training import config
from experiments.training.parts import num_params
from local_opt import SyncPlan

# Gu et al. 2024, abstract: ViT-B on 16 GPUs, hours of AdamW that synchronises every step, and of
# Local AdamW with QSR. Its 300 epochs are 93,600 steps, its least H is 4.
HOURS = (26.7, 20.2)
WORKERS, STEPS, QSR_ROUNDS, H_BASE, PARAMS = 16, 93_600, 9711, 4, 86_567_656


def published_split(volume: float = QSR_ROUNDS / STEPS) -> local_opt.CommunicationTime:
    """Hours of computation and communication of the published ViT-B runs, QSR's of this volume."""
    return local_opt.communication_time([1, volume], HOURS)


class Run(NamedTuple):
    """A run, as far as a plan and its price need it. None, or no learning rate: to be given."""

    label: str
    recipe: Recipe
    num_params: int | None = None
    step_seconds: float | None = None
    seconds_are: str = "given by --step_seconds"


CUSTOM = Recipe(WORKERS, 1, 1, (), schedule="cosine", floor=1e-6, h_base=None, growth=None)
# Of published runs: label, seconds of computation per step, and where these come from.
KNOWN = {
    "imagenet_vit_b": (
        "ViT-B, AdamW, 300 epochs", 3600 * published_split().compute / STEPS,
        "derived from published times"),
    "imagenet_resnet152": (
        "ResNet-152, SGD, 200 epochs", 0.5, "an assumption, not measured"),
}  # fmt: skip
# Where these two switch is a flag here.
SWITCHING = {"post_local": local_opt.post_local, "swap": local_opt.swap}


def run_of(name: str, **fields) -> Run:
    """The run of a setting with other fields of its recipe; of "custom" all are to be given."""
    if name == "custom":
        return Run(name, CUSTOM._replace(**fields))
    task, recipe = recipes.load(name, abstract=True)
    recipe = recipe._replace(**fields)
    total = config.total_steps_of(recipe, config.sizes_of(task, recipe))
    label, *seconds = KNOWN.get(name, (name,))
    return Run(label, recipe._replace(total_steps=total), num_params(task.model), *seconds)


def config_of(recipe: Recipe) -> config.RunConfig:
    """In the units of the learning rate itself: alpha is then the published one."""
    rate = recipe.learning_rates[0]
    found = config.config_of(recipe, config.Sizes(1, 1, 1, 1), seed=0)
    own = {"rates": rate * found.rates, "growth": rate * found.growth}
    return found._replace(**own, loads_per_epoch=None)


def plans_of(recipe: Recipe, rules: Sequence[str], switch: float = 0.5) -> dict[str, SyncPlan]:
    """The plans of rules by name; `switch` is where post-local and SWAP change, a share of T."""
    made, total = config_of(recipe), recipe.total_steps
    return {
        name: SWITCHING[name](made.h_base, switch_step=int(switch * total), total_steps=total)
        if name in SWITCHING
        else SYNC_RULES[name].plan(made)
        for name in rules
    }


def records_of(
    name: str, run: Run, plans: Mapping[str, SyncPlan], speeds: Sequence[str], bytes_per_param=4.0
) -> list[dict]:
    """One record per rule; speeds are those of a worker's link, in Gb/s."""
    found = []
    for rule, plan in plans.items():
        costs = [
            local_opt.forecast(
                plan, num_params=run.num_params, num_workers=run.recipe.workers,
                step_seconds=run.step_seconds, gigabits_per_second=float(speed),
                bytes_per_param=bytes_per_param,
            )
            for speed in speeds
        ]  # fmt: skip
        found.append({
            "task": name, "rule": rule, "plan": plan.rule, "digest": plan.digest(),
            "rounds": plan.rounds, "volume": plan.volume, "sent_bytes": costs[0].sent_bytes,
            "h_least": int(plan.periods.min()), "h_most": int(plan.periods.max()),
            "compute_hours": costs[0].compute_seconds / 3600,
            "total_hours": {s: c.total_seconds / 3600 for s, c in zip(speeds, costs, strict=True)},
        })  # fmt: skip
    return found


def table(run: Run, found: Sequence[dict]) -> str:
    """Markdown: the run, one row per rule, and what the rules are exactly."""
    rows = [
        {
            "rule": SYNC_RULES[r["rule"]].label,
            "rounds": r["rounds"],
            "volume": f"{r['volume']:.3%}",
            "GB sent": f"{r['sent_bytes'] / 1e9:,.0f}",
            "H": f"{r['h_least']} to {r['h_most']}" if r["h_least"] < r["h_most"] else r["h_most"],
            "compute h": f"{r['compute_hours']:.2f}",
        }
        | {f"h at {speed} Gb/s": f"{hours:.2f}" for speed, hours in r["total_hours"].items()}
        for r in found
    ]
    exact = "\n".join(f"- {SYNC_RULES[r['rule']].label}: {r['plan']}" for r in found)
    recipe, rate = run.recipe, run.recipe.learning_rates[0]
    return (
        f"{run.label}: {run.num_params:,} parameters, {recipe.total_steps} steps "
        f"({recipe.warmup_steps} of warmup), learning rate {rate:g} to "
        f"{rate * recipe.floor:g}, {recipe.workers} workers,\n{run.step_seconds:.4g} s of "
        f"computation per step ({run.seconds_are}). GB are sent per worker; h are hours in all."
        f"\n\n{markdown(rows)}\n\n{exact}\n"
    )


def published_text() -> str:
    """What the published times of ViT-B say about communication."""
    split, as_constant = published_split(), published_split(1 / H_BASE)
    sent = local_opt.sync_bytes(PARAMS, num_workers=WORKERS)
    speed = 8 * sent * STEPS / (3600 * split.communication) / 1e9
    every, qsr = HOURS
    return (
        f"ViT-B on {WORKERS} GPUs took {every} h with a sync every step and {qsr} h with "
        f"QSR (Gu et al. 2024): by\ncommunication_time, {split.compute:.2f} h of computation and "
        f"{split.communication:.2f} h of communication (every step), as a ring over\nlinks of "
        f"{speed:.1f} Gb/s. Reading the {qsr} h as constant H = {H_BASE} would give "
        f"{as_constant.communication:.2f} h.\n"
    )
