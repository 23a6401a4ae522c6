r"""Forecasts rounds, volume and hours of the published recipes under each rule, without training.

    python -m experiments.forecast  # ViT-B and ResNet-152, 16 workers: ten seconds
    python -m experiments.forecast --task=imagenet_resnet152 --step_seconds=0.4 --gigabits=25,200

Plans are known before a run, and are those of the study with the same flags. Volume is what a
worker sends, as a share of syncs in every step. Writes table.md and periods.png.
Expected: QSR takes 9711 rounds (10.375 %) on ViT-B and 24792 (39.731 %) on ResNet-152.

Assumes that workers wait for what is sent, over a network without latency that is used wholly:
docs/results/measured_syncs.md has how far that is from measured syncs, and --efficiency and
--latency are what mends it. ViT-B's seconds per step come from the published total times on 16
GPUs; ResNet-152's are an assumption: pass --step_seconds. --maxtext=base.yml takes the network and
H from a config of MaxText.

For the echo factor that costs nothing, see `experiments.advise`, which measures a load and a step.
"""

import functools
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from experiments import entry, maxtext
from experiments.compare import flags as dialect
from experiments.compare import recipes
from experiments.compare.arms import Arm, arm_of
from experiments.data import Recipe, Task
from experiments.data.base import FACTOR, POSITIVE, SECONDS, SPEED
from experiments.report import plots
from experiments.report.tables import markdown
from experiments.trainer.config import Plans, num_params, plans_of, sizes_of
from syncopate.refusals import UserError

# Gradient accumulation communicates as constant H does.
SHOWN = ["parallel", "constant", "post_local", "swap", "inverse", "qsr", "cubic"]

PUBLISHED = "imagenet_vit_b", "imagenet_resnet152"

# ViT-B with AdamW on 16 GPUs (Gu et al. 2024): hours by communication volume, with a sync after
# each of 93,600 steps, and under QSR after each of 9,711 rounds.
VIT_B_STEPS = 93_600
VIT_B_HOURS = {1: 26.7, 9711 / VIT_B_STEPS: 20.2}


def published(name: str) -> tuple[str, float | None, str | None]:
    """A published run's label, its seconds of computation per step, and their source."""
    from local_opt.costs import communication_time  # imports JAX: not before flags are parsed

    if name == "imagenet_vit_b":
        hours = communication_time(list(VIT_B_HOURS), list(VIT_B_HOURS.values())).computation
        source = "derived from published times"
        return "ViT-B, AdamW, 300 epochs", 3600 * hours / VIT_B_STEPS, source
    if name == "imagenet_resnet152":
        return "ResNet-152, SGD, 200 epochs", 0.5, "an assumption, not measured"
    return name, None, None


def define_network(values: flags.FlagValues, latency: float = 0.0) -> None:
    """--efficiency, --latency and --maxtext, of every command that computes times of syncs."""
    with dialect.shown(values):
        text = "share of --gigabits that a sync reaches"
        dialect.define_value(values, FACTOR, "efficiency", 1.0, text)
        text = "seconds of a sync beside its bytes"
        dialect.define_value(values, SECONDS, "latency", latency, text)
        text = "YAML of MaxText: dcn_bandwidth_limit is --gigabits, diloco_sync_period is --h_base"
        flags.DEFINE_string("maxtext", None, text, values)


def take_maxtext(values: flags.FlagValues) -> maxtext.Config | None:
    """The config of --maxtext; its limit becomes --gigabits unless that is given."""
    if values.maxtext is None:
        return None
    config = maxtext.read(values.maxtext)
    if config.gigabits is not None and not values["gigabits"].present:
        values.gigabits = [config.gigabits]
    return config


def define_flags(values: flags.FlagValues) -> None:
    dialect.define(values, "setting")
    with dialect.shown(values):
        flags.DEFINE_string("task", "all", "a setting to plan, or all", values)
        dialect.define_list(values, dialect.RowParser("sync"), "arms", [*SHOWN], "rules to compare")
        text = "seconds of computation per step; the published ones if unset"
        dialect.define_value(values, POSITIVE, "step_seconds", None, text)
        text = "Gb/s of a worker's link"
        dialect.define_list(values, SPEED, "gigabits", [10, 25, 100, 400], text)
    define_network(values)
    dialect.define(values, "output")


