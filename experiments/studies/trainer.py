"""How a run of a study is trained: its plans, its program, and what is measured of it."""

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.processes import distributed
from experiments.results.records import run_of
from experiments.studies import evaluations
from experiments.studies.cost import traffic
from experiments.studies.search import Run, Trainer
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.tasks.base import Recipe, Task
from experiments.training import beside, checkpoint, config, program, run
from experiments.training.parts import num_params


class Setup(NamedTuple):
    """How the runs of a study are carried out.

    Fields:
      folder: of the study, for checkpoints; None: without.
      reads, mesh: as of `training.program.build`; checkpoint_every: as of `training.run.Saving`.
      step_seconds: t_step; with the delay, a load takes R of it. 0: nothing is delayed.
      about: what all runs depend on, JSON values, for their checkpoints; None: not known.
    """

    folder: str | None = None
    reads: str | None = None
    mesh: Any = None
    checkpoint_every: int | None = None
    step_seconds: float = 0.0
    about: Mapping | None = None


def rows_of(arm) -> tuple[config.Order, config.SyncRule, config.EchoPolicy]:
    """The rows of the three tables that an arm names."""
    return ORDERS[arm.order], SYNC_RULES[arm.sync], ECHO_POLICIES[arm.echo]


def config_of(task: Task, recipe: Recipe, arm, *, seed=0, speed=None) -> config.RunConfig:
    sizes = config.sizes_of(task, recipe, deals=ORDERS[arm.order].deals)
    return config.config_of(recipe, sizes, seed=seed, speed=speed)


def left_out(study, task: Task, recipe: Recipe) -> list[str]:
    """What the arms do not visit in an epoch, in words, each once."""
    kinds = dict.fromkeys(ORDERS[arm.order].deals for arm in study.arms.values())
    texts = (config.left_out(task, recipe, deals=kind) for kind in kinds)
    return [text for text in texts if text]


class Prepared(NamedTuple):
    """What the runs of a study are made of.

    Fields:
      study, task, recipe, setup: as given.
      plans_of: run -> Plans; built_for: run -> (program, its measure, () -> it lifted to several).
      reads_of: run -> as of `training.program.build`.
    """

    study: Any
    task: Task
    recipe: Recipe
    setup: Setup
    plans_of: Callable
    built_for: Callable
    reads_of: Callable

    def rows_of(self, this: Run):
        return rows_of(self.study.arms[this.arm])

    def delay_of(self, this: Run) -> float:
        """t_step of a run that waits for its loads; else 0."""
        waits = throttled(self.study.arms[this.arm], this)
        return self.setup.step_seconds if waits else 0.0


def trainer_of(study, task: Task, recipe: Recipe, setup: Setup) -> Trainer:
    """Trains the arms of a study; what those have in common is compiled once."""
    own = functools.cache(functools.partial(_config_of, study, task, recipe))
    prepared = _prepared(study, task, recipe, setup, own)

    def trajectory(this):
        arm = study.arms[this.arm]
        if this.phase == "run" or prepared.delay_of(this):
            return None
        digests = tuple(prepared.plans_of(this).digests().values())
        return arm.order, SYNC_RULES[arm.sync].rounds, arm.proximal, this.seed, digests

    def beside_of(this):
        alone = setup.mesh is not None or recipe.run != "vmap" or prepared.reads_of(this)
        return None if alone else beside.key_of(prepared.plans_of(this))

    def rates(arm, speed):
        factor = study.arms[arm].rate_factor(own(arm, speed))
        return [factor * rate for rate in recipe.learning_rates]

    return Trainer(
        functools.partial(_train, prepared),
        rates,
        lambda arm, speed: own(arm, speed).total_steps,
        trajectory,
        recipe.workers * recipe.units_per_step * recipe.unit_size,
        beside_of,
        functools.partial(_train_several, prepared),
    )


def _config_of(study, task, recipe, arm, speed, seed=0):
    paced = speed if study.paced else None
    return config_of(task, recipe, study.arms[arm], seed=seed, speed=paced)


