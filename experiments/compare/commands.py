"""The command of a study, from its parsed flags to its files.

What is run is a `study.Study`. It ends with `SystemExit` as `runs.run_alone` does.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags as absl_flags

from experiments import files, lock, progress
from experiments.compare import flags, runs, search, tiny
from experiments.compare.arms import Arm, arms_of
from experiments.data.base import Recipe, Task
from experiments.distributed import processes
from experiments.report import archive, page, records, statistics
from experiments.trainer.config import plans_of
from syncopate.refusals import UserError


def run_study(study, values: absl_flags.FlagValues) -> None:
    """Runs a study with parsed flags: a dry run, or the search and its report."""
    processes.start(values)
    task, recipe, study, chosen = resolved_study(study, values)
    if (settings := runs.begun(values, task, recipe, chosen)) is None:
        return
    if len(chosen.arms) == 1 and (base := next(iter(study.arms))) not in chosen.arms:
        processes.say(f"{base} is compared too, as the baseline of {values.arms[0]}.")
        chosen = chosen._replace(arms=arms_of([base, *values.arms], study.arms, **study.usual))
    folder = flags.folder_of(values, study.name)
    settings |= {"study": study.name, "sync_steps": chosen.sync_steps}
    with lock.held(folder):
        done = [] if values.overwrite else records.read_folder(folder)
        records.open_folder(folder, settings, overwrite=values.overwrite)
        rows, stopped = _search(chosen, task, recipe, folder, done, values)
        if stopped:
            runs.stop(values, stopped)
        if processes.is_first():
            _report(study, chosen, task, recipe, folder, rows, values)


def resolved_study(study, values) -> tuple[Task, Recipe, Any, Any]:
    """(task, recipe, the Study for them, the same with the arms and speeds of the flags)."""
    study.default(values)
    if values.tiny:
        tiny.shrink_comparison(values)
    task, recipe = flags.setting_from_flags(values)
    study = flags.with_metrics(study.fit(study, task, recipe, values), values)
    if study.criterion.scalar == statistics.LOSS and task.optimum is not None:
        study = study._replace(criterion=study.criterion._replace(scalar=statistics.ABOVE))
    names = study.arms if values.arms is None else values.arms or [""]
    chosen = study._replace(arms=arms_of(names, study.arms, **study.usual))
    flags.check_shards(recipe.shards, chosen.arms.values())
    if study.speeds and study.paced and values["echo_factor"].present:
        raise UserError(
            f"--echo_factor is {values.echo_factor}: here a batch is used as often as a load takes "
            "steps, R of --speeds. Leave it out."
        )
    if study.speeds and "speeds" in values:
        chosen = chosen._replace(speeds=tuple(values.speeds))
    return task, recipe, study, chosen


def _search(study, task, recipe, folder, done, values) -> tuple[list[dict], int]:
    seconds = 0.0
    if study.speeds:
        seconds = values.step_seconds
        if seconds is None:
            processes.say("Measuring the time of a step", file=sys.stderr)
            seconds = runs.step_seconds(study, task, recipe, folder, done)
        processes.say(f"a step takes {1e3 * seconds:.2f} ms; a load R times that")
    trains = runs.trainer_of(study, task, recipe, folder, values, step_seconds=seconds)
    kept = runs.kept_records(folder, done)
    processes.say(f"Compiling {len(study.arms)} arms", file=sys.stderr)
    with records.writing(folder, trackers=values.track, keep=kept) as write:
        result = search.search(study, trains, seeds=values.seeds, done=kept, on_record=write)
    if trains.seconds:
        processes.say(f"The runs took {progress.duration(trains.seconds)}.", file=sys.stderr)
    return result


def _report(study, chosen, task, recipe, folder, rows, values) -> None:
    arms = arms_of([r["arm"] for r in rows], study.arms, **study.usual)
    labels = {name: arm.label for name, arm in arms.items()}
    plans = {} if chosen.speeds else sync_plans(arms, task, recipe)
    for name, plan in plans.items():
        plan.save(os.path.join(folder, f"plan_{name}.json"))
    title = f"{values.task}, {recipe.workers} workers"
    compared = statistics.compare(statistics.data_of(rows), labels, study.criterion, plans)
    files.write_json(os.path.join(folder, archive.COMPARISON), archive.describe(compared))
    print(page.write(compared, study, folder, title))
    print(f"\nWritten to {folder}: metrics, tables, pictures, report.html")


def sync_plans(arms: Mapping[str, Arm], task: Task, recipe: Recipe) -> dict[str, Any]:
    """{arm: SyncPlan} for seed 0, of arms whose plan is known before the run."""
    plans = {name: plans_of(task, recipe, arm).sync for name, arm in arms.items()}
    return {name: plan for name, plan in plans.items() if plan is not None}
