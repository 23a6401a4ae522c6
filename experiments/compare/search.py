"""How a study runs: which runs its comparison needs, and who trains them.

Every arm runs at all its learning rates with seed 0, and at the best of these, the finalists, with
all seeds. A rate at which a seed diverges is replaced by the next best. With slow input this is
phase "tune", without the delay unless the arm's policy depends on it. In phase "report" all seeds
run with the delay at the best rate.

Where averaged weights are recorded, all this is done for them too, except for phase "report": that
has the best rate of the last weights.
"""

import collections
import concurrent.futures
import functools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags as absl_flags

from experiments import files, fingerprints, lock, progress
from experiments.compare import flags, tiny
from experiments.compare.arms import Arm, arms_of, config_of, left_out, plans_of
from experiments.compare.cost import dry_run, traffic
from experiments.data.base import Recipe, Task
from experiments.distributed import agreement, devices, processes
from experiments.report import archive, page, records, statistics
from experiments.report.records import Run, run_of, whole_runs
from experiments.report.statistics import Criterion
from experiments.trainer import checkpoint, config, measure, pipeline, program
from experiments.trainer.train import Hooks, compile_and_train
from syncopate.mesh import platform

EVERY = 20  # steps between two readings of the clock, of `step_seconds`


def run(study, values: absl_flags.FlagValues) -> None:
    """Runs a study with parsed flags: a dry run, or the search and its report.

    Raises:
      SystemExit: 128 + n if signal n stopped it; the same flags go on. `lock.BUSY` if another run
        has the folder.
    """
    processes.start(values)
    task, recipe, study, chosen = resolved(study, values)
    data = "" if values.dry_run else fingerprints.data_hash(task)
    agreement.check(fingerprints.facts(values, data))
    if values.dry_run:
        return processes.say(dry_run(task, recipe, chosen, values))
    for text in left_out(chosen.arms.values(), task, recipe):
        processes.say(text)
    if len(chosen.arms) == 1 and (base := next(iter(study.arms))) not in chosen.arms:
        processes.say(f"{base} is compared too, as the baseline of {values.arms[0]}.")
        chosen = chosen._replace(arms=arms_of([base, *values.arms], study.arms, **study.usual))
    folder = flags.folder_of(values, study.name)
    with lock.held(folder):
        _carry_out(study, chosen, task, recipe, folder, values, data)


def resolved(study, values: absl_flags.FlagValues) -> tuple[Task, Recipe, Any, Any]:
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


def _carry_out(study, chosen, task, recipe, folder, values, data):
    settings = {**flags.settings(values, recipe), "data": data}
    settings |= {"study": study.name, "sync_steps": chosen.sync_steps}
    done = [] if values.overwrite else records.read_folder(folder)
    records.open_folder(folder, settings, overwrite=values.overwrite)
    rows, stopped = _search(chosen, task, recipe, folder, done, values)
    if stopped:
        processes.say(f"Stopped and saved: {go_on(values)} continues.")
        sys.exit(128 + stopped)
    if processes.is_first():
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


def _search(study, task, recipe, folder, done, values):
    mesh = devices.mesh_of(recipe.run, recipe.workers)
    seconds = 0.0
    if study.speeds:
        seconds = values.step_seconds
        if seconds is None:
            processes.say("Measuring the time of a step", file=sys.stderr)
            seconds = step_seconds(study, task, recipe, mesh, folder, done)
        processes.say(f"a step takes {1e3 * seconds:.2f} ms; a load R times that")
    reads = None if values.input == "device" else values.input
    trains = Trainer(
        study,
        task,
        recipe,
        folder=folder,
        reads=reads,
        mesh=mesh,
        step_seconds=seconds,
        checkpoint_every=values.checkpoint_every,
    )
    kept = kept_records(folder, done)
    processes.say(f"Compiling {len(study.arms)} arms", file=sys.stderr)
    with records.writing(folder, trackers=values.track, keep=kept) as write:
        result = search(
            study,
            trains,
            seeds=values.seeds,
            done=kept,
            on_record=write,
        )
    if trains.seconds:
        processes.say(f"The runs took {progress.duration(trains.seconds)}.", file=sys.stderr)
    return result


def sync_plans(arms: Mapping[str, Arm], task: Task, recipe: Recipe) -> dict:
    """{arm: SyncPlan} for seed 0, of arms whose plan is known before the run."""
    plans = {name: plans_of(task, recipe, arm).sync for name, arm in arms.items()}
    return {name: plan for name, plan in plans.items() if plan is not None}


def go_on(values: absl_flags.FlagValues) -> str:
    return "the same command" + (", without --overwrite," if values.overwrite else "")


