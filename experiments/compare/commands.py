"""The commands that train, from their parsed flags to their files: a study, and one run alone.

What is run is a `study.Study`. Both end with `SystemExit`: 128 + n if signal n stopped them, after
which the same flags go on, and `lock.BUSY` if another run has the folder.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags as absl_flags

from experiments import files, fingerprints, lock, progress
from experiments.compare import flags, runs, search, tiny
from experiments.compare.arms import Arm, arm_from_flags, arms_of, left_out, plans_of
from experiments.compare.cost import dry_run
from experiments.compare.runs import Trainer
from experiments.data.base import Recipe, Task
from experiments.distributed import agreement, devices, processes
from experiments.report import archive, page, records, statistics
from experiments.report.records import Run
from experiments.trainer import checkpoint, measure, pipeline
from ordering.echo import EchoPlan


def _begun(values: absl_flags.FlagValues, task: Task, recipe: Recipe, study) -> dict | None:
    """The settings of the folder; None after a dry run, which prints what the runs would cost.

    Processes that differ in flags, code or data end here.
    """
    data = "" if values.dry_run else fingerprints.data_hash(task)
    agreement.check(fingerprints.facts(values, data))
    if values.dry_run:
        return processes.say(dry_run(task, recipe, study, values))
    for text in left_out(study.arms.values(), task, recipe):  # before there is a folder
        processes.say(text)
    return {**flags.settings(values, recipe), "data": data}


def _trainer(study, task, recipe, folder, values, **more) -> Trainer:
    reads = None if values.input == "device" else values.input
    mesh, every = devices.mesh_of(recipe.run, recipe.workers), values.checkpoint_every
    given = {"folder": folder, "reads": reads, "mesh": mesh, "checkpoint_every": every}
    return Trainer(study, task, recipe, **given, **more)


def _stopped(values: absl_flags.FlagValues, signal: int, where: str = "") -> None:
    again = ", without --overwrite," if values.overwrite else ""
    processes.say(f"Stopped and saved{where}: the same command{again} continues.")
    sys.exit(128 + signal)


# A study.


def run_study(study, values: absl_flags.FlagValues) -> None:
    """Runs a study with parsed flags: a dry run, or the search and its report."""
    processes.start(values)
    task, recipe, study, chosen = resolved_study(study, values)
    if (settings := _begun(values, task, recipe, chosen)) is None:
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
            _stopped(values, stopped)
        if processes.is_first():
            _report(study, chosen, task, recipe, folder, rows, values)


def resolved_study(study, values) -> tuple[Task, Recipe, Any, Any]:
    """(task, recipe, the Study for them, the same with the arms and speeds of the flags)."""
    study.default(values)
    if values.tiny:
        tiny.shrink_comparison(values)
    task, recipe = flags.setting_from_flags(values)
    study = study.fit(study, task, recipe, values)
    if study.criterion.scalar == statistics.LOSS and task.optimum is not None:
        study = study._replace(criterion=study.criterion._replace(scalar=statistics.ABOVE))
    names = study.arms if values.arms is None else values.arms or [""]
    chosen = study._replace(arms=arms_of(names, study.arms, **study.usual))
    flags.check_used(values, recipe, (study.arms | chosen.arms).values(), study=study)
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
    trains = _trainer(study, task, recipe, folder, values, step_seconds=seconds)
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
    archive.note_command(folder, page.command_line())
    print(page.write(compared, study, folder, title))
    print(f"\nWritten to {folder}: metrics, tables, pictures, report.html")


def sync_plans(arms: Mapping[str, Arm], task: Task, recipe: Recipe) -> dict[str, Any]:
    """{arm: SyncPlan} for seed 0, of arms whose plan is known before the run."""
    plans = {name: plans_of(task, recipe, arm).sync for name, arm in arms.items()}
    return {name: plan for name, plan in plans.items() if plan is not None}


# One run alone.


def run_alone(study, values: absl_flags.FlagValues) -> None:
    """Trains with the parsed flags of `experiments.train`, from the last checkpoint on.

    Raises:
      SystemExit: with the reason, too, if the run diverged.
    """
    processes.start(values)
    task, recipe, study = resolved_run(study, values)
    if (settings := _begun(values, task, recipe, study)) is None:
        return
    this = Run("run", None, recipe.learning_rates[0], values.seed, "run")
    settings |= {**study.arms["run"].words, "seed": this.seed, "learning_rate": this.learning_rate}
    folder = flags.folder_of(values, study.name)
    with lock.held(folder):
        checkpoint.check_export(folder)
        done = [] if values.overwrite else records.read_folder(folder)
        trainer = _trainer(study, task, recipe, folder, values, alone=True)
        trainer.program_of(this.arm, this.speed)  # what is refused leaves no settings
        trainer.plans(*this[:4])
        records.open_folder(folder, settings, overwrite=values.overwrite)
        _finish(_train(trainer, this, folder, done, values), trainer, this, folder, values)


def resolved_run(study, values) -> tuple[Task, Recipe, Any]:
    """(task, recipe, the Study with the run as its one arm)."""
    task, recipe = flags.setting_from_flags(values)
    rates = recipe.learning_rates
    rate = rates[len(rates) // 2] if values.learning_rate is None else values.learning_rate
    recipe, arm = recipe._replace(learning_rates=(rate,)), arm_from_flags(values, "run")
    flags.check_used(values, recipe, [arm])
    return task, recipe, study._replace(arms={"run": arm})


def _label(trainer: Trainer) -> str:
    return " + ".join(row.label for row in trainer.study.arms["run"].rows)


def _train(trainer: Trainer, this: Run, folder, done, values):
    """How the run has ended, a `train.Outcome`."""
    step, total = checkpoint.newest(runs.checkpoints(folder)), trainer.plans(*this[:4]).total_steps
    kept = [r for r in done if r["step"] <= step] if step else []
    if left := total - step:
        text = f"{left:,} steps of {trainer.recipe.workers} workers"
        processes.say(f"Compiling {_label(trainer)}: {text}", file=sys.stderr)
    else:
        processes.say(f"The run in {folder} had come to its end, step {step:,}.")
    with (
        progress.bar(total=total, initial=step, unit="step") as bar,
        records.writing(folder, trackers=values.track, keep=kept, console=bar.write) as write,
    ):

        def on_record(record):
            write(record)
            progress.note(bar, record, examples=trainer.examples)

        return trainer.train(this, kept, on_record, lambda step: bar.update(step - bar.n))


def _finish(outcome, trainer: Trainer, this: Run, folder, values) -> None:
    """Writes the model and report of a run that has ended; raises SystemExit otherwise."""
    (built, _), plans = trainer.program_of(this.arm, this.speed), trainer.plans(*this[:4])
    # What was decided online is a plan too, as far as the run has come.
    echo = EchoPlan(list(outcome.at.decided), "measured") if plans.echo.online else plans.echo
    for name, plan in {"sync_plan": plans.sync, "echo_plan": echo}.items():
        if plan is not None and processes.is_first():
            plan.save(os.path.join(folder, f"{name}.json"))
    if not outcome.ended:
        _stopped(values, outcome.stopped, f" at step {outcome.at.step} of {plans.total_steps}")
    if outcome.diverged:
        sys.exit(outcome.diverged)
    checkpoint.export(folder, pipeline.on_host(measure.model_of(built, outcome.state.params)))
    rows = records.read_folder(folder)
    if processes.is_first():
        title = f"{values.task}, {built.sizes.workers} workers"
        print(page.write_run(rows, _label(trainer), folder, title))
        print(_sent(rows[-1]))
    processes.say(f"This took {progress.duration(outcome.seconds)}.")
    processes.say(f"Written to {folder}: report.html, metrics, plans, checkpoints, model")


def _sent(record) -> str:
    """What a worker has sent: sketches and compressed syncs are parts of an all-reduce."""
    rounds, sent = record["rounds"], record["allreduces"]
    order = " and for the order" * (sent > rounds)
    return (
        f"A worker has sent as much as {sent:,.0f} all-reduces of the parameters: in {rounds:,} "
        f"syncs{order}."
    )