def row_of(
    task: Task,
    recipe: Recipe,
    arm: Arm,
    plans: Plans,
    speeds: Sequence[float],
    seconds: float,
    network: Mapping,
) -> dict:
    """A table row: what a rule's plan costs on links of these speeds, in Gb/s.

    `network` has the efficiency and latency of `local_opt.costs.sync_seconds`.
    """
    from experiments.compare.cost import traffic
    from local_opt.costs import sync_bytes, sync_seconds

    order, row, _ = arm.rows
    sizes, size = sizes_of(task, recipe, deals=order.deals), num_params(task.model)
    plan = plans.sync
    sent = traffic(task, order, row, sizes, False)(plan.rounds, plans.echo.loads)
    sent_bytes = sent * sync_bytes(size, num_workers=sizes.workers)
    network = {**network, "compress": row.compressor and row.compressor()}
    one = functools.partial(sync_seconds, size, num_workers=sizes.workers, **network)
    least, most = int(plan.periods.min()), int(plan.periods.max())
    compute = plan.total_steps * seconds
    return {
        "rule": row.label,
        "rounds": plan.rounds,
        "volume": f"{sent / plan.total_steps:.3%}",
        "GB sent": f"{sent_bytes / 1e9:,.0f}",
        "H": f"{least} to {most}" if least < most else most,
        "compute h": f"{compute / 3600:.2f}",
    } | {
        f"h at {speed:g} Gb/s": f"{(compute + plan.rounds * one(gigabits=speed)) / 3600:.2f}"
        for speed in speeds
    }


def forecast_of(name: str, values: flags.FlagValues) -> tuple[str, str, tuple]:
    """A setting's label, its text, and (rates, plans) for the picture."""
    print(f"Planning {name}", file=sys.stderr, flush=True)
    task, recipe = recipes.planned(name, **dialect.recipe_fields(values))
    label, seconds, source = published(name)
    if values.step_seconds is not None:
        seconds, source = values.step_seconds, "given by --step_seconds"
    if seconds is None:
        raise UserError(f"--task={name} has no published times: pass --step_seconds.")
    size, rate = num_params(task.model), recipe.learning_rates[0]
    arms = [arm_of(words) for words in dict.fromkeys(values.arms)]
    made = [plans_of(task, recipe, arm, rate=rate) for arm in arms]
    plans = {arm.label: one.sync for arm, one in zip(arms, made, strict=True)}
    network = {"efficiency": values.efficiency, "latency": values.latency}
    given = values.gigabits, seconds, network
    rows = [row_of(task, recipe, *of, *given) for of in zip(arms, made, strict=True)]
    exact = "\n".join(f"- {label}: {plan.rule}" for label, plan in plans.items())
    rates = made[0].rates
    text = (
        f"{label}: {size:,} parameters, {recipe.total_steps} steps "
        f"({recipe.warmup_steps} of warmup), learning rate {rate:g} to "
        f"{rates[-1]:.2g}, {recipe.workers} workers,\n{seconds:.4g} s of "
        f"computation per step ({source}). GB are sent per worker; h are total hours;\n"
        f"eta is the learning rate over its peak, so that alpha of QSR is {rate * recipe.growth:g}."
        f"\n\n{markdown(rows)}\n\n{exact}\n"
    )
    return label, text, (rates, plans)


def main(values: flags.FlagValues) -> None:
    from experiments.report import page

    dialect.check_shards(values.shards)
    config = take_maxtext(values)
    if config is not None and not values["h_base"].present:
        values.h_base = config.period
    names = PUBLISHED if values.task == "all" else [values.task]
    forecasts = [forecast_of(name, values) for name in names]  # before it, what is wrong with flags
    with page.opened("forecast", values) as folder:
        text = "\n".join(text for _, text, _ in forecasts)
        shown = {label: plans for label, _, plans in forecasts}
        draw = functools.partial(plots.periods, shown)
        parts = {"table.md": text.rstrip(), "periods.png": draw}
        print(page.write_all(folder, "Steps between syncs", parts))
        print(f"\nWritten to {folder}: periods.png, table.md, report.html")


if __name__ == "__main__":
    entry.main(define_flags, main)