def next_run(
    study,
    arm: str,
    speed: float | None,
    rates: Sequence[float],
    records: Sequence[dict],
    seeds: int,
) -> Run | None:
    """The next run that an arm needs at a speed, after these whole runs; None if it is done."""
    of_arm = [r for r in records if (r["arm"], r["speed"]) == (arm, speed)]
    ended, phase = _by_run(of_arm), "run" if speed is None else "tune"

    def missing(rates, seeds, phase):
        runs = (Run(arm, speed, rate, seed, phase) for rate in rates for seed in seeds)
        return next((run for run in runs if run not in ended), None)

    if first := missing(sorted(rates), [0], phase):
        return first
    data = statistics.data_of(of_arm)
    best = {}  # in their order; records may be of further rates, that an earlier call asked for
    for criterion in statistics.criteria(study.criterion, data):
        finalists = statistics.finalists(data, criterion)
        best |= dict.fromkeys([rate for rate in finalists if rate in rates][: study.finalists])
    others = missing(best, range(seeds), phase)
    if others or speed is None:
        return others
    best = statistics.best_rate(data, study.criterion)
    return None if best is None else missing([best], range(seeds), "report")


def planned(rates: int, seeds: int, finalists: int | None, speed: float | None) -> int:
    """The number of runs of an arm at a speed, if none diverges."""
    last = rates if finalists is None else min(finalists, rates)
    return rates + last * (seeds - 1) + (seeds if speed is not None else 0)


def search(
    study,
    trainer,
    *,
    seeds: int,
    done: Sequence[dict] = (),
    on_record: Callable[[dict], None] = lambda record: None,
) -> tuple[list[dict], int]:
    """Trains the runs that the protocol needs, of a study's arms at its speeds, by a `Trainer`.

    Args:
      done: records of an earlier call. Whole runs are not repeated; others continue.

    Returns:
      The records of whole runs, and the signal that stopped the search, or 0.
    """
    asked = [
        (arm, speed, trainer.rates(arm, speed))
        for speed in study.speeds or (None,)
        for arm in study.arms
    ]
    records, stopped, steps, before = list(done), 0, 0, 0
    for arm, speed, rates in asked:
        steps += planned(len(rates), seeds, study.finalists, speed) * trainer.steps(arm, speed)
        before += sum(  # an earlier call may have asked for others
            r["step"]
            for r in done
            if r.get("ended")
            and (r["arm"], r["speed"]) == (arm, speed)
            and r["learning_rate"] in rates
            and r["seed"] < seeds
        )
    trainer.prepare(g[:2] for g in asked if next_run(study, *g, whole_runs(records), seeds))
    with progress.bar(total=steps, initial=before, unit="step", smoothing=0) as bar:
        for group in asked:
            while not stopped and (run := next_run(study, *group, whole_runs(records), seeds)):
                new, stopped = _train(study, trainer, run, records, on_record, bar)
                records += new
    return whole_runs(records), stopped


def _train(study, trainer, run: Run, records, on_record, bar) -> tuple[list[dict], int]:
    """Trains a run; returns its new records, and the signal that stopped it or 0."""
    arm, new, before = study.arms[run.arm], [], bar.n
    words = {"study": study.name, **run._asdict(), **arm.words}
    slow = "" if run.speed is None else f", R {run.speed:g}, {run.phase}"
    bar.set_description(f"{arm.label}, lr {run.learning_rate:g}, seed {run.seed}{slow}")

    def write(record):
        new.append(words | record)
        on_record(new[-1])
        progress.note(bar, record, examples=trainer.examples)

    def came_to(step):
        bar.update(before + step - bar.n)

    stopped = trainer.train(run, _by_run(records).get(run, []), write, came_to)
    came_to(trainer.steps(run.arm, run.speed))  # if it ended early too
    return new, stopped


def _by_run(records) -> dict[Run, list[dict]]:
    runs = {}
    for record in records:
        runs.setdefault(run_of(record), []).append(record)
    return runs


# The trainer of these runs.


