"""Trains the runs of a study: their plans, programs and evaluations."""

import collections
import concurrent.futures
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from experiments.cluster import files, processes
from experiments.results import statistics
from experiments.results.records import run_of
from experiments.results.statistics import Criterion
from experiments.study.cost import traffic
from experiments.study.search import Run
from experiments.study.tables import config_of, plans_of
from experiments.tasks.base import Recipe, Task
from experiments.training import checkpoint, config, input, loop, measure, program, run
from experiments.training.config import num_params
from syncopate.mesh import platform

EVERY = 20  # steps between two readings of the clock, of `step_seconds`


class Trainer:
    """Trains the runs of a study that `search` asks for. Equal programs are compiled once.

    Args:
      study: a `Study`; task, recipe: its setting.
      folder: of the study, for checkpoints; None: no checkpoints.
      reads, mesh: as of `training.program.build`; checkpoint_every: as of `training.run.Saving`.
      step_seconds: t_step; a delayed load takes R times this. 0: no delay.
      about: settings of all runs, JSON values, for their checkpoints.
    """

    def __init__(
        self, study, task: Task, recipe: Recipe, *, folder: str | None = None,
        reads: str | None = None, mesh=None, checkpoint_every: int | None = None,
        step_seconds: float = 0.0, about: Mapping = {},
    ):  # fmt: skip
        self.study, self.task, self.recipe = study, task, recipe
        self.examples = recipe.workers * recipe.units_per_step * recipe.unit_size  # of a step
        self._folder, self._about, self._every = folder, about, checkpoint_every
        self._reads, self._mesh, self._step_seconds = reads, mesh, step_seconds
        halves = study.criterion.scalar.startswith("valid/")
        self._scalars = measure.scalars_of(task, recipe, halves=halves)
        self.seconds = collections.Counter()  # of all runs, as of `run.Outcome`
        self._plans_of = functools.lru_cache(128)(self._make_plans)
        self._program = functools.cache(self._build)

    def rates(self, arm: str, speed: float | None) -> list[float]:
        """The learning rates that are tried with an arm at a speed."""
        own = self.study.arms[arm]
        given = config_of(self.task, self.recipe, own, seed=0, speed=self._pace(speed))
        return [own.rate_factor(given) * rate for rate in self.recipe.learning_rates]

    def steps(self, arm: str, speed: float | None) -> int:
        """T of an arm's runs at a speed."""
        return self._plans_of(arm, speed, 1.0, 0).total_steps

    def train(
        self, this: Run, kept: Sequence[dict], on_record: Callable,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> int:  # fmt: skip
        """Trains a run, after its records so far. Returns the signal that stopped it, or 0."""
        order, rule, policy = self.study.arms[this.arm].rows
        plans = self._plans_of(*this[:4])
        built, scalars = self._program(*self._key(this.arm, this.speed))
        delayed = this.speed is not None and (policy.online or this.phase == "report")
        delay = self._step_seconds if delayed else 0.0
        # Without the delay that its loads should have had, a run's seconds mean nothing.
        further = {"timed": False} if this.phase == "report" and not delay else {}
        folder, saving, begun = None, None, None
        if self._folder is not None:
            folder = os.path.join(self._folder, "checkpoints", this.name)
            about = {**self._about, **this._asdict()}
            saving = run.Saving(folder, self._every, about=about)
            # What is kept goes on from a checkpoint that `kept_records` has settled.
            step = checkpoint.newest(folder) if kept else checkpoint.settled(folder, [])
            begun = checkpoint.restore(folder, step, plans, built.shapes, about)
        watch = run.Watch(
            lambda record: on_record(record | further), scalars, on_step=on_step,
            traffic=traffic_of(self.task, order, rule, built.sizes, built.sync_in_step),
            ends=ends_at(self.study.criterion, kept),
        )  # fmt: skip
        slow = input.Slow((this.speed or 0) * delay, self.study.sync_steps * delay)
        outcome = run.train(
            built, plans, watch, seed=this.seed, begun=begun, saving=saving, slow=slow
        )
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
            loop.warm_up(built, plans, start, scalars.prepare if evaluated else ())

        begun = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            looked = [True] + [False] * (len(first) - 1)  # evaluations are compiled once
            list(pool.map(compiled, first, first.values(), looked))
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
        return built, self._scalars(built, order)


def kept_records(folder: str, done: Sequence[dict]) -> list[dict]:
    """The records of whole runs, and of other runs those up to their newest checkpoint.

    Checkpoints of whole runs, which a crash may have left behind, are removed.
    """
    whole = {run_of(r) for r in done if r.get("ended")}

    def path(of):
        return os.path.join(folder, "checkpoints", Run(*of).name)

    for ended in whole if processes.is_first() else ():
        shutil.rmtree(path(ended), ignore_errors=True)
    steps = {}
    for r in done:
        steps.setdefault(run_of(r), []).append(r["step"])
    saved = functools.cache(lambda cut: checkpoint.settled(path(cut), steps[cut]) or -1)
    return [r for r in done if run_of(r) in whole or r["step"] <= saved(run_of(r))]


def ends_at(criterion: Criterion, kept: Sequence[dict] = ()) -> Callable[[dict], bool]:
    """`record -> whether the run has reached the target` on both halves of the test set.

    Args:
      kept: records of the run so far.
    """
    if criterion.when != "target":
        return lambda record: False
    seen = list(kept)

    def ends(record):
        seen.append(record)
        return all(statistics.reached(seen, c) for c in (criterion, statistics.tested(criterion)))

    return ends


def traffic_of(task, order, rule, sizes, sync_in_step: bool) -> Callable[[int, int], float]:
    """`cost.traffic` of a task's model."""
    return traffic(order, rule, sizes, num_params(task.model), sync_in_step=sync_in_step)


def step_seconds(
    study, task: Task, recipe: Recipe, mesh, folder: str, done: Sequence[dict]
) -> float:
    """t_step of a folder's runs: the median time of a step of the first arm, without a delay.

    It is measured once, so that all runs have the same delays.
    """
    path = os.path.join(folder, "step.json")
    known = processes.of_first(files.read_json(path) if done else None)
    if known is None:
        arm, total, seconds = next(iter(study.arms.values())), 8 * EVERY, []
        order, rule, _ = arm.rows
        short = recipe._replace(total_steps=total, warmup_steps=0)
        run.train(
            program.build(task, recipe, order, rule.rounds, reads="thread", mesh=mesh),
            plans_of(task, short, arm, rate=0.0),
            run.Watch(
                lambda record: seconds.append(record["seconds"]),
                measure.Scalars(lambda total: range(EVERY, total, EVERY)),
            ),
            seed=0,
        )
        known = {"step_seconds": float(np.median(np.diff(seconds)) / EVERY)}
        known = processes.of_first(known)
        files.write_json(path, known)
    return known["step_seconds"]
