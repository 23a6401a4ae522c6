r"""How often do the published recipes synchronise under each rule, and how long would they take?

    python -m experiments.forecast                     # ViT-B and ResNet-152, 16 workers, seconds
    python -m experiments.forecast --recipe=resnet152 --step_seconds=0.4 --gigabits=25,200
    python -m experiments.forecast --recipe=custom --num_params=7000000 --total_steps=20000 \
        --peak_lr=0.4 --alpha=0.1 --h_base=2 --step_seconds=0.05
    python -m experiments.forecast --load_seconds=0.008 --step_seconds=0.002   # how much to echo?
    python -m experiments.forecast --measure=digits    # the same, at the speeds of a task here

Nothing is trained: a plan is known before the run. Writes metrics.jsonl, table.md and periods.png.
Expected: QSR takes 9711 rounds (10.375 %) on ViT-B and 24792 (39.731 %) on ResNet-152.

The rules, where papers leave a choice: 1/η and 1/η³ have the alpha, found by bisection, at
which their volume is QSR's; post-local SGD and SWAP switch after the share --switch of the steps
and use H_base before (SWAP) or after (post-local).

Assumptions: those of `local_opt.forecast` (no overlap, a ring as fast as one worker's link) and no
latency. ViT-B's seconds per step come from the published total times on 16 GPUs, and hold for
those only; ResNet-152's are an assumption (`published.ASSUMED_STEP_SECONDS`). Pass --step_seconds.

With --load_seconds and --step_seconds, or with --measure, it answers another question instead: how
often a batch can be used again at no cost, and what each echo policy loses at each queue depth by
`ordering.echo.echo_forecast`. Writes metrics.jsonl, table.md and stalls.png. Of the flags above,
--total_steps alone serves there. Expected for 0.008 and 0.002: R = 4; at depth 1 Bernoulli coins
with p = 1/R take 1.17 times as long, error diffusion 1.000 times.
"""

import math
import os
from collections.abc import Sequence

from absl import app, flags

import local_opt
from experiments import compare, echo_forecast, plan_plots, records
from experiments.flag_values import definer
from experiments.published import RECIPES, VIT_B, Recipe, plans_of, schedule_of
from experiments.sync_rules import RULES
from experiments.tasks import TASKS

FLAGS = flags.FLAGS
# Gu et al. 2024, abstract: ViT-B on 16 GPUs, hours of AdamW that synchronises every step, and of
# Local AdamW with QSR.
PUBLISHED_HOURS = {"parallel": 26.7, "qsr": 20.2}
PUBLISHED_WORKERS = 16
# Gradient accumulation communicates as constant H does.
SHOWN = [name for name in RULES if name != "accumulate"]


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    own = "; the recipe's own if unset"

    define = definer(values)
    define(flags.DEFINE_enum, "recipe", "all", "what to plan", [*RECIPES, "all"])
    define(flags.DEFINE_integer, "num_params", None, "D, averaged at a sync" + own, lower_bound=1)
    define(flags.DEFINE_integer, "total_steps", None, "T" + own, lower_bound=1)
    define(flags.DEFINE_integer, "warmup_steps", None, "of T" + own, lower_bound=0)
    define(flags.DEFINE_float, "peak_lr", None, "learning rate after the warmup" + own)
    define(flags.DEFINE_float, "floor_lr", None, "learning rate at the end" + own)
    define(flags.DEFINE_float, "alpha", None, "growth coefficient of QSR" + own)
    define(flags.DEFINE_integer, "h_base", None, "least steps per round" + own, lower_bound=1)
    define(flags.DEFINE_integer, "h_max", None, "most steps per round; no limit if unset")
    define(flags.DEFINE_list, "rules", SHOWN, f"of {', '.join(RULES)}")
    define(flags.DEFINE_float, "switch", 0.5, "share of T at which post-local and SWAP switch",
           lower_bound=0, upper_bound=1)  # fmt: skip
    define(
        flags.DEFINE_integer, "workers", PUBLISHED_WORKERS, "W, members of the ring", lower_bound=1
    )
    define(flags.DEFINE_float, "step_seconds", None, "to compute a step on a worker" + own)
    define(flags.DEFINE_list, "gigabits", ["10", "25", "100", "400"], "Gb/s of a worker's link")
    define(flags.DEFINE_float, "bytes_per_param", 4.0, "sent; 2 for bfloat16")
    define(flags.DEFINE_float, "load_seconds", None, "to read a batch and move it to the device: "
           "forecasts echoing; needs --step_seconds")  # fmt: skip
    define(flags.DEFINE_enum, "measure", None, "task whose loads and steps are timed here: "
           "forecasts echoing", [*TASKS])  # fmt: skip
    define(flags.DEFINE_string, "data_dir", None, "folder of the data of --measure")
    define(flags.DEFINE_integer, "batch_size", 128, "examples per load, of --measure",
           lower_bound=1)  # fmt: skip
    define(flags.DEFINE_list, "depths", ["1", "2", "4", "16"], "queue depths, for echoing")
    define(flags.DEFINE_string, "output_dir", None, "gets what is written; results/forecast if "
           "unset, results/forecast_echo for echoing")  # fmt: skip
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")


