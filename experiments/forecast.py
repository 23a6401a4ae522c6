r"""Forecasts rounds, volume and hours of the published recipes under each rule, without training.

    python -m experiments.forecast                     # ViT-B and ResNet-152, 16 workers, seconds
    python -m experiments.forecast --task=imagenet_resnet152 --step_seconds=0.4 --gigabits=25,200
    python -m experiments.forecast --task=presets      # bytes of published methods, their claims

Plans are known before a run. Writes table.md and periods.png.
Expected: QSR takes 9711 rounds (10.375 %) on ViT-B and 24792 (39.731 %) on ResNet-152.

Assumes what `local_opt.forecast` assumes, and no latency. ViT-B's seconds per step come from the
published total times on 16 GPUs; ResNet-152's are an assumption: pass --step_seconds.

For the echo factor that costs nothing, see `experiments.advise`, which measures a load and a step;
for what echo policies lose, `experiments.echoing --dry_run --speeds=R`.
"""

import os
import sys
from collections.abc import Mapping, Sequence

from absl import flags

import local_opt
from experiments import published
from experiments.cluster import entry, files
from experiments.results import plots
from experiments.results.tables import markdown
from experiments.study import flags as dialect
from experiments.study import recipes
from experiments.study.tables import SYNC_RULES
from experiments.tasks import Recipe, ranges
from experiments.training import config
from experiments.training.config import num_params

# Gradient accumulation communicates as constant H does.
SHOWN = ["parallel", "constant", "post_local", "swap", "inverse", "qsr", "cubic"]

# Gu et al. 2024, abstract: hours of ViT-B on 16 GPUs with AdamW synchronised every step, and with
# Local AdamW under QSR. 300 epochs are 93,600 steps; the smallest H is 4.
HOURS = (26.7, 20.2)
WORKERS, STEPS, QSR_ROUNDS, H_BASE, PARAMS = 16, 93_600, 9711, 4, 86_567_656


def published_split(volume: float = QSR_ROUNDS / STEPS):
    """Hours of computation and communication of the published ViT-B runs, given QSR's volume."""
    return local_opt.communication_time([1, volume], HOURS)


# Published runs: label, seconds of computation per step, and the source of these seconds.
KNOWN = {
    "imagenet_vit_b": (
        "ViT-B, AdamW, 300 epochs", 3600 * published_split().compute / STEPS,
        "derived from published times"),
    "imagenet_resnet152": ("ResNet-152, SGD, 200 epochs", 0.5, "an assumption, not measured"),
}  # fmt: skip


def define_flags(values: flags.FlagValues) -> None:
    dialect.define(values, "setting")
    define = dialect.definer(values)
    define(flags.DEFINE_string, "task", "all", "a setting to plan, all, or presets")
    define(flags.DEFINE_list, "arms", SHOWN, f"rules to compare, of {', '.join(SYNC_RULES)}")
    text = "seconds of computation per step; the published ones if unset"
    define(ranges.POSITIVE, "step_seconds", None, text)
    define([ranges.SPEED], "gigabits", [10, 25, 100, 400], "Gb/s of a worker's link")
    define(flags.DEFINE_string, "output_dir", "results/forecast", "folder for the output")


def config_of(recipe: Recipe) -> config.RunConfig:
    """The run's configuration in absolute learning rates, so that alpha is the published one."""
    rate = recipe.learning_rates[0]
    found = config.config_of(recipe, config.Sizes(1, 1, 1, 1), seed=0)
    own = {"rates": rate * found.rates, "growth": rate * found.growth}
    return found._replace(**own, loads_per_epoch=None)