def _prepared(study, task, recipe, setup, own) -> Prepared:
    halves = study.criterion.scalar.startswith("valid/")
    scalars = evaluations.scalars_of(task, recipe, halves=halves)

    @functools.lru_cache(128)
    def plans_of(this: Run):
        _, rule, policy = rows_of(study.arms[this.arm])
        given = own(this.arm, this.speed, this.seed)
        return config.plans_of(given, rule, policy, rate=this.learning_rate)

    @functools.cache
    def program_of(order, rounds, proximal, reads, epochs):
        built = program.build(
            task, recipe, order, rounds, proximal=proximal * recipe.proximal, reads=reads,
            mesh=setup.mesh, epochs=epochs,
        )  # fmt: skip
        return built, scalars(built, order), functools.cache(lambda: beside.lifted(built))

    def reads_of(this):
        # Tuned as it is reported: one program for both phases.
        waits = this.speed is not None and setup.step_seconds
        online = ECHO_POLICIES[study.arms[this.arm].echo].online
        return setup.reads or ("thread" if waits or online else None)

    def built_for(this):
        arm = study.arms[this.arm]
        order, rule, _ = rows_of(arm)
        sizes = config.sizes_of(task, recipe, deals=order.deals)
        epochs = -(-plans_of(this).total_steps // sizes.loads_per_epoch)
        return program_of(order, rule.rounds, arm.proximal, reads_of(this), epochs)

    return Prepared(study, task, recipe, setup, plans_of, built_for, reads_of)


def _train(own: Prepared, this: Run, kept, on_record) -> int:
    """As `Trainer.train`."""
    study, setup, arm = own.study, own.setup, own.study.arms[this.arm]
    plans, (built, measure, _) = own.plans_of(this), own.built_for(this)
    folder = setup.folder and os.path.join(setup.folder, "checkpoints", this.name)
    about = None if setup.about is None else {**setup.about, **this._asdict()}
    saving = run.Saving(folder, setup.checkpoint_every, about=about, kept=len(kept))
    delay = own.delay_of(this)
    outcome = train_one(
        own.task, own.recipe, built, plans, arm, measure, seed=this.seed,
        on_record=lambda record: on_record(record | _undelayed(own, this)),
        saving=saving if folder else None,
        delay=(this.speed or 0) * delay, sync_delay=study.sync_steps * delay,
        ends=evaluations.ends_at(study.criterion, kept),
    )  # fmt: skip
    if folder and outcome.ended and distributed.is_first():
        shutil.rmtree(folder, ignore_errors=True)
    return outcome.stopped


def _train_several(own: Prepared, runs: Sequence[Run], on_record) -> int:
    """As `Trainer.train_several`."""
    (built, measure, several), plans = own.built_for(runs[0]), [own.plans_of(this) for this in runs]
    order, rule, _ = own.rows_of(runs[0])
    total = plans[0].total_steps
    return beside.train(
        built, several(), plans, seeds=[this.seed for this in runs],
        evaluate=lambda step, state: measure(step, total, state),
        evaluate_at=evaluations.evaluation_steps(own.recipe, built.sizes, total),
        on_record=lambda i, record: on_record(runs[i], record | _undelayed(own, runs[i])),
        traffic=traffic_of(own.task, order, rule, built, built.sizes),
        ends=[evaluations.ends_at(own.study.criterion) for _ in runs],
    )  # fmt: skip


def _undelayed(own: Prepared, this: Run) -> dict:
    """Of a run whose loads should have had a delay: its seconds say nothing."""
    return {"delayed": False} if this.phase == "report" and not own.delay_of(this) else {}


def throttled(arm, this: Run) -> bool:
    """Whether a run has the delay: where it is reported, or decides by it."""
    online = ECHO_POLICIES[arm.echo].online
    return this.speed is not None and (online or this.phase == "report")


def before_checkpoints(folder: str, done: Sequence[dict]) -> list[dict]:
    """The records of whole runs, and of others those that their checkpoints have seen."""
    whole = {run_of(r) for r in done if r.get("ended")}

    @functools.cache
    def saved(run):
        return checkpoint.settled(os.path.join(folder, "checkpoints", Run(*run).name)) or -1

    return [r for r in done if run_of(r) in whole or r["step"] <= saved(run_of(r))]


def forget_ended(folder: str, done: Sequence[dict]) -> None:
    """Removes the checkpoints of whole runs, which a crash may have left behind."""
    if distributed.is_first():
        for run in {run_of(r) for r in done if r.get("ended")}:
            path = os.path.join(folder, "checkpoints", Run(*run).name)
            shutil.rmtree(path, ignore_errors=True)


def train_one(task, recipe, built, plans, arm, measure, *, saving, **options) -> run.Outcome:
    """`training.run.train`, evaluated as the recipe asks.

    Args:
      arm: of the run; measure: `(step, T, state) -> scalars`, as of `evaluations.scalars_of`.
      options: of `training.run.train`.
    """
    order, rule, _ = rows_of(arm)
    total = plans.total_steps
    steps = evaluations.evaluation_steps(recipe, built.sizes, total)
    at = checkpoint.latest(saving.folder) if saving else 0
    following = iter([step for step in steps if step > at or not at])  # as they are evaluated
    return run.train(
        built,
        plans,
        evaluate=lambda state: measure(next(following), total, state),
        evaluate_at=steps,
        saving=saving,
        **{"traffic": traffic_of(task, order, rule, built, built.sizes)} | options,
    )


def traffic_of(task, order, rule, built, sizes) -> Callable[[int, int], float]:
    """`cost.traffic` of a built program, or as if it had other sizes."""
    params = num_params(task.model)
    return traffic(order, rule, sizes, params, sync_in_step=built.sync_in_step)


def step_seconds(study, task: Task, recipe: Recipe, mesh=None, *, every: int = 20) -> float:
    """t_step: the median time of a step of the first arm on this machine, without a delay."""
    arm, total = next(iter(study.arms.values())), 8 * every
    order, rule, policy = rows_of(arm)
    built = program.build(task, recipe, order, rule.rounds, reads="thread", mesh=mesh)
    short = recipe._replace(total_steps=total, warmup_steps=0)
    plans = config.plans_of(config_of(task, short, arm), rule, policy, rate=0.0)
    seconds = []
    run.train(
        built, plans, seed=0, evaluate=lambda state: {}, evaluate_at=range(every, total, every),
        on_record=lambda record: seconds.append(record["seconds"]),
    )  # fmt: skip
    return float(np.median(np.diff(seconds)) / every)
