r"""One run: any task, any order, any synchronisation rule and any echo policy together.

    python -m experiments.train                           # digits, CD-GraB, QSR, no echo: seconds
    python -m experiments.train --order=rr --sync=parallel --echo=diffusion_cosine
    python -m experiments.train --task=mnist --model=lenet --data_dir=DIR --workers=4 --run=mesh
    python -m experiments.launch --processes=2 -- experiments.train --run=mesh --workers=2

Writes metrics.jsonl, metrics.csv, the plans, settings and versions into --output_dir, checkpoints
of the whole state, and in the end the model, the mean over the workers, which orbax restores.
SIGTERM and SIGINT save and leave; the same command, given again, goes on from the last checkpoint,
and ends bitwise as the run that was never stopped. With --elastic it may have other --workers
(docs/launching.md).

T is --total_steps, or --epochs passes over the data without echoing; with echoing the same steps
take fewer loads.
"""

import functools
import os
import sys

from absl import app
from absl import flags as absl_flags

from experiments import flags
from experiments.elastic import change, request
from experiments.processes import distributed, lock
from experiments.results import writers
from experiments.studies import evaluations, study, trainer
from experiments.studies.dry_run import dry_run
from experiments.studies.study import Arm, Study
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.tasks.base import check_recipe
from experiments.tasks.digest import data_hash
from experiments.training import checkpoint, config, program
from experiments.training import run as training_run
from local_opt.elastic import POLICIES
from ordering.echo import EchoPlan


def define_flags(values: absl_flags.FlagValues) -> None:
    flags.define(values, "task", "setting", "run", "forecast", task="digits_cosine", evaluations=10)
    define, enum = flags.definer(values), absl_flags.DEFINE_enum
    define(enum, "order", "cd_grab", "which unit comes next", list(ORDERS))
    define(enum, "sync", "qsr", "when workers meet", list(SYNC_RULES))
    define(enum, "echo", "none", "when a batch is used again", list(ECHO_POLICIES))
    rate = "peak; the middle one of --learning_rates if unset"
    define(absl_flags.DEFINE_float, "learning_rate", None, rate)
    define(absl_flags.DEFINE_integer, "seed", 0, "of parameters, orders, coins", lower_bound=0)
    text = "other --workers than the run has had: what becomes of their optimizers' states"
    define(enum, "elastic", None, text, list(POLICIES))


def run(values: absl_flags.FlagValues) -> None:
    """Trains with parsed flags, from the last checkpoint of --output_dir on.

    Raises:
      SystemExit: 128 + n if signal n stopped it; with the reason if it diverged; `lock.BUSY` if
        another run has the folder.
    """
    distributed.start(values)
    task, recipe = flags.setting_from_flags(values)
    distributed.check_data(task)
    rates = recipe.learning_rates
    rate = rates[len(rates) // 2] if values.learning_rate is None else values.learning_rate
    recipe = recipe._replace(learning_rates=(rate,))
    check_recipe(recipe)
    decisions = {name: values[name].value for name in ("order", "sync", "echo")}
    arm = Arm("run", **decisions)
    order, rule, policy = trainer.rows_of(arm)
    if values.dry_run:
        only = Study("train", {"run": arm}, values.task, None, (), ())
        return distributed.say(dry_run(task, recipe, only, flags.assumed(values)))
    config.sizes_of(task, recipe, deals=order.deals)  # before there is a folder
    folder = values.output_dir or os.path.join("results", f"train_{values.task}")
    fixed = {**decisions, "seed": values.seed, "learning_rate": rate}
    settings = {**flags.settings(values, recipe), **fixed, "data": data_hash(task)}
    mesh = distributed.mesh_of(recipe.run, recipe.workers)
    with lock.held(folder):
        built, plans, this = _prepared(task, recipe, arm, mesh, values, folder, settings)
        outcome = _train(task, recipe, built, plans, arm, values, folder, this, fixed)
        _finish(outcome, built, plans, folder, values)


def _prepared(task, recipe, arm, mesh, values, folder, settings):
    """(program, plans, what is asked of the folder), where that may be to change the workers."""
    order, rule, policy = trainer.rows_of(arm)
    asked = request.asked(folder, settings, policy=values.elastic, overwrite=values.overwrite)
    sizes = request.sizes_of(task, recipe, asked, deals=order.deals)
    own = config.config_of(recipe, sizes[-1], seed=values.seed)
    plans = config.plans_of(own, rule, policy, rate=recipe.learning_rates[0])
    this = change.Run(task, recipe, order, rule.rounds, plans, values.seed)
    settings, units = change.carried_out(this, asked, sizes, folder, values.elastic, mesh)
    reads = None if values.input == "device" else values.input
    built = program.build(
        task, recipe, order, rule.rounds, mesh=mesh, sizes=sizes[-1], units=units,
        reads="thread" if policy.online and reads is None else reads,
        epochs=-(-plans.total_steps // sizes[-1].loads_per_epoch),
    )  # fmt: skip
    if text := config.left_out(task, asked.began(recipe), deals=order.deals):
        distributed.say(text)
    return built, plans, asked._replace(settings=settings)


def _finish(outcome, built, plans, folder, values):
    """What is written beside the records; SystemExit where the run has not come to its end."""
    _save_plans(folder, plans, outcome.decided)
    if not outcome.ended:
        step, command = outcome.step, study.go_on(values)
        distributed.say(
            f"Stopped and saved at step {step} of {plans.total_steps}: {command} goes on."
        )
        sys.exit(128 + outcome.stopped)
    if outcome.diverged:
        sys.exit(outcome.diverged)
    checkpoint.export(folder, built.mean_params(outcome.state))
    distributed.say(f"Written to {folder}: metrics, plans, checkpoints, model")


def _train(task, recipe, built, plans, arm, values, folder, asked, fixed):
    settings, at = asked.settings, asked.step
    done = study.open_folder(folder, settings, values)
    identity = {"study": "train", "arm": "run", "speed": None, "phase": "run", **fixed}
    identity |= {k: v for k, v in settings.items() if k == request.NAME}
    checkpoints = os.path.join(folder, "checkpoints")
    kept = [r for r in done if r["step"] <= at] if at else []
    saving = training_run.Saving(
        checkpoints, values.checkpoint_every, at_end=True, about=settings, kept=len(kept)
    )
    measure = evaluations.scalars_of(task, recipe)(built, trainer.rows_of(arm)[0])
    with (
        distributed.bar(total=plans.total_steps, initial=at, unit="step") as bar,
        writers.open_writers(
            folder, trackers=values.track, keep=kept,
            console=None if bar.disable else bar.write,
        ) as write,
    ):  # fmt: skip

        def on_record(record):
            write(identity | record)
            bar.update(record["step"] - bar.n)

        of_sizes = functools.partial(trainer.traffic_of, task, *trainer.rows_of(arm)[:2], built)
        return trainer.train_one(
            task, recipe, built, plans, arm, measure, seed=values.seed, saving=saving,
            on_record=on_record, traffic=request.traffic_of(asked.changes, built.sizes, of_sizes),
        )  # fmt: skip


def _save_plans(folder, plans, decided):
    """Plans that are known before the run; what was decided online is one when it has ended."""
    if not distributed.is_first():
        return
    echo = EchoPlan(list(decided), "measured") if plans.echo.online else plans.echo
    for name, plan in {"sync_plan": plans.sync, "echo_plan": echo}.items():
        if plan is not None:
            plan.save(os.path.join(folder, f"{name}.json"))


if __name__ == "__main__":
    define_flags(absl_flags.FLAGS)
    app.run(lambda argv: run(absl_flags.FLAGS))
