"""One run with the parsed flags of `experiments.train`: its folder, its program and its files."""

import functools
import os
import sys

from absl import flags as absl_flags

from experiments import fingerprints, lock, progress
from experiments.compare import flags
from experiments.compare.arms import Arm, arm_from_flags
from experiments.compare.cost import dry_run, traffic
from experiments.compare.search import go_on
from experiments.compare.study import Study
from experiments.data.base import Recipe, Task
from experiments.distributed import agreement, devices, processes
from experiments.report import page, records
from experiments.trainer import checkpoint, config, measure, pipeline, program, resize
from experiments.trainer import run as training_run
from experiments.trainer.step import worker_of
from ordering.echo import EchoPlan


def run(values: absl_flags.FlagValues) -> None:
    """Trains with parsed flags, from the last checkpoint of --output_dir on.

    Raises:
      SystemExit: 128 + n if signal n stopped it; with the reason if it diverged; `lock.BUSY` if
        another run has the folder.
    """
    processes.start(values)
    task, recipe, arm = resolved(values)
    data = "" if values.dry_run else fingerprints.data_hash(task)
    agreement.check(fingerprints.facts(values, data))
    if values.dry_run:
        only = Study("train", {"run": arm}, values.task, None, (), ())
        return processes.say(dry_run(task, recipe, only, values))
    config.sizes_of(task, recipe, deals=arm.rows[0].deals)  # before there is a folder
    folder = flags.folder_of(values, "train")
    settings = {**flags.settings(values, recipe), **arm.words, "data": data}
    settings |= {"seed": values.seed, "learning_rate": recipe.learning_rates[0]}
    with lock.held(folder):
        done, saved = [], None
        if not values.overwrite:
            done = records.read_folder(folder)
            saved = resize.newest(folder, settings, values.elastic, [r["step"] for r in done])
        checkpoint.check_export(folder)
        built, plans, begun = _prepared(task, recipe, arm.rows, values, saved)
        outcome = _train(task, recipe, arm, built, plans, values, folder, settings, begun, done)
        _finish(outcome, built, plans, folder, values, " + ".join(row.label for row in arm.rows))


def resolved(values: absl_flags.FlagValues) -> tuple[Task, Recipe, Arm]:
    """The task, recipe and arm of parsed flags."""
    task, recipe = flags.setting_from_flags(values)
    rates = recipe.learning_rates
    rate = rates[len(rates) // 2] if values.learning_rate is None else values.learning_rate
    recipe = recipe._replace(learning_rates=(rate,))
    arm = arm_from_flags(values, "run")
    flags.check_used(values, recipe, [arm])
    return task, recipe, arm


def _prepared(task, recipe, rows, values, saved):
    """(program, plans, where the run goes on if with other workers)."""
    order, rule, policy = rows
    sizes = resize.sizes_of(task, recipe, saved, deals=order.deals)
    setting = config.config_of(recipe, sizes, seed=values.seed)
    plans = config.plans_of(setting, rule, policy, rate=recipe.learning_rates[0])
    begun, units = None, None
    if saved:
        of_sizes = functools.partial(
            worker_of, task, recipe, order, rule.rounds, in_turn=recipe.run == "turns"
        )
        begun, units = resize.begun(
            saved,
            of_sizes,
            plans,
            sizes,
            policy=values.elastic,
            seed=values.seed,
            traffic=functools.partial(traffic, task, order, rule),
        )
    reads = None if values.input == "device" else values.input
    built = program.build(
        task,
        recipe,
        order,
        rule.rounds,
        sizes=sizes,
        units=units,
        mesh=devices.mesh_of(recipe.run, recipe.workers),
        reads="thread" if policy.online and reads is None else reads,
    )
    if text := config.left_out(task, sizes, deals=order.deals):
        processes.say(text)
    return built, plans, begun


def _train(task, recipe, arm, built, plans, values, folder, settings, begun, done):
    records.open_folder(folder, settings, overwrite=values.overwrite)
    checkpoints = os.path.join(folder, "checkpoints")
    at = checkpoint.newest(checkpoints)
    kept = [r for r in done if r["step"] <= at] if at else []
    fixed = {name: settings[name] for name in ("order", "sync", "echo", "seed", "learning_rate")}
    identity = {"study": "train", "arm": "run", "speed": None, "phase": "run", **fixed}
    saving = training_run.Saving(checkpoints, values.checkpoint_every, at_end=True, about=settings)
    if begun is None:  # decided by `resize.newest`; with --overwrite there is none
        begun = checkpoint.restore(checkpoints, at, plans, built.shapes, settings)
    scalars = measure.scalars_of(task, recipe)(built, arm.rows[0])
    labels = " + ".join(row.label for row in arm.rows)
    if left := plans.total_steps - at:
        text = f"Compiling {labels}: {left:,} steps of {recipe.workers} workers"
        processes.say(text, file=sys.stderr)
    else:
        processes.say(f"The run in {folder} had come to its end, step {at:,}.")
    with (
        progress.bar(total=plans.total_steps, initial=at, unit="step") as bar,
        records.writing(folder, trackers=values.track, keep=kept, console=bar.write) as write,
    ):

        def on_record(record):
            write(identity | record)
            progress.note(bar, record, examples=built.sizes.examples_per_step)

        watch = training_run.Watch(
            on_record,
            scalars,
            on_step=lambda step: bar.update(step - bar.n),
            traffic=traffic(task, *arm.rows[:2], built.sizes, built.sync_in_step),
        )
        return training_run.train(built, plans, watch, seed=values.seed, begun=begun, saving=saving)


def _finish(outcome, built, plans, folder, values, label):
    """Writes the model and report of a run that has ended; raises SystemExit otherwise."""
    # What was decided online is a plan too, as far as the run has come.
    echo = EchoPlan(list(outcome.decided), "measured") if plans.echo.online else plans.echo
    for name, plan in {"sync_plan": plans.sync, "echo_plan": echo}.items():
        if plan is not None and processes.is_first():
            plan.save(os.path.join(folder, f"{name}.json"))
    if not outcome.ended:
        place = f"at step {outcome.step} of {plans.total_steps}"
        processes.say(f"Stopped and saved {place}: {go_on(values)} continues.")
        sys.exit(128 + outcome.stopped)
    if outcome.diverged:
        sys.exit(outcome.diverged)
    checkpoint.export(folder, pipeline.on_host(built.mean_params(outcome.state)))
    rows = records.read_folder(folder)
    if processes.is_first():
        title = f"{values.task}, {built.sizes.workers} workers"
        print(page.write_run(rows, label, folder, title))
        print(_sent(rows[-1]))
    processes.say(f"This took {training_run.duration(outcome.seconds)}.")
    processes.say(f"Written to {folder}: report.html, metrics, plans, checkpoints, model")


def _sent(record) -> str:
    """What a worker has sent: sketches and compressed syncs are parts of an all-reduce."""
    rounds, sent = record["rounds"], record["allreduces"]
    order = " and for the order" * (sent > rounds)
    return (
        f"A worker has sent as much as {sent:,.0f} all-reduces of the parameters: in {rounds:,} "
        f"syncs{order}."
    )
