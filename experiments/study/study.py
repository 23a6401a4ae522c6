"""What a study is, and how it is run: its arms, its question, and one `main` for all of them.

A study is one file: a table of arms, a `Study`, and `study.main(STUDY)`.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from absl import app
from absl import flags as absl_flags

from experiments.cluster import agree, files, lock, processes
from experiments.cluster.digest import data_hash
from experiments.results import records, report, statistics
from experiments.results.statistics import Criterion
from experiments.study import flags, search, tables, trainer
from experiments.study.dry_run import assumed, dry_run
from experiments.tasks.base import Recipe, Task
from experiments.training.config import RunConfig


class Arm(NamedTuple):
    """What is compared.

    Fields:
      label: for people.
      order, sync, echo: words of ORDERS, SYNC_RULES and ECHO_POLICIES.
      rate_factor: of the learning rates that are tried.
    """

    label: str
    order: str = "rr+dealt"
    sync: str = "parallel"
    echo: str = "none"
    rate_factor: Callable[[RunConfig], float] = lambda config: 1


def arm_of(words: str, **usual: str) -> Arm:
    """The arm of a string of words; `usual` are its other decisions, where not an arm's own.

    Example:
      >>> arm_of("cd_grab+sketch64+qsr").label
      'CD-GraB, 64 numbers + QSR'
    """
    decisions = tables.decisions_of(words)
    label = " + ".join(tables.TABLES[kind][words].label for kind, words in decisions.items())
    return Arm(label, **{**usual, **decisions})


class Study(NamedTuple):
    """A comparison: what of, in which setting, and what is asked.

    Fields:
      name: of its folders; arms: by name, the baseline first; --arms takes others by their words.
      usual: of arms by words, the decisions that their words do not name.
      recipe: what --task is if unset, a name of RECIPES or TASKS.
      criterion: what chooses an arm's learning rate.
      columns, panels, sections: of the tables and pictures, as of `results.report.write`.
      speeds: R of slow input; () where it is not slow. paced: whether batches are used as often as
        R says, and runs are longer by it.
      sync_steps: of slow input: what a sync takes besides, in steps.
      finalists: learning rates that run with all seeds; None: all.
      seeds: what --seeds is if unset.
    """

    name: str
    arms: Mapping[str, Arm]
    recipe: str
    criterion: Criterion
    columns: Sequence
    panels: Sequence
    sections: Sequence[Callable] = ()
    speeds: tuple[float, ...] = ()
    paced: bool = True
    sync_steps: float = 0.0
    finalists: int | None = 2
    seeds: int = 5
    usual: Mapping[str, str] = {}


Fit = Callable[[Study, Task, Recipe, absl_flags.FlagValues], Study]


def define_flags(study: Study, values: absl_flags.FlagValues) -> None:
    """Defines the flags of a study: its setting, how it runs, and what is compared."""
    flags.define(values, "task", "setting", "run", "forecast", task=study.recipe)
    add, own = flags.definer(values), "; the study's own if unset"
    text = f"of {', '.join(study.arms)}, or any words, as cd_grab+sketch64+qsr{own}"
    add(absl_flags.DEFINE_list, "arms", None, text)
    text = "runs per arm at its best rates"
    add(absl_flags.DEFINE_integer, "seeds", study.seeds, text, lower_bound=1)
    text = "rates tried beyond a best one at the end of those given, at most so many at either end"
    add(absl_flags.DEFINE_integer, "widen", 0, text, lower_bound=0)
    if study.speeds:
        add(absl_flags.DEFINE_list, "speeds", None, "R, a load's time in steps" + own)
        text = "behind the delays; measured if unset; 0: no delay, for loads and steps alone"
        add(absl_flags.DEFINE_float, "step_seconds", None, text, lower_bound=0.0)


def main(
    study: Study,
    *,
    define: Callable[[absl_flags.FlagValues], None] = lambda values: None,
    fit: Fit = lambda study, task, recipe, values: study,
) -> None:
    """Runs a study from the command line, as `python -m` does.

    Args:
      define: flags of its own; fit: `(study, task, recipe, values) -> study`, what of it depends
        on the flags.
    """
    define_flags(study, absl_flags.FLAGS)
    define(absl_flags.FLAGS)
    app.run(lambda argv: run(study, absl_flags.FLAGS, fit=fit))


def run(
    study: Study,
    values: absl_flags.FlagValues,
    *,
    fit: Fit = lambda study, task, recipe, values: study,
) -> None:
    """Runs a study with parsed flags: a dry run, or the search and its report.

    Raises:
      SystemExit: 128 + n if signal n stopped it; the same flags go on. `lock.BUSY` if another run
        has the folder.
      ValueError, absl.app.UsageError: for flags that do not fit.
    """
    processes.start(values)
    task, recipe = flags.setting_from_flags(values)
    study = fit(study, task, recipe, values)
    chosen = study._replace(arms=chosen_arms(study, values), speeds=_speeds(study, values))
    if values.dry_run:
        return processes.say(dry_run(task, recipe, chosen, assumed(values)))
    agree.check_data(task)
    for text in trainer.left_out(chosen, task, recipe):
        processes.say(text)
    folder = values.output_dir or os.path.join("results", f"{study.name}_{values.task}")
    with lock.held(folder):
        _carry_out(study, chosen, task, recipe, folder, values)


def _carry_out(study, chosen, task, recipe, folder, values):
    settings = {**flags.settings(values, recipe), "data": data_hash(task)}
    done = open_folder(folder, settings, values)
    found, stopped = _search(chosen, task, recipe, folder, done, settings, values)
    if stopped:
        processes.say(f"Stopped and saved: {go_on(values)} goes on.")
        sys.exit(128 + stopped)
    if processes.is_first():
        arms = arms_of(study, [r["arm"] for r in found])
        labels = {name: arm.label for name, arm in arms.items()}
        plans = {} if chosen.speeds else sync_plans(arms, task, recipe)
        for name, plan in plans.items():
            plan.save(os.path.join(folder, f"plan_{name}.json"))
        title = f"{values.task}, {recipe.workers} workers"
        compared = statistics.compare(found, labels, study.criterion, plans)
        print(report.write(
            compared, folder, title=title, columns=study.columns, panels=study.panels,
            sections=study.sections,
        ))  # fmt: skip
        print(f"\nWritten to {folder}: metrics, tables, pictures, report.html")


def _search(study, task, recipe, folder, done, settings, values):
    mesh = processes.mesh_of(recipe.run, recipe.workers)
    seconds = 0.0
    if study.speeds:
        seconds = values.step_seconds
        if seconds is None:
            seconds = known_step_seconds(study, task, recipe, mesh, folder, done)
        processes.say(f"a step takes {1e3 * seconds:.2f} ms; a load R times that")
    reads = None if values.input == "device" else values.input
    trains = trainer.Trainer(
        study, task, recipe, folder=folder, reads=reads, mesh=mesh, step_seconds=seconds,
        checkpoint_every=values.checkpoint_every, about=settings,
    )  # fmt: skip
    trainer.forget_ended(folder, done)
    kept = trainer.before_checkpoints(folder, done)
    with records.writing(folder, trackers=values.track, keep=kept) as write:
        return search.search(
            study, trains, seeds=values.seeds, widen=values.widen, done=kept, on_record=write,
        )  # fmt: skip


def known_step_seconds(study, task, recipe, mesh, folder, done) -> float:
    """t_step of this folder's runs: measured once, so that all of them have the same delays."""
    path = os.path.join(folder, "step.json")
    known = processes.of_first(files.read_json(path) if done else None)
    if known is None:
        seconds = trainer.step_seconds(study, task, recipe, mesh)
        known = processes.of_first({"step_seconds": seconds})
        files.write_json(path, known)
    return known["step_seconds"]