class Trainer:
    """Trains the runs of a study that `search` asks for. Equal programs are compiled once.

    Args:
      folder: of the study, for checkpoints; None: no checkpoints.
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
        reads: str | None = None,
        mesh=None,
        checkpoint_every: int | None = None,
        step_seconds: float = 0.0,
    ):
        self.study, self.task, self.recipe = study, task, recipe
        self.examples = recipe.workers * recipe.units_per_step * recipe.unit_size  # of a step
        self._folder, self._every = folder, checkpoint_every
        self._reads, self._mesh, self._step_seconds = reads, mesh, step_seconds
        halves = study.criterion.scalar.startswith("valid/")
        self._scalars = measure.scalars_of(task, recipe, halves=halves)
        self.seconds = collections.Counter()  # of all runs, as of `train.Outcome`
        self._plans_of = functools.lru_cache(128)(self._make_plans)
        self._program = functools.cache(self._build)

    def rates(self, arm: str, speed: float | None) -> list[float]:
        """The learning rates that are tried with an arm at a speed."""
        chosen = self.study.arms[arm]
        given = config_of(self.task, self.recipe, chosen, seed=0, speed=self._pace(speed))
        return [chosen.rate_factor(given) * rate for rate in self.recipe.learning_rates]

    def steps(self, arm: str, speed: float | None) -> int:
        """T of an arm's runs at a speed."""
        return self._plans_of(arm, speed, 1.0, 0).total_steps

    def train(
        self,
        this: Run,
        kept: Sequence[dict],
        on_record: Callable,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> int:
        """Trains a run, after its records so far. Returns the signal that stopped it, or 0."""
        order, rule, policy = self.study.arms[this.arm].rows
        plans = self._plans_of(*this[:4])
        built, scalars = self._program(*self._key(this.arm, this.speed))
        delayed = this.speed is not None and (policy.online or this.phase == "report")
        delay = self._step_seconds if delayed else 0.0
        # Without the delay that its loads should have had, a run's seconds mean nothing.
        further = {"timed": False} if this.phase == "report" and not delay else {}
        folder, begun = None, None
        if self._folder is not None:
            folder = os.path.join(self._folder, "checkpoints", this.name)
            begun = checkpoint.restore(folder, plans, built.shapes, records=len(kept))
        hooks = Hooks(
            lambda record: on_record(record | further),
            scalars,
            on_step=on_step,
            traffic=traffic(self.task, order, rule, built.sizes, built.sync_in_step),
            ends=ends_at(self.study.criterion, kept),
            folder=folder,
            save_every=self._every,
            slow=pipeline.Slow((this.speed or 0) * delay, self.study.sync_steps * delay),
        )
        outcome = compile_and_train(built, plans, hooks, seed=this.seed, begun=begun)
        self.seconds.update(outcome.seconds)
        if folder and outcome.ended and processes.is_first():
            shutil.rmtree(folder, ignore_errors=True)
        return outcome.stopped

    def prepare(self, wanted: Iterable[tuple[str, float | None]]) -> None:
        """Compiles what runs of these arms, at these speeds, need: two programs at once.

        Only in one process and on one CPU device. Elsewhere collectives of two programs could wait
        for each other, and the states of both may not fit into memory.
        """
        first = {}
        for arm, speed in wanted:
            first.setdefault(self._key(arm, speed), self._plans_of(arm, speed, 1.0, 0))
        if len(first) < 2 or self._mesh or processes.several() or platform() != "cpu":
            return

        def compiled(key, plans, evaluated):
            built, scalars = self._program(*key)
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

    def _make_plans(self, arm, speed, rate, seed) -> config.Plans:
        given = {"rate": rate, "seed": seed, "speed": self._pace(speed)}
        return plans_of(self.task, self.recipe, self.study.arms[arm], **given)

    def _build(self, order, rounds, reads):
        """(program, its measure)."""
        built = program.build(self.task, self.recipe, order, rounds, reads=reads, mesh=self._mesh)
        return built, self._scalars(built)


def kept_records(folder: str, done: Sequence[dict]) -> list[dict]:
    """The records of whole runs, and records of other runs up to their newest checkpoint.

    Checkpoints of whole runs, which a crash may have left behind, are removed.
    """
    whole = {run_of(r) for r in done if r.get("ended")}

    def path(of):
        return os.path.join(folder, "checkpoints", of.name)

    for ended in whole if processes.is_first() else ():
        shutil.rmtree(path(ended), ignore_errors=True)
    saved = functools.cache(lambda cut: checkpoint.newest(path(cut)) or -1)
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


def step_seconds(
    study, task: Task, recipe: Recipe, mesh, folder: str, done: Sequence[dict]
) -> float:
    """t_step of a folder's runs: the median time of a step of the first arm, without a delay.

    It is measured once, so that all runs have the same delays.
    """
    path = os.path.join(folder, "step.json")
    timed = processes.of_first(files.read_json(path) if done else None)
    if timed is None:
        arm, total, seconds = next(iter(study.arms.values())), 8 * EVERY, []
        order, rule, _ = arm.rows
        short = recipe._replace(total_steps=total, warmup_steps=0)
        compile_and_train(
            program.build(task, recipe, order, rule.rounds, reads="thread", mesh=mesh),
            plans_of(task, short, arm, rate=0.0),
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
