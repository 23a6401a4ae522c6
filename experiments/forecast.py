r"""How often do the published recipes synchronise under each rule, and how long would they take?

    python -m experiments.forecast                     # ViT-B and ResNet-152, 16 workers, seconds
    python -m experiments.forecast --task=imagenet_resnet152 --step_seconds=0.4 --gigabits=25,200
    python -m experiments.forecast --task=custom --num_params=7000000 --total_steps=20000 \
        --learning_rates=0.4 --growth=0.25 --h_base=2 --step_seconds=0.05
    python -m experiments.forecast --load_seconds=0.008 --step_seconds=0.002   # how much to echo?
    python -m experiments.forecast --measure=digits    # the same, at the speeds of a task here

Nothing is trained: a plan is known before the run. Writes metrics.jsonl, table.md and periods.png.
Expected: QSR takes 9711 rounds (10.375 %) on ViT-B and 24792 (39.731 %) on ResNet-152.

The rules, where papers leave a choice: 1/η and 1/η³ have the alpha, found by bisection, at
which their volume is QSR's; post-local SGD and SWAP switch after the share --switch of the steps
and use H_base before (SWAP) or after (post-local).

Assumptions: those of `local_opt.forecast` (no overlap, a ring as fast as one worker's link) and no
latency. ViT-B's seconds per step come from the published total times on 16 GPUs, and hold for
those only; ResNet-152's are an assumption. Pass --step_seconds.

With --load_seconds and --step_seconds, or with --measure, it answers another question instead: how
often a batch can be used again at no cost, and what each echo policy loses at each queue depth by
`ordering.echo.echo_forecast`. Writes metrics.jsonl, table.md and stalls.png. Of the flags above,
--total_steps alone serves there, and --units_per_step and --unit_size with --measure. Expected for
0.008 and 0.002: R = 4; at depth 1 Bernoulli coins with p = 1/R take 1.17 times as long, error
diffusion 1.000 times.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

from absl import app, flags

from experiments import flags as dialect
from experiments.bench_parts.echo import measure
from experiments.forecast_parts import echoes, rounds
from experiments.results import plan_plots, records
from experiments.studies.tables import SYNC_RULES
from experiments.tasks import TASKS

FLAGS = flags.FLAGS
# Gradient accumulation communicates as constant H does.
SHOWN = ["parallel", "constant", "post_local", "swap", "inverse", "qsr", "cubic"]
NEEDED = ("num_params", "total_steps", "learning_rates", "growth", "h_base", "step_seconds")


class Forecast(NamedTuple):
    """What a folder gets: settings, records, the table, and a picture by its name."""

    settings: dict
    records: list[dict]
    text: str
    picture: str
    draw: Callable[[str], None]


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    dialect.define(values, "setting")
    define = dialect.definer(values)
    real, text, names = flags.DEFINE_float, flags.DEFINE_string, flags.DEFINE_list
    define(text, "task", "all", "a setting to plan, custom, or all that are published")
    define(flags.DEFINE_integer, "num_params", None, "D, averaged at a sync; the model's if unset",
           lower_bound=1)  # fmt: skip
    define(names, "arms", SHOWN, f"rules, of {', '.join(SYNC_RULES)}")
    define(real, "switch", 0.5, "share of T at which post-local and SWAP switch", lower_bound=0,
           upper_bound=1)  # fmt: skip
    define(real, "step_seconds", None, "to compute a step on a worker; the published if unset")
    define(names, "gigabits", ["10", "25", "100", "400"], "Gb/s of a worker's link")
    define(real, "bytes_per_param", 4.0, "sent; 2 for bfloat16")
    define(real, "load_seconds", None, "to read a batch and move it to the device: forecasts "
           "echoing; needs --step_seconds")  # fmt: skip
    define(flags.DEFINE_enum, "measure", None, "task whose loads and steps are timed here: "
           "forecasts echoing", [*TASKS])  # fmt: skip
    define(text, "data_dir", None, "folder of the data of --measure")
    define(names, "depths", ["1", "2", "4", "16"], "queue depths, for echoing")
    define(text, "output_dir", None, "results/forecast if unset, or results/forecast_echo")
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")


def runs_from_flags(values: flags.FlagValues = FLAGS) -> dict[str, rounds.Run]:
    """The chosen runs with the flags that are set in place of their fields."""
    own = dialect.given(values, ("num_params", "step_seconds"))
    if "step_seconds" in own:
        own["seconds_are"] = rounds.Run._field_defaults["seconds_are"]
    runs = {}
    for name in rounds.KNOWN if values.task == "all" else [values.task]:
        run = rounds.run_of(name, **dialect.recipe_fields(values))._replace(**own)
        known = run.recipe._asdict() | run._asdict()
        if missing := [f"--{f}" for f in NEEDED if known[f] in (None, ())]:
            raise app.UsageError(f"--task={name} has no values of its own: pass {missing}.")
        runs[name] = run
    return runs


def forecast_rounds(values: flags.FlagValues) -> Forecast:
    """The tables and the picture of the rules."""
    rules, runs = dialect.names_of(values, "arms", SYNC_RULES), runs_from_flags(values)
    settings = dialect.given(values, ("arms", "switch", "gigabits", "bytes_per_param"))
    settings["runs"] = {n: run._asdict() | run.recipe._asdict() for n, run in runs.items()}
    found, texts, shown = [], [], {}
    for name, run in runs.items():
        plans = rounds.plans_of(run.recipe, rules, values.switch)
        own = rounds.records_of(name, run, plans, values.gigabits, values.bytes_per_param)
        found += own
        texts.append(rounds.table(run, own))
        labelled = {SYNC_RULES[rule].label: plan for rule, plan in plans.items()}
        shown[run.label] = (rounds.config_of(run.recipe).rates, labelled)
    text = "\n".join([*texts, rounds.published_text()])
    title = "Steps between syncs, known before the run"
    return Forecast(settings, found, text, "periods.png",
                    lambda path: plan_plots.period_panels(shown, path, title))  # fmt: skip


def speed_from_flags(values: flags.FlagValues = FLAGS) -> echoes.Speed | None:
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
    return echoes.Speed(load, step, "given")


def forecast_echoing(speed: echoes.Speed, values: flags.FlagValues) -> Forecast:
    """The table and picture of the echo policies."""
    depths = sorted(set(dialect.whole_numbers(values, "depths")))
    steps = values.total_steps or echoes.TOTAL_STEPS
    asked = ("load_seconds", "step_seconds", "measure", "units_per_step", "unit_size")
    settings = {name: values[name].value for name in asked}
    settings |= {"depths": depths, "total_steps": steps}
    found = echoes.records_of(speed, depths, total_steps=steps)
    return Forecast(settings, found, echoes.table(speed, found), "stalls.png",
                    lambda path: echoes.picture(speed, found, path))  # fmt: skip


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    if speed := speed_from_flags(values):
        folder, made = "results/forecast_echo", forecast_echoing(speed, values)
    else:
        folder, made = "results/forecast", forecast_rounds(values)
    folder = values.output_dir or folder
    records.open_folder(folder, made.settings, overwrite=values.overwrite)
    made.draw(os.path.join(folder, made.picture))
    records.write_lines(os.path.join(folder, records.METRICS), made.records)
    records.write_whole(os.path.join(folder, "table.md"), made.text)
    print(f"{made.text}\nWritten to {folder}: metrics.jsonl, table.md, {made.picture}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
