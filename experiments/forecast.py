r"""How often do the published recipes synchronise under each rule, and how long would they take?

    python -m experiments.forecast                     # ViT-B and ResNet-152, 16 workers, seconds
    python -m experiments.forecast --task=imagenet_resnet152 --step_seconds=0.4 --gigabits=25,200
    python -m experiments.forecast --task=custom --num_params=7000000 --total_steps=20000 \
        --learning_rates=0.4 --growth=0.25 --h_base=2 --step_seconds=0.05
    python -m experiments.forecast --load_seconds=0.008 --step_seconds=0.002   # how much to echo?
    python -m experiments.forecast --measure=digits    # the same, at the speeds of a task here

Nothing is trained: a plan is known before the run. Writes metrics.jsonl, table.md and periods.png.
Expected: QSR takes 9711 rounds (10.375 %) on ViT-B and 24792 (39.731 %) on ResNet-152.

Assumptions: those of `local_opt.forecast` and no latency. ViT-B's seconds per step come from the
published total times on 16 GPUs; ResNet-152's are an assumption. Pass --step_seconds.

With --load_seconds and --step_seconds, or with --measure, the question is how often a batch can be
used again at no cost, and what each echo policy loses at each queue depth. Of the flags above,
--total_steps alone serves there, and --units_per_step and --unit_size with --measure. Expected for
0.008 and 0.002: R = 4; at depth 1 Bernoulli coins with p = 1/R take 1.17 times as long, error
diffusion 1.000 times.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import app, flags

import local_opt
from experiments.cluster import files
from experiments.results import plots, records
from experiments.results.tables import markdown
from experiments.study import flags as dialect
from experiments.study import recipes
from experiments.study.cost import POLICIES, Machine, policy_of
from experiments.study.tables import SYNC_RULES
from experiments.tasks import TASKS, Recipe
from experiments.timing import measure
from experiments.training import config
from experiments.training.config import num_params
from ordering import echo

FLAGS = flags.FLAGS
# Gradient accumulation communicates as constant H does.
SHOWN = ["parallel", "constant", "post_local", "swap", "inverse", "qsr", "cubic"]
NEEDED = ("num_params", "total_steps", "learning_rates", "growth", "h_base", "step_seconds")
TOTAL_STEPS = 100_000  # coins differ by some 0.002 of a slowdown from run to run of this length

# Gu et al. 2024, abstract: ViT-B on 16 GPUs, hours of AdamW that synchronises every step, and of
# Local AdamW with QSR. Its 300 epochs are 93,600 steps, its least H is 4.
HOURS = (26.7, 20.2)
WORKERS, STEPS, QSR_ROUNDS, H_BASE, PARAMS = 16, 93_600, 9711, 4, 86_567_656


def published_split(volume: float = QSR_ROUNDS / STEPS):
    """Hours of computation and communication of the published ViT-B runs, QSR's of this volume."""
    return local_opt.communication_time([1, volume], HOURS)


class Run(NamedTuple):
    """A run, as far as a plan and its price need it. None: to be given."""

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
    "imagenet_resnet152": ("ResNet-152, SGD, 200 epochs", 0.5, "an assumption, not measured"),
}  # fmt: skip


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    dialect.define(values, "setting")
    define = dialect.definer(values)
    real, text, names = flags.DEFINE_float, flags.DEFINE_string, flags.DEFINE_list
    define(text, "task", "all", "a setting to plan, custom, or all that are published")
    define(flags.DEFINE_integer, "num_params", None, "D; the model's if unset", lower_bound=1)
    define(names, "arms", SHOWN, f"rules, of {', '.join(SYNC_RULES)}")
    define(real, "step_seconds", None, "to compute a step on a worker; the published if unset")
    define(names, "gigabits", ["10", "25", "100", "400"], "Gb/s of a worker's link")
    define(real, "load_seconds", None, "to load a batch: forecasts echoing; needs --step_seconds")
    define(flags.DEFINE_enum, "measure", None, "task to time here: forecasts echoing", [*TASKS])
    define(text, "data_dir", None, "folder of the data of --measure")
    define(names, "depths", ["1", "2", "4", "16"], "queue depths, for echoing")
    define(text, "output_dir", None, "results/forecast if unset, or results/forecast_echo")
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")


