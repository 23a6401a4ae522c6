"""The runs of arms: their programs, plans and checkpoints, in a study, and one run alone.

A command ends with `SystemExit`: 128 + n if signal n stopped it, after which the same flags go on,
and `lock.BUSY` if another run has the folder.
"""

import collections
import concurrent.futures
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from absl import flags as absl_flags

from experiments import files, fingerprints, lock, progress
from experiments.compare import flags
from experiments.compare.cost import dry_run, traffic
from experiments.data.base import Recipe, Task
from experiments.distributed import agreement, devices, processes
from experiments.report import page, records, statistics
from experiments.report.records import Run, run_of
from experiments.report.statistics import Criterion
from experiments.trainer import checkpoint, config, measure, pipeline, program
from experiments.trainer.train import Hooks, Outcome, compile_and_train
from ordering.echo import EchoPlan
from syncopate.mesh import platform

EVERY = 20  # steps between two readings of the clock, of `step_seconds`


class Trainer:
    """Trains the runs of a study's arms. Equal programs are compiled once.

    Args:
      folder: of the study, for checkpoints; None: no checkpoints.
      alone: the folder is of one run, whose last checkpoint stays.
      reads, mesh: as of `program.build`; checkpoint_every: as `save_every` of `train.Hooks`.
      step_seconds: t_step; a delayed load takes R times this. 0: no delay.
    """

    def __init__(
        self,
        study,
        task: Task,
        recipe: Recipe,
        *,
        folder: str | None = None,
        alone: bool = False,
        reads: str | None = None,
        mesh=None,
        checkpoint_every: int | None = None,
        step_seconds: float = 0.0,
    ):
        self.study, self.task, self.recipe = study, task, recipe
        self.examples = recipe.workers * recipe.units_per_step * recipe.unit_size  # of a step
        self._folder, self._alone, self._every = folder, alone, checkpoint_every
        self._reads, self._mesh, self._step_seconds = reads, mesh, step_seconds
        halves = study.criterion.scalar.startswith("valid/")
        self._scalars = measure.scalars_of(task, recipe, halves=halves, metrics=study.metrics)
        self.seconds = collections.Counter()  # of all runs, as of `train.Outcome`
        self.plans = functools.lru_cache(128)(self._plans)
        self._built = functools.cache(self._build)

    def rates(self, arm: str, speed: float | None) -> list[float]:
        """The learning rates that are tried with an arm at a speed."""
        chosen = self.study.arms[arm]
        sizes = config.sizes_of(self.task, self.recipe, deals=chosen.rows[0].deals)
        given = config.config_of(self.recipe, sizes, seed=0, speed=self._pace(speed))
        return [chosen.rate_factor(given) * rate for rate in self.recipe.learning_rates]

    def program_of(self, arm: str, speed: float | None) -> tuple[program.Program, measure.Scalars]:
        """What is compiled for an arm's runs at a speed, and what their records say."""
        return self._built(*self._key(arm, speed))

    def steps(self, arm: str, speed: float | None) -> int:
        """T of an arm's runs at a speed."""
        return self.plans(arm, speed, 1.0, 0).total_steps

    def train(
        self,
        this: Run,
        kept: Sequence[dict],
        on_record: Callable,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> Outcome:
        """Trains a run, after its records so far, from its newest checkpoint on."""
        arm, plans = self.study.arms[this.arm], self.plans(*this[:4])
        order, rule, policy = arm.rows
        built, scalars = self.program_of(this.arm, this.speed)
        delayed = this.speed is not None and (policy.online or this.phase == "report")
        delay = self._step_seconds if delayed else 0.0
        # Without the delay that its loads should have had, a run's seconds mean nothing.
        further = {"timed": False} if this.phase == "report" and not delay else {}
        words = {"study": self.study.name, **this._asdict(), **arm.words}
        folder, begun = None, None
        if self._folder is not None:
            folder = checkpoints(self._folder, None if self._alone else this)
            begun = checkpoint.restore(folder, plans, built.shapes, records=len(kept))
        hooks = Hooks(
            lambda record: on_record(words | record | further),
            scalars,
            on_step=on_step,
            traffic=traffic(self.task, order, rule, built.sizes, built.sync_in_step),
            ends=ends_at(self.study.criterion, kept),
            folder=folder,
            save_every=self._every,
            save_at_end=self._alone,
            slow=pipeline.Slow((this.speed or 0) * delay, self.study.sync_steps * delay),
        )
        outcome = compile_and_train(built, plans, hooks, seed=this.seed, begun=begun)
        self.seconds.update(outcome.seconds)
        if folder and outcome.ended and not self._alone and processes.is_first():
            shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def prepare(self, wanted: Iterable[tuple[str, float | None]]) -> None:
        """Compiles what runs of these arms, at these speeds, need: two programs at once.

        Only in one process and on one CPU device. Elsewhere collectives of two programs could wait
        for each other, and the states of both may not fit into memory.
        """
        first = {}
        for arm, speed in wanted:
            first.setdefault(self._key(arm, speed), self.plans(arm, speed, 1.0, 0))
        if len(first) < 2 or self._mesh or processes.several() or platform() != "cpu":
            return

        def compiled(key, plans, evaluated):
            built, scalars = self._built(*key)
            start = functools.partial(built.init, 0)
            program.warm_up(built, plans, start, scalars.prepare if evaluated else ())

        begun = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            evaluates = [True] + [False] * (len(first) - 1)  # evaluations are compiled once
            list(pool.map(compiled, first, first.values(), evaluates))
        self.seconds["compilation"] += time.perf_counter() - begun

    def _key(self, arm, speed) -> tuple:
        """What the program of an arm's runs depends on: the arguments of `_build`."""
        order, rule, policy = self.study.arms[arm].rows
        # With slow input, runs for tuning read batches too, so that both phases share a program.
        waits = policy.online or (speed is not None and self._step_seconds)
        reads = self._reads or ("thread" if waits else None)
        return order, rule.rounds, reads

    def _pace(self, speed):
        return speed if self.study.paced else None

    def _plans(self, arm, speed, rate, seed) -> config.Plans:
        given = {"rate": rate, "seed": seed, "speed": self._pace(speed)}
        return config.plans_of(self.task, self.recipe, self.study.arms[arm], **given)

    def _build(self, order, rounds, reads):
        built = program.build(self.task, self.recipe, order, rounds, reads=reads, mesh=self._mesh)
        return built, self._scalars(built)


def checkpoints(folder: str, of: Run | None = None) -> str:
    """The folder of checkpoints of a study's run, or of one run alone."""
    return os.path.join(folder, "checkpoints", *([of.name] if of else []))


def kept_records(folder: str, done: Sequence[dict]) -> list[dict]:
    """The records of whole runs, and records of other runs up to their newest checkpoint.

    Checkpoints of whole runs, which a crash may have left behind, are removed.
    """
    whole = {run_of(r) for r in done if r.get("ended")}
    for ended in whole if processes.is_first() else ():
        shutil.rmtree(checkpoints(folder, ended), ignore_errors=True)
    saved = functools.cache(lambda cut: checkpoint.newest(checkpoints(folder, cut)) or -1)
    return [r for r in done if run_of(r) in whole or r["step"] <= saved(run_of(r))]


def ends_at(criterion: Criterion, kept: Sequence[dict] = ()) -> Callable[[dict], bool]:
    """`record -> whether the run is at the target` on both halves of the test set."""
    if criterion.when != "target":
        return lambda record: False
    left = {criterion, statistics.tested(criterion)}

    def ends(record):
        for goal in {*left}:
            value = record.get(goal.scalar)
            if value is not None and statistics.reached(value, goal):
                left.discard(goal)
        return not left

    for record in kept:
        ends(record)
    return ends


def step_seconds(study, task: Task, recipe: Recipe, folder: str, done: Sequence[dict]) -> float:
    """t_step of a folder's runs: the median time of a step of the first arm, without a delay.

    It is measured once, so that all runs have the same delays.
    """
    path = os.path.join(folder, "step.json")
    timed = processes.of_first(files.read_json(path) if done else None)
    if timed is None:
        arm, total, seconds = next(iter(study.arms.values())), 8 * EVERY, []
        order, rule, _ = arm.rows
        mesh = devices.mesh_of(recipe.run, recipe.workers)
        short = recipe._replace(total_steps=total, warmup_steps=0)
        compile_and_train(
            program.build(task, recipe, order, rule.rounds, reads="thread", mesh=mesh),
            config.plans_of(task, short, arm, rate=0.0),
            Hooks(
                lambda record: seconds.append(record["seconds"]),
                measure.Scalars(lambda total: range(EVERY, total, EVERY)),
            ),
            seed=0,
        )
        timed = {"step_seconds": float(np.median(np.diff(seconds)) / EVERY)}
        timed = processes.of_first(timed)
        files.write_json(path, timed)
    return timed["step_seconds"]


# What commands begin and end with.


def begun(values: absl_flags.FlagValues, task: Task, recipe: Recipe, study) -> dict | None:
    """The settings of the folder; None after a dry run, which prints what the runs would cost.

    Processes that differ in flags, code or data end here.
    """
    data = "" if values.dry_run else fingerprints.data_hash(task)
    agreement.check(fingerprints.facts(values, data))
    if values.dry_run:
        return processes.say(dry_run(task, recipe, study, values))
    for text in config.left_out(task, recipe, study.arms.values()):  # before there is a folder
        processes.say(text)
    return {**flags.settings(values, recipe), "data": data}


def trainer_of(study, task, recipe, folder, values, **more) -> Trainer:
    reads = None if values.input == "device" else values.input
    mesh, every = devices.mesh_of(recipe.run, recipe.workers), values.checkpoint_every
    given = {"folder": folder, "reads": reads, "mesh": mesh, "checkpoint_every": every}
    return Trainer(study, task, recipe, **given, **more)


def stop(values: absl_flags.FlagValues, signal: int, where: str = "") -> None:
    again = ", without --overwrite," if values.overwrite else ""
    processes.say(f"Stopped and saved{where}: the same command{again} continues.")
    sys.exit(128 + signal)


# One run alone.


def run_alone(study, values: absl_flags.FlagValues) -> None:
    """Trains with the parsed flags of `experiments.train`, from the last checkpoint on.

    Raises:
      SystemExit: with the reason, too, if the run diverged.
    """
    processes.start(values)
    task, recipe, study = resolved_run(study, values)
    if (settings := begun(values, task, recipe, study)) is None:
        return
    this = Run("run", None, recipe.learning_rates[0], values.seed, "run")
    settings |= {**study.arms["run"].words, "seed": this.seed, "learning_rate": this.learning_rate}
    folder = flags.folder_of(values, study.name)
    with lock.held(folder):
        checkpoint.check_export(folder)
        done = [] if values.overwrite else records.read_folder(folder)
        trainer = trainer_of(study, task, recipe, folder, values, alone=True)
        trainer.program_of(this.arm, this.speed)  # what is refused leaves no settings
        trainer.plans(*this[:4])
        records.open_folder(folder, settings, overwrite=values.overwrite)
        _finish(_train(trainer, this, folder, done, values), trainer, this, folder, values)


def resolved_run(study, values) -> tuple[Task, Recipe, Any]:
    """(task, recipe, the Study with the run as its one arm)."""
    task, recipe = flags.setting_from_flags(values)
    rates = recipe.learning_rates
    rate = rates[len(rates) // 2] if values.learning_rate is None else values.learning_rate
    recipe, arm = recipe._replace(learning_rates=(rate,)), flags.arm_from_flags(values, "run")
    flags.check_shards(recipe.shards, [arm])
    return task, recipe, flags.with_metrics(study._replace(arms={"run": arm}), values)


def _label(trainer: Trainer) -> str:
    return " + ".join(row.label for row in trainer.study.arms["run"].rows)


def _train(trainer: Trainer, this: Run, folder, done, values):
    """How the run has ended, a `train.Outcome`."""
    step, total = checkpoint.newest(checkpoints(folder)), trainer.plans(*this[:4]).total_steps
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
        stop(values, outcome.stopped, f" at step {outcome.at.step} of {plans.total_steps}")
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
