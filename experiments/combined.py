r"""Do the three decisions help each other? The factorial of order x sync x echo on one task.

    python -m experiments.combined  # digits, which are bundled: a minute
    python -m experiments.combined --task=shakespeare_cosine --data_dir=DIR --seeds=3

Eight arms: --order against --baseline (D-RR), --sync against parallel, --echo against none. Every
arm trains once at each learning rate, and with the remaining seeds at its best two. The best rate
has the lowest mean of the last train loss over seeds, or with --target=LOSS (above the optimum, if
that is known) the fewest mean steps to it. All arms take the same number of steps; with equal seeds
they start from the same parameters. Metrics, table*.md, comparison.png, effects.png and report.html
are written to --output_dir. The same command, given again, continues where it was stopped.
--arms=rr+constant,cd_grab+constant compares any other arms, without effects.

Expected: docs/results/combined.md holds the tables of two tasks, with their commands.

Seconds are those of the computation: simulated workers have no network, and data in memory no slow
input. --load_steps and --sync_steps set a price for loads and syncs, in steps of computation. With
--step_seconds the best runs are repeated with loads and syncs of that duration.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from absl import flags as absl_flags

from experiments import entry
from experiments.compare import flags, study
from experiments.compare.arms import Arm, arm_of, row_of
from experiments.compare.rows import ECHO_POLICIES, TABLES
from experiments.compare.study import Study
from experiments.data.base import SECONDS, STEPS
from experiments.data.metrics import METRICS
from experiments.report import plots, statistics, tables
from experiments.report.plots import Panel
from experiments.report.statistics import Comparison, Criterion, column, frame, interval, ratio_of
from experiments.report.tables import Column
from syncopate.refusals import UserError

FACTORS = tuple(TABLES)  # fields of the records
COSTS = {"step": "steps", "loads": "loads", "allreduces": "all-reduces", "seconds": "seconds"}
LEVELS = ("baseline", *TABLES)  # flags


def arms_of(first: Arm, second: Arm) -> dict[str, Arm]:
    """The eight combinations of two arms' decisions; the first arm's own decisions come first."""
    levels = zip(first.words.values(), second.words.values(), strict=True)
    return {name: arm_of(name) for name in map("+".join, itertools.product(*levels))}


class Response(NamedTuple):
    """A quantity with its effects, as factors or as differences."""

    label: str
    relative: bool
    effects: dict[str, tuple[float, float]]


def effects(values: np.ndarray) -> dict[str, tuple[float, float]]:
    """Main effects and interactions of the two-level factorial, paired by seed.

    effect(S) = 1/4 sum over cells of y times the product over S of (-1 at the first level, +1 at
    the second): for one factor the mean change from the first level to the second; for two, half
    the difference that the second makes to the change by the first.

    Args:
      values: float[2, 2, 2, seeds], an axis per factor.

    Returns:
      {effect: mean and half width of the 95 % interval over seeds}, of single factors first.
    """
    result, levels = {}, 2 * np.indices((2, 2, 2)) - 1.0  # of every factor in every cell
    for size in (1, 2, 3):
        for axes in itertools.combinations(range(3), size):
            per_seed = np.tensordot(levels[list(axes)].prod(axis=0), values, 3) / 4
            result[" × ".join(FACTORS[a] for a in axes)] = interval(per_seed)
    return result


def effects_of(comparison: Comparison) -> list[Response]:
    """The effects on the last objective and test metric, and on every cost to the target."""
    scalar, metric = comparison.criterion.scalar, statistics.metric_of(comparison)
    accuracy, speed = metric == "accuracy", comparison.speeds[0]
    table = frame(comparison, speed=speed)

    def response(label, name, relative=True, scale=1):
        y = np.array([scale * column(table, chosen.arm, name) for chosen in comparison.at(speed)])
        y = np.log(np.maximum(y, 1e-12)) if relative else y
        return Response(label, relative, effects(y.reshape(2, 2, 2, -1)))

    test = f"{METRICS[metric].label} / points" if accuracy else METRICS[metric].label
    return [
        response(f"last {tables.name_of(scalar)}", scalar),
        response(test, f"test/{metric}", not accuracy, 100 if accuracy else 1),
        *(response(f"{text} to the target", f"to {name}") for name, text in COSTS.items()),
    ]


def no_effects(comparison: Comparison) -> str:
    """Why there are no effects; "" if all arms reach the target with the same seeds."""
    arms = comparison.at(comparison.speeds[0])
    ends = [chosen.runs.iloc[-1] for chosen in arms if len(chosen.runs)]
    levels = [tuple(end[factor] for factor in FACTORS) for end in ends]
    factors = [[*dict.fromkeys(of)] for of in zip(*levels, strict=True)]
    whole = [len(of) for of in factors] == [2, 2, 2] and [*itertools.product(*factors)] == levels
    if not whole or len({tuple(chosen.runs.seed.unique()) for chosen in arms}) > 1:
        return "they are of the eight arms of two levels, with the same seeds at their best rates"
    if lost := tables.late(comparison):
        return f"{', '.join(lost)} never arrive with some seed"
    names = [comparison.criterion.scalar, f"test/{statistics.metric_of(comparison)}"]
    values = frame(comparison, speed=comparison.speeds[0]).reindex(columns=names)
    return (
        "" if np.isfinite(values).all(axis=None) else "some last losses or metrics are not finite"
    )


def show_effect(mean: float, half: float, relative: bool) -> str:
    """As "× 0.88 (0.86 to 0.90)", or a difference; bold if the interval excludes no effect."""
    low, high = mean - half, mean + half
    form = (lambda v: f"{math.exp(v):.2f}") if relative else (lambda v: f"{v:+.2f}")
    text = ("× " if relative else "") + form(mean)
    if not math.isnan(low):
        text += f" ({form(low)} to {form(high)})"
    return f"**{text}**" if low * high > 0 else text


def effects_table(comparison: Comparison) -> tuple[str, str]:
    """Section: a row per effect, a column per response."""
    if why := no_effects(comparison):
        return "table_effects.md", f"No effects: {why}."
    responses = effects_of(comparison)
    rows = [
        {"effect of": name}
        | {r.label: show_effect(*r.effects[name], r.relative) for r in responses}
        for name in responses[0].effects
    ]
    text = (
        "Effects from the first level to the second, with 95 % intervals; × marks factors, and "
        "bold excludes no effect."
    )
    return "table_effects.md", f"{text}\n\n{tables.markdown(rows)}"


def effects_picture(comparison: Comparison) -> tuple[str, Callable | str]:
    """Section: a panel per response, a row per effect with its interval."""
    if no_effects(comparison):
        return "effects.png", ""
    return "effects.png", functools.partial(plots.effects, effects_of(comparison))


def modelled_table(comparison: Comparison, machines: Sequence) -> tuple[str, str]:
    """Section: modelled speed-up to the target over the first arm, paired by seed."""
    arms = comparison.at(comparison.speeds[0])
    rows = [{"arm": chosen.label} for chosen in arms]
    for machine in machines:
        times = [_modelled(comparison, chosen, machine) for chosen in arms]
        for row, taken in zip(rows, times, strict=True):
            row[machine.label] = _faster(times[0], taken)
    text = "Modelled speed-up to the target over the first arm."
    return "table_modelled.md", f"{text}\n\n{tables.markdown(rows)}"


def _faster(before, taken):
    if not (len(before) and len(taken)) or np.isinf([*before, *taken]).any():
        return "-"
    return tables.times(ratio_of(taken, before), exact=True)


def _modelled(comparison, chosen, machine):
    """The modelled time of each seed to the target, inf where it never arrives."""
    from experiments.compare import cost

    steps = column(frame(comparison, speed=chosen.speed), chosen.arm, "to step")
    runs = chosen.runs[chosen.runs.step <= chosen.runs.seed.map(steps)]
    times = {
        seed: cost.recorded_run_time(run.to_dict("records"), machine)
        for seed, run in runs.groupby("seed")
    }
    return steps.index.map(times).to_series(steps.index).where(steps < math.inf, math.inf)


def define_flags(values: absl_flags.FlagValues) -> None:
    flags.define(values, "decisions", order="cd_grab", sync="qsr", echo="diffusion+cosine")
    with flags.shown(values, f"{entry.GROUP}the decisions"):
        text = "words of the first order; rr+dealt where --order is dealt"
        absl_flags.DEFINE_string("baseline", "rr", text, values)
    with flags.shown(values, f"{entry.GROUP}the prices"):
        text = "modelled: a load, in steps of computation"
        flags.define_value(values, STEPS, "load_steps", 4.0, text)
        text = "modelled: an all-reduce, in the same unit"
        flags.define_value(values, STEPS, "sync_steps", 2.0, text)
        text = "if not 0: loads and syncs are delayed, by their prices times this"
        flags.define_value(values, SECONDS, "step_seconds", 0.0, text)


def fit(study, task, recipe, values):
    """Takes the levels, prices and target from the flags."""
    from experiments.compare import cost

    criterion = study.criterion
    if recipe.target is not None:
        criterion = criterion._replace(when="target", target=recipe.target)
    # The first level of every factor is that of usual data-parallel training.
    try:
        first = Arm(order=values.baseline)
    except UserError as error:
        raise UserError(f"--baseline is {values.baseline}: {error}") from error
    second = flags.arm_from_flags(values)
    if same := {*first.words.values()} & {*second.words.values()}:
        raise UserError(f"--order, --sync, --echo name {same}: that is the first level.")
    if second.rows[2].online:
        plans = [name for name in ECHO_POLICIES if not row_of("echo", name).online]
        raise UserError(
            f"--echo is {values.echo}, which follows slow input, and data on the devices are not "
            f"slow: choose one of {', '.join(plans[1:])}."
        )
    arms, given = arms_of(first, second), [name for name in LEVELS if values[name].present]
    if values.arms and given and not {*arms} & {*values.arms}:
        raise UserError(
            f"--{given[0]} is {values[given[0]].value} and is a level of no --arms: leave it out, "
            "or leave --arms out for the eight arms of two levels."
        )
    machines = cost.machines(values.load_steps, values.sync_steps)
    sections = (*study.sections, functools.partial(modelled_table, machines=machines))
    slow = {"speeds": (values.load_steps,), "sync_steps": values.sync_steps}
    return study._replace(
        arms=arms,
        criterion=criterion,
        sections=sections,
        paced=False,
        **(slow if values.step_seconds else {}),
    )


STUDY = Study(
    "combined",
    arms_of(Arm(order="rr"), Arm(order="cd_grab", sync="qsr", echo="diffusion+cosine")),
    recipe="digits_cosine",
    criterion=Criterion("train/loss"),
    columns=(
        tables.arm("arm"),
        tables.rate("best lr"),
        Column("last {objective}", "{:.3g}", "objective"),
        Column("{metric}", "{:.4g}", "metric"),
        Column("steps to the target", "{:.0f}", "to step"),
        Column("loads", "{:.0f}", "to loads"),
        Column("sent, in all-reduces", "{:.0f}", "to allreduces"),
        Column("seconds", "{:.2f}", "to seconds"),
    ),
    panels=(Panel("objective", (*COSTS,)), Panel("metric", (*COSTS,))),
    sections=(tables.target_line, effects_table, effects_picture),
    define=define_flags,
    fit=fit,
    question=__doc__,
)


if __name__ == "__main__":
    study.main(STUDY)
