"""Studies: comparisons of arms, and the `main` that runs any of them.

A study is one file: a table of arms, a `Study`, and `study.main(STUDY)`.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from absl import flags as absl_flags

from experiments.cluster import agree, entry, lock, processes
from experiments.cluster.agree import data_hash
from experiments.results import records, report, statistics
from experiments.results.statistics import Criterion
from experiments.study import flags, search, trainer
from experiments.study.cost import assumed, dry_run
from experiments.study.tables import Arm, arm_of, left_out, plans_of
from experiments.tasks.base import COUNT, FROM_ZERO, SECONDS, SLOWNESS, Recipe, Task
from experiments.training.run import told
from syncopate.refusals import UserError


class Study(NamedTuple):
    """A comparison: its arms, its setting and its question."""

    name: str  # of its folders
    arms: Mapping[str, Arm]  # by name, the baseline first; --arms takes others by their words
    recipe: str  # what --task is if unset, a name of RECIPES or TASKS
    criterion: Criterion  # what chooses an arm's rate; a train loss less its minimum, if known
    columns: Sequence  # these three: as of `results.report.write`
    panels: Sequence
    sections: Sequence[Callable] = ()
    define: Callable[[absl_flags.FlagValues], None] = lambda values: None  # its own flags
    default: Callable[[absl_flags.FlagValues], None] = lambda values: None  # sets unset flags
    fit: Callable = lambda study, task, recipe, values: study  # adapts it to the flags
    speeds: tuple[float, ...] = ()  # R of slow input; () if input is not slow
    paced: bool = True  # batches are used as often as R says, and runs are longer by it
    sync_steps: float = 0.0  # with slow input: the delay of a sync, in steps
    finalists: int | None = 2  # learning rates that run with all seeds; None: all
    seeds: int = 5  # what --seeds is if unset
    usual: Mapping[str, str] = {}  # decisions that the words of an arm leave open


def define_flags(study: Study, values: absl_flags.FlagValues) -> None:
    """Defines the flags of a study: its setting, how it runs, and what is compared."""
    flags.define(values, "task", "setting", "run", "forecast", task=study.recipe)
    add, own = flags.definer(values), "; the study's own if unset"
    text = f"of {', '.join(study.arms)}, or any words, as cd_grab+sketch64+qsr{own}"
    add(absl_flags.DEFINE_list, "arms", None, text)
    text = "runs per arm at its best rates"
    add(COUNT, "seeds", study.seeds, text)
    text = "rates tried beyond a best one at the end of those given, at most so many at either end"
    add(FROM_ZERO, "widen", 0, text)
    if study.speeds:
        add([SLOWNESS], "speeds", [*study.speeds], "R, a load's time in steps")
        text = "behind the delays; measured if unset; 0: no delay, for loads and steps alone"
        add(SECONDS, "step_seconds", None, text)
    study.define(values)


def main(study: Study) -> None:
    """Runs a study from the command line, as `python -m` does."""
    define = functools.partial(define_flags, study)
    entry.main(define, functools.partial(run, study))


def run(study: Study, values: absl_flags.FlagValues) -> None:
    """Runs a study with parsed flags: a dry run, or the search and its report.

    Raises:
      SystemExit: 128 + n if signal n stopped it; the same flags go on. `lock.BUSY` if another run
        has the folder.
      ValueError: for flags that do not fit.
    """
    processes.start(values)
    study.default(values)
    task, recipe = flags.setting_from_flags(values)
    study = study.fit(study, task, recipe, values)
    if study.criterion.scalar == statistics.LOSS and task.optimum is not None:
        study = study._replace(criterion=study.criterion._replace(scalar=statistics.ABOVE))
    asked = study.arms if values.arms is None else values.arms or [""]
    chosen = study._replace(arms=arms_of(study, asked))
    flags.check_used(values, recipe, (study.arms | chosen.arms).values(), study=study)
    if study.speeds and "speeds" in values:
        chosen = chosen._replace(speeds=tuple(values.speeds))
    if values.dry_run:
        return processes.say(dry_run(task, recipe, chosen, assumed(values)))
    agree.check_data(task)
    for text in left_out(chosen.arms.values(), task, recipe):
        processes.say(text)
    folder = values.output_dir or os.path.join("results", f"{study.name}_{values.task}")
    with lock.held(folder):
        _carry_out(study, chosen, task, recipe, folder, values)


def _carry_out(study, chosen, task, recipe, folder, values):
    settings = {**flags.settings(values, recipe), "data": data_hash(task)}
    settings |= {"study": study.name, "sync_steps": chosen.sync_steps}
    done = [] if values.overwrite else records.found(folder)
    records.open_folder(folder, settings, overwrite=values.overwrite)
    found, stopped = _search(chosen, task, recipe, folder, done, settings, values)
    if stopped:
        processes.say(f"Stopped and saved: {go_on(values)} continues.")
        sys.exit(128 + stopped)
    if processes.is_first():
        arms = arms_of(study, [r["arm"] for r in found])
        labels = {name: arm.label for name, arm in arms.items()}
        plans = {} if chosen.speeds else sync_plans(arms, task, recipe)
        for name, plan in plans.items():
            plan.save(os.path.join(folder, f"plan_{name}.json"))
        title = f"{values.task}, {recipe.workers} workers"
        compared = statistics.compare(found, labels, study.criterion, plans)
        print(report.write(compared, study, folder, title))
        print(f"\nWritten to {folder}: metrics, tables, pictures, report.html")


def _search(study, task, recipe, folder, done, settings, values):
    mesh = processes.mesh_of(recipe.run, recipe.workers)
    seconds = 0.0
    if study.speeds:
        seconds = values.step_seconds
        if seconds is None:
            processes.say("Measuring the time of a step", file=sys.stderr)
            seconds = trainer.step_seconds(study, task, recipe, mesh, folder, done)
        processes.say(f"a step takes {1e3 * seconds:.2f} ms; a load R times that")
    reads = None if values.input == "device" else values.input
    trains = trainer.Trainer(
        study, task, recipe, folder=folder, reads=reads, mesh=mesh, step_seconds=seconds,
        checkpoint_every=values.checkpoint_every, about=settings,
    )  # fmt: skip
    kept = trainer.kept_records(folder, done)
    processes.say(f"Compiling {len(study.arms)} arms", file=sys.stderr)
    with records.writing(folder, trackers=values.track, keep=kept) as write:
        found = search.search(
            study, trains, seeds=values.seeds, widen=values.widen, done=kept, on_record=write,
        )  # fmt: skip
    if trains.seconds:
        processes.say(f"The runs took {told(trains.seconds)}.", file=sys.stderr)
    return found


def arms_of(study: Study, names: Iterable[str]) -> dict[str, Arm]:
    """The arms of these names: the study's own first, in its order, then others by their words."""
    names, others = dict.fromkeys(names), {}
    for name in names:
        if name not in study.arms:
            try:
                others[name] = arm_of(name, **study.usual)
            except UserError as error:
                own = ", ".join(study.arms)
                raise UserError(f"--arms has {name!r}, none of {own}: {error}") from error
    return {name: arm for name, arm in study.arms.items() if name in names} | others


def sync_plans(arms: Mapping[str, Arm], task: Task, recipe: Recipe) -> dict:
    """{arm: SyncPlan} for seed 0, of arms whose plan is known before the run."""
    found = {name: plans_of(task, recipe, arm).sync for name, arm in arms.items()}
    return {name: plan for name, plan in found.items() if plan is not None}


def go_on(values: absl_flags.FlagValues) -> str:
    return "the same command" + (", without --overwrite," if values.overwrite else "")