def published_split(volume: float | None = None) -> local_opt.CommunicationTime:
    """Hours of computation and communication of the published ViT-B runs.

    Args:
      volume: of the shorter run; QSR's if unset.
    """
    if volume is None:
        volume = plans_of(VIT_B, ["qsr"])["qsr"].volume
    return local_opt.communication_time([1, volume], list(PUBLISHED_HOURS.values()))


def recipes_from_flags(values: flags.FlagValues = FLAGS) -> dict[str, Recipe]:
    """The chosen recipes with the flags that are set in place of their fields."""
    names = ["vit_b", "resnet152"] if values.recipe == "all" else [values.recipe]
    given = {f: values[f].value for f in Recipe._fields if f in values}
    given = {f: v for f, v in given.items() if v is not None}
    if "step_seconds" in given:
        given["seconds_are"] = "given by --step_seconds"
    recipes = {}
    for name in names:
        recipe = RECIPES[name]
        if name == "vit_b":
            seconds = 3600 * published_split().compute / recipe.total_steps
            recipe = recipe._replace(step_seconds=seconds)
        recipe = recipe._replace(**given)
        missing = [f"--{f}" for f, v in recipe._asdict().items() if v is None and f != "h_max"]
        if missing:
            raise app.UsageError(f"--recipe={name} has no values of its own: pass {missing}.")
        recipes[name] = recipe
    return recipes


def records_of(name: str, recipe: Recipe, plans, values: flags.FlagValues) -> list[dict]:
    """One record per rule."""
    found = []
    for rule, plan in plans.items():
        costs = {
            speed: local_opt.forecast(
                plan,
                num_params=recipe.num_params,
                num_workers=values.workers,
                step_seconds=recipe.step_seconds,
                gigabits_per_second=float(speed),
                bytes_per_param=values.bytes_per_param,
            )
            for speed in values.gigabits
        }
        cost = next(iter(costs.values()))
        found.append({
            "recipe": name, "rule": rule, "plan": plan.rule, "digest": plan.digest(),
            "rounds": cost.rounds, "volume": cost.volume, "sent_bytes": cost.sent_bytes,
            "h_least": int(plan.periods.min()), "h_most": int(plan.periods.max()),
            "compute_hours": cost.compute_seconds / 3600,
            "total_hours": {speed: c.total_seconds / 3600 for speed, c in costs.items()},
        })  # fmt: skip
    return found


def table(recipe: Recipe, found: Sequence[dict], workers: int) -> str:
    """Markdown: the recipe, one row per rule, and what the rules are exactly."""
    rows = [
        {
            "rule": RULES[r["rule"]].label,
            "rounds": r["rounds"],
            "volume": f"{r['volume']:.3%}",
            "GB sent": f"{r['sent_bytes'] / 1e9:,.0f}",
            "H": f"{r['h_least']} to {r['h_most']}" if r["h_least"] < r["h_most"] else r["h_most"],
            "compute h": f"{r['compute_hours']:.2f}",
        }
        | {f"h at {speed} Gb/s": f"{hours:.2f}" for speed, hours in r["total_hours"].items()}
        for r in found
    ]
    exact = "\n".join(f"- {RULES[r['rule']].label}: {r['plan']}" for r in found)
    return (
        f"{recipe.label}: {recipe.num_params:,} parameters, {recipe.total_steps} steps "
        f"({recipe.warmup_steps} of warmup), learning rate {recipe.peak_lr:g} to "
        f"{recipe.floor_lr:g}, {workers} workers,\n{recipe.step_seconds:.4g} s of computation per "
        f"step ({recipe.seconds_are}). GB are sent per worker; h are hours in all.\n\n"
        f"{compare.markdown(rows)}\n\n{exact}\n"
    )