def row_of(rule: str, plan, speeds: Sequence[float], cost: Mapping) -> dict:
    """A table row: what a rule's plan costs on links of these speeds, in Gb/s."""
    found = [local_opt.forecast(plan, **cost, gigabits_per_second=speed) for speed in speeds]
    least, most = int(plan.periods.min()), int(plan.periods.max())
    hours = [f"{one.total_seconds / 3600:.2f}" for one in found]
    return {
        "rule": SYNC_RULES[rule].label,
        "rounds": plan.rounds,
        "volume": f"{plan.volume:.3%}",
        "GB sent": f"{found[0].sent_bytes / 1e9:,.0f}",
        "H": f"{least} to {most}" if least < most else most,
        "compute h": f"{found[0].compute_seconds / 3600:.2f}",
    } | {f"h at {speed:g} Gb/s": text for speed, text in zip(speeds, hours, strict=True)}


def forecast_of(name: str, values: flags.FlagValues) -> tuple[str, str, tuple]:
    """A setting's label, its text, and (rates, plans) for the picture."""
    print(f"Planning {name}", file=sys.stderr, flush=True)
    task, recipe = recipes.planned(name, **dialect.recipe_fields(values))
    label, seconds, source = KNOWN.get(name, (name, None, None))
    if values.step_seconds is not None:
        seconds, source = values.step_seconds, "given by --step_seconds"
    if seconds is None:
        raise ValueError(f"--task={name} has no published times: pass --step_seconds.")
    made, size, rate = config_of(recipe), num_params(task.model), recipe.learning_rates[0]
    rules = dialect.names_of(values, "arms", SYNC_RULES)
    plans = {rule: SYNC_RULES[rule].plan(made) for rule in rules}
    if unknown := [rule for rule, plan in plans.items() if plan is None]:
        raise ValueError(f"--arms has {unknown[0]!r}, whose syncs follow the loads: leave it out.")
    cost = {"num_params": size, "num_workers": recipe.workers, "step_seconds": seconds}
    rows = [row_of(rule, plan, values.gigabits, cost) for rule, plan in plans.items()]
    exact = "\n".join(f"- {SYNC_RULES[rule].label}: {plan.rule}" for rule, plan in plans.items())
    text = (
        f"{label}: {size:,} parameters, {recipe.total_steps} steps "
        f"({recipe.warmup_steps} of warmup), learning rate {rate:g} to "
        f"{rate * recipe.floor:g}, {recipe.workers} workers,\n{seconds:.4g} s of "
        f"computation per step ({source}). GB are sent per worker; h are total hours."
        f"\n\n{markdown(rows)}\n\n{exact}\n"
    )
    return label, text, (made.rates, {SYNC_RULES[rule].label: plans[rule] for rule in rules})


def published_text() -> str:
    """How much communication the published times of ViT-B imply."""
    split, as_constant = published_split(), published_split(1 / H_BASE)
    sent, (every, qsr) = local_opt.sync_bytes(PARAMS, num_workers=WORKERS), HOURS
    speed = 8 * sent * STEPS / (3600 * split.communication) / 1e9
    return (
        f"ViT-B on {WORKERS} GPUs took {every} h with a sync every step and {qsr} h with "
        f"QSR (Gu et al. 2024): by\ncommunication_time, {split.compute:.2f} h of computation and "
        f"{split.communication:.2f} h of communication (every step), as a ring over\nlinks of "
        f"{speed:.1f} Gb/s. Reading the {qsr} h as constant H = {H_BASE} would give "
        f"{as_constant.communication:.2f} h.\n"
    )


def main(values: flags.FlagValues) -> None:
    if values.task == "presets":
        files.write_whole(os.path.join(values.output_dir, "presets.md"), published.text())
        print(f"{published.text()}\nWritten to {values.output_dir}: presets.md")
        return
    names = KNOWN if values.task == "all" else [values.task]
    found = [forecast_of(name, values) for name in names]
    text = "\n".join([*(text for _, text, _ in found), published_text()])
    folder = values.output_dir
    files.write_whole(os.path.join(folder, "table.md"), text)
    title = "Steps between syncs"
    shown = {label: plans for label, _, plans in found}
    plots.periods(shown, os.path.join(folder, "periods.png"), title)
    print(f"{text}\nWritten to {folder}: periods.png, table.md")


if __name__ == "__main__":
    entry.main(define_flags, main)