def run_of(name: str, **fields) -> Run:
    """The run of a setting with other fields of its recipe; of "custom" all are to be given."""
    if name == "custom":
        return Run(name, CUSTOM._replace(**fields))
    task, recipe = recipes.planned(name, **fields)
    label, *seconds = KNOWN.get(name, (name,))
    return Run(label, recipe, num_params(task.model), *seconds)


def runs_from_flags(values: flags.FlagValues = FLAGS) -> dict[str, Run]:
    """The chosen runs with the flags that are set in place of their fields."""
    own = dialect.given(values, ("num_params", "step_seconds"))
    if "step_seconds" in own:
        own["seconds_are"] = Run._field_defaults["seconds_are"]
    runs = {}
    for name in KNOWN if values.task == "all" else [values.task]:
        run = run_of(name, **dialect.recipe_fields(values))._replace(**own)
        known = run.recipe._asdict() | run._asdict()
        if missing := [f"--{f}" for f in NEEDED if known[f] in (None, ())]:
            raise app.UsageError(f"--task={name} has no values of its own: pass {missing}.")
        runs[name] = run
    return runs


def config_of(recipe: Recipe) -> config.RunConfig:
    """In the units of the learning rate itself: alpha is then the published one."""
    rate = recipe.learning_rates[0]
    found = config.config_of(recipe, config.Sizes(1, 1, 1, 1), seed=0)
    own = {"rates": rate * found.rates, "growth": rate * found.growth}
    return found._replace(**own, loads_per_epoch=None)


def records_of(name: str, run: Run, plans: Mapping, speeds: Sequence[str]) -> list[dict]:
    """One record per rule; speeds are those of a worker's link, in Gb/s."""
    found = []
    for rule, plan in plans.items():
        costs = {
            speed: local_opt.forecast(
                plan, num_params=run.num_params, num_workers=run.recipe.workers,
                step_seconds=run.step_seconds, gigabits_per_second=float(speed),
            )
            for speed in speeds
        }  # fmt: skip
        one = costs[speeds[0]]
        found.append({
            "task": name, "rule": rule, "plan": plan.rule, "digest": plan.digest(),
            "rounds": plan.rounds, "volume": plan.volume, "sent_bytes": one.sent_bytes,
            "h_least": int(plan.periods.min()), "h_most": int(plan.periods.max()),
            "compute_hours": one.compute_seconds / 3600,
            "total_hours": {speed: cost.total_seconds / 3600 for speed, cost in costs.items()},
        })  # fmt: skip
    return found


def table_of_rounds(run: Run, found: Sequence[dict]) -> str:
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
    sent, (every, qsr) = local_opt.sync_bytes(PARAMS, num_workers=WORKERS), HOURS
    speed = 8 * sent * STEPS / (3600 * split.communication) / 1e9
    return (
        f"ViT-B on {WORKERS} GPUs took {every} h with a sync every step and {qsr} h with "
        f"QSR (Gu et al. 2024): by\ncommunication_time, {split.compute:.2f} h of computation and "
        f"{split.communication:.2f} h of communication (every step), as a ring over\nlinks of "
        f"{speed:.1f} Gb/s. Reading the {qsr} h as constant H = {H_BASE} would give "
        f"{as_constant.communication:.2f} h.\n"
    )


def forecast_rounds(values: flags.FlagValues, folder: str) -> tuple[list[dict], str]:
    """Records and the tables of the rules; their picture goes into the folder."""
    rules, runs = dialect.names_of(values, "arms", SYNC_RULES), runs_from_flags(values)
    settings = dialect.given(values, ("arms", "gigabits"))
    settings["runs"] = {n: run._asdict() | run.recipe._asdict() for n, run in runs.items()}
    records.open_folder(folder, settings, overwrite=values.overwrite)
    found, texts, shown = [], [], {}
    for name, run in runs.items():
        made = config_of(run.recipe)
        plans = {rule: SYNC_RULES[rule].plan(made) for rule in rules}
        own = records_of(name, run, plans, values.gigabits)
        found += own
        texts.append(table_of_rounds(run, own))
        labelled = {SYNC_RULES[rule].label: plan for rule, plan in plans.items()}
        shown[run.label] = (made.rates, labelled)
    title = "Steps between syncs, known before the run"
    plots.periods(shown, os.path.join(folder, "periods.png"), title)
    return found, "\n".join([*texts, published_text()])


