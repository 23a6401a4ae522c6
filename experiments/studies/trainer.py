"""How a run of a study is trained: its plans, its program, and what is measured of it."""

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.measures import evaluate
from experiments.processes import distributed
from experiments.results import statistics
from experiments.results.records import run_of
from experiments.results.statistics import Criterion
from experiments.studies.bounds import bounds_of
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


def trainer_of(study, task: Task, recipe: Recipe, setup: Setup) -> Trainer:
    """Trains the arms of a study; what those have in common is compiled once."""
    halves = study.criterion.scalar.startswith("valid/")
    scalars = scalars_of(task, recipe, halves=halves)

    @functools.cache
    def own(arm, speed, seed=0):
        paced = speed if study.paced else None
        return config_of(task, recipe, study.arms[arm], seed=seed, speed=paced)

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

    def trajectory(this):
        arm = study.arms[this.arm]
        if this.phase == "run" or (setup.step_seconds and throttled(arm, this)):
            return None
        digests = tuple(plans_of(this).digests().values())
        return arm.order, SYNC_RULES[arm.sync].rounds, arm.proximal, this.seed, digests

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

    def beside_of(this):
        alone = setup.mesh is not None or recipe.run != "vmap" or reads_of(this)
        return None if alone else beside.key_of(plans_of(this))

    def train_several(runs, on_record):
        order, rule, _ = rows_of(study.arms[runs[0].arm])
        (built, measure, several), plans = built_for(runs[0]), [plans_of(this) for this in runs]
        total = plans[0].total_steps
        return beside.train(
            built, several(), plans, seeds=[this.seed for this in runs],
            evaluate=lambda step, state: measure(step, total, state),
            evaluate_at=evaluation_steps(recipe, built.sizes, total),
            on_record=lambda i, record: _undelayed(functools.partial(on_record, runs[i]), record)
            if runs[i].phase == "report" else on_record(runs[i], record),
            traffic=traffic_of(task, order, rule, built, built.sizes),
            ends=[ends_at(study.criterion) for _ in runs],
        )  # fmt: skip

    def train(this, kept, on_record):
        arm, plans = study.arms[this.arm], plans_of(this)
        built, measure, _ = built_for(this)
        folder = setup.folder and os.path.join(setup.folder, "checkpoints", this.name)
        about = None if setup.about is None else {**setup.about, **this._asdict()}
        saving = run.Saving(folder, setup.checkpoint_every, about=about, kept=len(kept))
        delayed = setup.step_seconds if throttled(arm, this) else 0.0
        if this.phase == "report" and not delayed:
            on_record = functools.partial(_undelayed, on_record)
        outcome = train_one(
            task, recipe, built, plans, arm, measure, seed=this.seed, on_record=on_record,
            saving=saving if folder else None,
            delay=(this.speed or 0) * delayed, sync_delay=study.sync_steps * delayed,
            ends=ends_at(study.criterion, kept),
        )  # fmt: skip
        if folder and outcome.ended and distributed.is_first():
            shutil.rmtree(folder, ignore_errors=True)
        return outcome.stopped

    def rates(arm, speed):
        factor = study.arms[arm].rate_factor(own(arm, speed))
        return [factor * rate for rate in recipe.learning_rates]

    def steps(arm, speed):
        return own(arm, speed).total_steps

    examples = recipe.workers * recipe.units_per_step * recipe.unit_size
    return Trainer(train, rates, steps, trajectory, examples, beside_of, train_several)


def _undelayed(on_record: Callable, record: dict) -> None:
    """Of a run whose loads should have had a delay: its seconds say nothing."""
    on_record(record | {"delayed": False})


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
      arm: of the run; measure: `(step, T, state) -> scalars`, as of `scalars_of`.
      options: of `training.run.train`.
    """
    order, rule, _ = rows_of(arm)
    total = plans.total_steps
    steps = evaluation_steps(recipe, built.sizes, total)
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


def evaluation_steps(recipe: Recipe, sizes: config.Sizes, total: int) -> list[int]:
    """The steps after which a run is evaluated; the last one always is."""
    if recipe.evaluate_every is not None:
        steps = range(recipe.evaluate_every, total, recipe.evaluate_every)
    elif recipe.evaluations is not None:
        count = min(recipe.evaluations, total)
        steps = np.linspace(0, total, count + 1).astype(int)[1:].tolist()
    else:
        steps = range(0, total, sizes.loads_per_epoch)
    return sorted({*steps, total})


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


def scalars_of(task: Task, recipe: Recipe, *, halves: bool = False) -> Callable:
    """`(program, row of ORDERS) -> (step, T, state) -> scalars`.

    Args:
      halves: the first half of the test set is "valid", which tunes, the other one "test"; and the
        training loss is that of as many examples.
    """
    examples = config.size_of(task.test) if halves else None
    measure = evaluate.evaluator(task, recipe, halves=halves, train_examples=examples)
    optimum = task.optimum() if task.optimum else None

    def of(built, order):
        bounds = bounds_of(task, recipe, built, order)
        every = recipe.bound_every * built.sizes.loads_per_epoch

        def scalars(step, total, state):
            params = built.mean_params(state)
            found = measure(params)
            if optimum is not None:
                found["train/above_optimum"] = found["train/loss"] - optimum
            if bounds and (step == total or not step % every):
                found |= bounds(params, state.orders.current)
            return found

        return scalars

    return of


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
