r"""When input is slow, is a batch worth using again? Arms x loading speeds x seeds on one task.

    python -m experiments.echoing                               # digits, embedded
    python -m experiments.echoing --recipe=mnist --data_dir=DIR
    python -m experiments.echoing --recipe=cifar10_resnet --data_dir=DIR
    python -m experiments.echoing --recipe=cifar10_mobilenet --data_dir=DIR
    python -m experiments.echoing --recipe=shakespeare --data_dir=DIR

A load takes R steps' time: a real loader thread waits out the declared delay of every load, R times
t_step, the time of a step without echo and without delay, measured at the start or given by
--step_seconds. Asked is what it takes to reach a fixed value of the test metric: seconds, loads,
steps and communication rounds.

Every arm (experiments/echo_arms.py) is tuned at every R on the validation half of the test set,
without the delay where it does not matter to the decisions: seed 0 at every learning rate, all
seeds at the best two; the fewest steps to the target choose. Then it runs with the delay and all
seeds, and the other half of the test set is reported. The echo factor is e = R, and 2 at R = 1,
where no echo is free. Under one seed all arms see the same batches in the same loads. p falls from
1 to 1/e over the recipe's horizon. Workers average once per load unless the arm says otherwise.

Writes metrics.jsonl, table.md and pictures into --output_dir; the same command goes on where it was
stopped. Expected: docs/echoing.md holds the tables of these commands.

Deviations from the paper (ICLR 2025 submission): small models and sets, a constant learning rate,
a target instead of a fixed number of loads, and workers that take turns on one device, so that
seconds show loading and computation and no network. lambda of the proximal arms is not tuned.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags

from experiments import (
    dry_run,
    echo_report,
    echo_training,
    html_report,
    processes,
    records,
    writers,
)
from experiments.echo_arms import ARMS, Setting
from experiments.echo_recipes import RECIPES, Recipe
from experiments.echo_training import Setup
from experiments.flag_values import definer
from experiments.tasks import Task

FLAGS = flags.FLAGS


class Run(NamedTuple):
    arm: str
    speed: float
    rate: float
    seed: int
    timed: bool  # with the delay


def compare_arms(
    task: Task,
    setup: Setup,
    *,
    arms: Sequence[str],
    speeds: Sequence[float],
    rates: Sequence[float],
    seeds: int,
    horizon: int,
    step_seconds: float,
    mesh: jax.sharding.Mesh | None = None,
    done: Sequence[dict] = (),
    on_record: Callable[[dict], None] = lambda record: None,
) -> list[dict]:
    """Tunes every arm at every speed, then times it with all seeds at its own best rate.

    Args:
      task, setup: what to train, and how.
      arms: names of `ARMS`; speeds: R > 0; rates: > 0; seeds: 0 .. seeds - 1.
      horizon: steps over which a falling p falls.
      step_seconds: t_step; a load takes R of it.
      mesh: one device per worker, or None.
      done: records of an earlier call; whole runs among them are not repeated.
      on_record: called with every new record.

    Returns:
      All records of whole runs.
    """
    all_records = whole_runs(done)
    ended = {key_of(r) for r in all_records if r["ended"]}
    programs, twins = {}, {}
    each = len(rates) + min(echo_report.FINALISTS, len(rates)) * (seeds - 1) + seeds
    bar = processes.bar(unit="run", total=len(arms) * len(speeds) * each)

    def ensure(run: Run, base_rate: float, tuning: bool):
        bar.set_description(f"{run.arm}, R {run.speed:g}, lr {run.rate:g}, seed {run.seed}")
        if run in ended:
            bar.update()
            return
        arm, setting = ARMS[run.arm], setting_of(setup, horizon, run.speed, run.seed)
        own = setup._replace(total_steps=setting.total_steps)
        shared = run._asdict() | {"base_rate": base_rate, "tuning": tuning}
        twin = None if run.timed else _trajectory(arm, setting, run)
        if twin in twins:
            new = [twins[twin] | shared]
        else:
            delay = run.speed * step_seconds if run.timed else 0.0
            kind = (arm.rounds, arm.proximal)
            if kind not in programs:
                programs[kind] = echo_training.build(task, arm, setup, mesh)
            new = list(_train(task, own, programs[kind], arm, setting, run, delay, shared))
            new = processes.of_first(new)  # all go on with the same rates
            if twin is not None:
                twins[twin] = new[-1]
            examples = new[-1]["step"] * setup.workers * setup.batch_size
            speed = examples / max(new[-1]["seconds"], 1e-9)
            bar.set_postfix(loss=f"{new[-1]['batch_loss']:.3f}", examples_per_s=f"{speed:,.0f}")
        for record in new if run.timed else new[-1:]:
            all_records.append(record)
            on_record(record)
        ended.add(run)
        bar.update()

    with bar:
        for speed in speeds:
            for name in arms:
                setting = setting_of(setup, horizon, speed, seed=0)
                # What decides by time is tuned with the delay.
                by_time = ARMS[name].policy(setting).online
                factor = ARMS[name].rate_factor(setting)
                base = {factor * rate: rate for rate in rates}
                for rate in base:
                    ensure(Run(name, speed, rate, 0, by_time), base[rate], True)
                for rate in echo_report.finalists(all_records, name, speed):
                    for seed in range(1, seeds):
                        ensure(Run(name, speed, rate, seed, by_time), base[rate], True)
                best = echo_report.best_rate(all_records, name, speed)
                for seed in range(seeds if best is not None else 0):
                    ensure(Run(name, speed, best, seed, True), base[best], by_time)
    return all_records


def setting_of(setup: Setup, horizon: int, speed: float, seed: int) -> Setting:
    """At a larger e more steps: those of echoed runs are shorter, and all have as much time."""
    setting = Setting(speed, setup.total_steps, horizon, jax.random.key(seed))
    return setting._replace(total_steps=setup.total_steps * setting.factor // 2)


def _trajectory(arm, setting, run):
    """What decides the parameters of a run without a delay: many arms and speeds share it."""
    sync = "per load" if arm.sync is None else arm.sync(setting).digest()
    policy = arm.policy(setting).digest()
    return policy, sync, arm.rounds, arm.proximal, run.rate, run.seed


def _train(task, setup, program, arm, setting, run: Run, delay, shared) -> Iterator[dict]:
    """The records of one run; the last one says if it diverged."""
    last = {"step": 0, "loads": 0, "rounds": 0, "seconds": 0.0, "batch_loss": float("inf")}
    try:
        for record in echo_training.train(
            task, setup, program, arm, setting, rate=run.rate, seed=run.seed, delay=delay
        ):
            last = shared | record | {"diverged": None}
            yield last
    except FloatingPointError as error:
        reached = {"valid": None, "test": None}
        yield shared | last | {"ended": True, "reached": reached, "diverged": str(error)}


def key_of(record: dict) -> Run:
    return Run(*(record[field] for field in Run._fields))


def whole_runs(done: Sequence[dict]) -> list[dict]:
    """The records of runs that have ended."""
    ended = {key_of(r) for r in done if r["ended"]}
    return [r for r in done if key_of(r) in ended]


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    own = "; the recipe's own if unset"

    define = definer(values)
    define(flags.DEFINE_enum, "recipe", "digits", "task and setting", list(RECIPES))
    define(flags.DEFINE_string, "data_dir", None, "where the task's data lie")
    define(flags.DEFINE_list, "arms", None, f"of {', '.join(ARMS)}" + own)
    define(flags.DEFINE_list, "speeds", None, "R, a load's time in steps" + own)
    define(flags.DEFINE_list, "rates", None, "learning rates tried with every arm" + own)
    define(flags.DEFINE_integer, "seeds", 3, "runs per arm at its best rates", lower_bound=1)
    define(flags.DEFINE_float, "target", None, "of the test metric" + own)
    define(flags.DEFINE_integer, "total_steps", None, "at most, at e = 2" + own, lower_bound=1)
    define(flags.DEFINE_integer, "horizon", None, "steps in which p falls" + own, lower_bound=3)
    define(flags.DEFINE_integer, "evaluate_every", None, "steps" + own, lower_bound=1)
    define(flags.DEFINE_integer, "workers", None, "W" + own, lower_bound=1)
    define(flags.DEFINE_integer, "batch_size", None, "per worker" + own, lower_bound=1)
    define(flags.DEFINE_float, "weight_decay", None, "of the optimizer" + own)
    define(flags.DEFINE_float, "proximal", None, "lambda of the proximal arm" + own)
    define(flags.DEFINE_float, "step_seconds", None, "t_step behind the delays; measured if unset")
    define(flags.DEFINE_enum, "run", "turns", "on one device, or one each", ["turns", "mesh"])
    define(flags.DEFINE_string, "output_dir", None, "results/echoing_RECIPE if unset")
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")
    dry_run.define_flags(values)
    processes.define_flags(values)
    writers.define_flags(values)


def recipe_from_flags(values: flags.FlagValues = FLAGS) -> Recipe:
    """The chosen recipe with the flags that are set in place of its fields.

    Raises:
      ValueError: for arms that are not known, and rates or speeds that are not positive.
    """
    given = {name: values[name].value for name in Recipe._fields if name in values}
    for name in ("rates", "speeds"):
        if given[name]:
            given[name] = tuple(float(v) for v in given[name])
    recipe = RECIPES[values.recipe]._replace(**{k: v for k, v in given.items() if v is not None})
    if unknown := sorted(set(recipe.arms) - set(ARMS)):
        raise ValueError(f"--arms has {unknown}: it must hold names of {', '.join(ARMS)}.")
    for name in ("rates", "speeds"):
        for value in getattr(recipe, name):
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"--{name} has {value}: all must be positive and finite.")
    return recipe


def measured_step(path: str, measure: Callable[[], float]) -> float:
    """t_step of this folder's runs: measured once, so that all of them have the same delays."""
    known = None
    if processes.is_first() and os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            known = json.load(file)["step_seconds"]
    known = processes.of_first(known)
    if known is not None:
        return known
    seconds = processes.of_first(measure())
    records.write_whole(path, json.dumps({"step_seconds": seconds}) + "\n")
    return seconds


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    processes.start(values)
    recipe = recipe_from_flags(values)
    setup = Setup(**{field: getattr(recipe, field) for field in Setup._fields})
    if values.dry_run:
        settings = {r: setting_of(setup, recipe.horizon, r, seed=0) for r in recipe.speeds}
        task = recipe.load(None, abstract=True)
        processes.say(dry_run.of_arms(task, recipe, settings, dry_run.assumed(values)))
        return
    task = recipe.load(values.data_dir)
    folder = values.output_dir or os.path.join("results", f"echoing_{values.recipe}")
    passed = ("load", "rates", "arms", "speeds")  # more of these go on in the same folder
    settings = {k: v for k, v in recipe._asdict().items() if k not in passed}
    settings |= {"recipe": values.recipe, "step_seconds": values.step_seconds}
    if values.run != "turns":  # settings of workers in turns stay as they were written before
        settings["run"] = values.run
    mesh = processes.mesh_of(values.run, recipe.workers)
    done = records.open_folder(folder, settings, overwrite=values.overwrite)
    timing = os.path.join(folder, "step.json")
    if not done and processes.is_first() and os.path.exists(timing):
        os.remove(timing)  # of a forgotten run

    def measure():
        program = echo_training.build(task, ARMS["none"], setup, mesh)
        return echo_training.step_seconds(task, setup, program, ARMS["none"])

    seconds = values.step_seconds or measured_step(timing, measure)
    processes.say(f"a step takes {1e3 * seconds:.2f} ms; a load R times that")
    with writers.open_writers(
        folder,
        tensorboard=values.tensorboard,
        keep=whole_runs(done),
        run_fields=Run._fields,
    ) as write:
        all_records = compare_arms(
            task,
            setup,
            arms=recipe.arms,
            speeds=recipe.speeds,
            rates=recipe.rates,
            seeds=values.seeds,
            horizon=recipe.horizon,
            step_seconds=seconds,
            mesh=mesh,
            done=done,
            on_record=write,
        )
    if not processes.is_first():
        return
    title = (
        f"{values.recipe}, {recipe.workers} workers, a step takes {1e3 * seconds:.1f} ms, "
        f"to {recipe.metric} {recipe.target:g}"
    )
    print(
        echo_report.report(all_records, folder, title, metric=recipe.metric, target=recipe.target)
    )
    html_report.of_folder(folder, title=title, command=html_report.command_line())
    print(f"\nWritten to {folder}: metrics, table.md, pictures, report.html")


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
