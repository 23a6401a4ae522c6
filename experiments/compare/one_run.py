"""One run with the parsed flags of `experiments.train`: its folder, its program and its files."""

import os
import sys

from absl import flags as absl_flags

from experiments import fingerprints, lock, progress
from experiments.compare import flags
from experiments.compare.arms import Arm, arm_from_flags, plans_of
from experiments.compare.cost import dry_run, traffic
from experiments.compare.search import go_on
from experiments.compare.study import Study
from experiments.data.base import Recipe, Task
from experiments.distributed import agreement, devices, processes
from experiments.report import page, records
from experiments.trainer import checkpoint, config, measure, pipeline, program
from experiments.trainer.train import Hooks, compile_and_train
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
        checkpoint.check_export(folder)
        done = [] if values.overwrite else records.read_folder(folder)
        built, plans = _prepared(task, recipe, arm, values)
        records.open_folder(folder, settings, overwrite=values.overwrite)
        outcome = _train(task, recipe, arm, built, plans, values, folder, settings, done)
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


def _prepared(task, recipe, arm, values):
    """(program, plans)."""
    order, rule, policy = arm.rows
    reads = None if values.input == "device" else values.input
    built = program.build(
        task,
        recipe,
        order,
        rule.rounds,
        mesh=devices.mesh_of(recipe.run, recipe.workers),
        reads="thread" if policy.online and reads is None else reads,
    )
    plans = plans_of(task, recipe, arm, rate=recipe.learning_rates[0], seed=values.seed)
    if text := config.left_out(task, built.sizes, deals=order.deals):
        processes.say(text)
    return built, plans


def _train(task, recipe, arm, built, plans, values, folder, settings, done):
    checkpoints, total = os.path.join(folder, "checkpoints"), len(plans.rates)
    step = checkpoint.newest(checkpoints)
    kept = [r for r in done if r["step"] <= step] if step else []
    begun = checkpoint.restore(checkpoints, plans, built.shapes, records=len(kept))
    fixed = {name: settings[name] for name in ("order", "sync", "echo", "seed", "learning_rate")}
    identity = {"study": "train", "arm": "run", "speed": None, "phase": "run", **fixed}
    labels = " + ".join(row.label for row in arm.rows)
    if left := total - step:
        text = f"Compiling {labels}: {left:,} steps of {recipe.workers} workers"
        processes.say(text, file=sys.stderr)
    else:
        processes.say(f"The run in {folder} had come to its end, step {step:,}.")
    with (
        progress.bar(total=total, initial=step, unit="step") as bar,
        records.writing(folder, trackers=values.track, keep=kept, console=bar.write) as write,
    ):
        examples = built.sizes.examples_per_step

        def on_record(record):
            write(identity | record)
            progress.note(bar, record, examples=examples)

        hooks = Hooks(
            on_record,
            measure.scalars_of(task, recipe)(built),
            on_step=lambda step: bar.update(step - bar.n),
            traffic=traffic(task, *arm.rows[:2], built.sizes, built.sync_in_step),
            folder=checkpoints,
            save_every=values.checkpoint_every,
            save_at_end=True,
        )
        return compile_and_train(built, plans, hooks, seed=values.seed, begun=begun)


def _finish(outcome, built, plans, folder, values, label):
    """Writes the model and report of a run that has ended; raises SystemExit otherwise."""
    # What was decided online is a plan too, as far as the run has come.
    echo = EchoPlan(list(outcome.at.decided), "measured") if plans.echo.online else plans.echo
    for name, plan in {"sync_plan": plans.sync, "echo_plan": echo}.items():
        if plan is not None and processes.is_first():
            plan.save(os.path.join(folder, f"{name}.json"))
    if not outcome.ended:
        place = f"at step {outcome.at.step} of {plans.total_steps}"
        processes.say(f"Stopped and saved {place}: {go_on(values)} continues.")
        sys.exit(128 + outcome.stopped)
    if outcome.diverged:
        sys.exit(outcome.diverged)
    checkpoint.export(folder, pipeline.on_host(measure.model_of(built, outcome.state.params)))
    rows = records.read_folder(folder)
    if processes.is_first():
        title = f"{values.task}, {built.sizes.workers} workers"
        print(page.write_run(rows, label, folder, title))
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