def chosen_arms(study, values) -> dict[str, Arm]:
    for name in values.arms or ():
        try:
            arms_of(study, [name])
        except ValueError as error:
            own = ", ".join(study.arms)
            raise app.UsageError(f"--arms has {name!r}, none of {own}, and {error}") from error
    return arms_of(study, values.arms or study.arms)


def arms_of(study: Study, names: Iterable[str]) -> dict[str, Arm]:
    """The arms of these names, those of the study first and in its order, others by their words."""
    names = dict.fromkeys(names)
    others = {name: arm_of(name, **study.usual) for name in names if name not in study.arms}
    return {name: arm for name, arm in study.arms.items() if name in names} | others


def _speeds(study, values) -> tuple[float, ...]:
    if not study.speeds or "speeds" not in values or not values.speeds:
        return study.speeds
    speeds = tuple(float(speed) for speed in values.speeds)
    if not all(0 < speed < float("inf") for speed in speeds):
        raise app.UsageError(f"--speeds is {values.speeds}: all must be positive and finite.")
    return speeds


def sync_plans(arms: Mapping[str, Arm], task: Task, recipe: Recipe) -> dict:
    """{arm: SyncPlan} of seed 0, where it is known before the run."""
    found = {name: trainer.plans_of(task, recipe, arm).sync for name, arm in arms.items()}
    return {name: plan for name, plan in found.items() if plan is not None}


def open_folder(folder: str, settings: Mapping, values: absl_flags.FlagValues) -> list[dict]:
    """`records.open_folder`; with --overwrite, earlier checkpoints go too."""
    if values.overwrite and processes.is_first():
        shutil.rmtree(os.path.join(folder, "checkpoints"), ignore_errors=True)
    return records.open_folder(folder, settings, overwrite=values.overwrite)


def go_on(values: absl_flags.FlagValues) -> str:
    return "the same command" + (", without --overwrite," if values.overwrite else "")