def speed_from_flags(values: flags.FlagValues = FLAGS) -> Machine | None:
    """The speeds that echoing is forecast for, given or measured now; None if it is not asked."""
    load, step = values.load_seconds, values.step_seconds
    if values.measure:
        if load is not None or step is not None:
            raise app.UsageError(
                "--measure is given with --load_seconds or --step_seconds: time them here, or "
                "pass both numbers."
            )
        task = TASKS[values.measure](values.data_dir)
        return measure(task, task.recipe._replace(**dialect.recipe_fields(values)))
    if load is None:
        return None
    if step is None:
        raise app.UsageError("--load_seconds is given alone: pass --step_seconds too.")
    for name, value in (("load_seconds", load), ("step_seconds", step)):
        if not (math.isfinite(value) and value > 0):
            raise app.UsageError(f"--{name} is {value:g}: pass a positive, finite number.")
    return Machine(step, load, label="given")


def echo_records(speed: Machine, depths: Sequence[int], total_steps=TOTAL_STEPS) -> list[dict]:
    """One record per policy and queue depth: what `echo_forecast` says of it."""
    found, pace = [], {"load_seconds": speed.load, "step_seconds": speed.step}
    for label in POLICIES:
        policy = policy_of(label, max(1.0, speed.ratio), total_steps)
        for depth in depths:
            cost = echo.echo_forecast(policy, depth=depth, **pace)
            known = {k: v for k, v in cost._asdict().items() if k != "plan"}
            found.append(pace | {
                "source": speed.label, "policy": label, "depth": depth, "total_steps": total_steps,
                "share": cost.plan.share, "most_uses": int(cost.plan.uses.max()),
                "seconds_per_load": cost.total_seconds / cost.loads,
            } | known)  # fmt: skip
    return found


def table_of_echoing(speed: Machine, found: Sequence[dict]) -> str:
    """Markdown: the free factor, and one row per policy and depth."""
    rows = [
        {
            "policy": r["policy"],
            "queue depth": r["depth"],
            "loads per step": f"{r['share']:.4f}",
            "most uses": r["most_uses"],
            "slowdown": f"{r['slowdown']:.3f}",
            "ms per step": f"{1e3 * r['seconds_per_step']:.4g}",
            "ms per load": f"{1e3 * r['seconds_per_load']:.4g}",
        }
        for r in found
    ]
    free = "the uses of a batch that are free" if speed.ratio > 1 else "echoing saves no time"
    return (
        f"{1e3 * speed.load:.4g} ms per load and {1e3 * speed.step:.4g} ms per step "
        f"({speed.label}): R = {speed.ratio:.3g}, {free}.\n"
        f"Simulated over {found[0]['total_steps']} steps of constant speed. Slowdown is the time "
        f"per step over that of a step that never waits.\n\n{markdown(rows)}\n"
    )


def forecast_echoing(speed: Machine, values, folder: str) -> tuple[list[dict], str]:
    """Records and the table of the echo policies."""
    depths = sorted(set(dialect.whole_numbers(values, "depths")))
    steps = values.total_steps or TOTAL_STEPS
    asked = ("load_seconds", "step_seconds", "measure", "units_per_step", "unit_size")
    settings = {name: values[name].value for name in asked}
    settings |= {"depths": depths, "total_steps": steps}
    records.open_folder(folder, settings, overwrite=values.overwrite)
    found = echo_records(speed, depths, steps)
    return found, table_of_echoing(speed, found)


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    if speed := speed_from_flags(values):
        folder = values.output_dir or "results/forecast_echo"
        found, text = forecast_echoing(speed, values, folder)
    else:
        folder = values.output_dir or "results/forecast"
        found, text = forecast_rounds(values, folder)
    records.write_lines(os.path.join(folder, records.METRICS), found)
    files.write_whole(os.path.join(folder, "table.md"), text)
    print(f"{text}\nWritten to {folder}: {', '.join(sorted(os.listdir(folder)))}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