def published_text() -> str:
    """What the published times of ViT-B say about communication."""
    split, as_constant = published_split(), published_split(1 / VIT_B.h_base)
    sent = local_opt.ring_bytes(VIT_B.num_params, num_workers=PUBLISHED_WORKERS)
    speed = 8 * sent * VIT_B.total_steps / (3600 * split.communication) / 1e9
    every, qsr = PUBLISHED_HOURS.values()
    return (
        f"ViT-B on {PUBLISHED_WORKERS} GPUs took {every} h with a sync every step and {qsr} h with "
        f"QSR (Gu et al. 2024): by\ncommunication_time, {split.compute:.2f} h of computation and "
        f"{split.communication:.2f} h of communication (every step), as a ring over\nlinks of "
        f"{speed:.1f} Gb/s. Reading the {qsr} h as constant H = {VIT_B.h_base} would give "
        f"{as_constant.communication:.2f} h.\n"
    )


def speed_from_flags(values: flags.FlagValues = FLAGS) -> echo_forecast.Speed | None:
    """The speeds that echoing is forecast for, given or measured now; None if it is not asked."""
    load, step = values.load_seconds, values.step_seconds
    if values.measure:
        if load is not None or step is not None:
            raise app.UsageError(
                "--measure is given with --load_seconds or --step_seconds: time them here, or "
                "pass both numbers."
            )
        task = TASKS[values.measure](values.data_dir)
        return echo_forecast.measure(task, batch_size=values.batch_size)
    if load is None:
        return None
    if step is None:
        raise app.UsageError("--load_seconds is given alone: pass --step_seconds too.")
    for name, value in (("load_seconds", load), ("step_seconds", step)):
        if not (math.isfinite(value) and value > 0):
            raise app.UsageError(f"--{name} is {value:g}: pass a positive, finite number.")
    return echo_forecast.Speed(load, step, "given")


def forecast_echoing(speed: echo_forecast.Speed, values: flags.FlagValues) -> None:
    """The table and picture of the echo policies."""
    if bad := [d for d in values.depths if not (d.isdecimal() and int(d))]:
        raise app.UsageError(f"--depths has {bad}: pass whole numbers >= 1.")
    depths = sorted({int(d) for d in values.depths})
    steps = values.total_steps or echo_forecast.TOTAL_STEPS
    folder = values.output_dir or "results/forecast_echo"
    asked = ("load_seconds", "step_seconds", "measure", "batch_size")
    settings = {name: values[name].value for name in asked}
    settings |= {"depths": depths, "total_steps": steps}
    records.open_folder(folder, settings, overwrite=values.overwrite)
    found = echo_forecast.records_of(speed, depths, total_steps=steps)
    text = echo_forecast.table(speed, found)
    own = speed._asdict()
    records.write_lines(os.path.join(folder, "metrics.jsonl"), [own | r for r in found])
    records.write_whole(os.path.join(folder, "table.md"), text)
    echo_forecast.picture(speed, found, os.path.join(folder, "stalls.png"))
    print(f"{text}\nWritten to {folder}: metrics.jsonl, table.md, stalls.png")


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    if speed := speed_from_flags(values):
        forecast_echoing(speed, values)
        return
    if unknown := sorted(set(values.rules) - set(RULES)):
        raise app.UsageError(f"--rules has {unknown}: it must hold names of {', '.join(RULES)}.")
    recipes = recipes_from_flags(values)
    asked = ("rules", "switch", "workers", "gigabits", "bytes_per_param")
    settings = {name: values[name].value for name in asked}
    settings["recipes"] = {name: recipe._asdict() for name, recipe in recipes.items()}
    folder = values.output_dir or "results/forecast"
    records.open_folder(folder, settings, overwrite=values.overwrite)
    all_records, texts, panels = [], [], []
    for name, recipe in recipes.items():
        plans = plans_of(recipe, values.rules, values.switch)
        found = records_of(name, recipe, plans, values)
        all_records += found
        texts.append(table(recipe, found, values.workers))
        shown = {RULES[rule].label: plan for rule, plan in plans.items()}
        panels.append(plan_plots.Panel(recipe.label, shown, schedule_of(recipe)))
    text = "\n".join([*texts, published_text()])
    records.write_lines(os.path.join(folder, "metrics.jsonl"), all_records)
    records.write_whole(os.path.join(folder, "table.md"), text)
    path = os.path.join(folder, "periods.png")
    plan_plots.period_panels(panels, path, "Steps between syncs, known before the run")
    print(f"{text}\nWritten to {folder}: metrics.jsonl, table.md, periods.png")


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
