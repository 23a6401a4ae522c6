r"""When should workers talk? Synchronisation rules x seeds on one task.

    python -m experiments.qsr                                   # digits, embedded, a minute
    python -m experiments.qsr --recipe=mnist --data_dir=DIR
    python -m experiments.qsr --recipe=cifar10_resnet --data_dir=DIR
    python -m experiments.qsr --recipe=cifar10_vit --data_dir=DIR

Every rule first trains once at each peak learning rate and then, with the remaining seeds, at the
best two; the mean over seeds on half of the test set chooses between them, for one seed cannot. The
other half of the test set is reported. All rules see the
same examples in the same steps under one seed. Writes metrics.jsonl, table.md and comparison.png
into --output_dir; the same command goes on where it was stopped.

The rules, for T steps: parallel (mean gradient every step), gradient accumulation and constant H
(one sync every H_base steps), post-local (every step for T/2, then every H_base), SWAP (every
H_base for 0.8 T, then one round), QSR, and H ~ 1/eta and 1/eta^3 with the coefficient at which they
communicate as much as QSR.

Expected: docs/local_steps.md holds the tables of these commands, with --seeds=3 --evaluations=10
for all but digits; an hour and more per CIFAR-10 recipe on one core, five minutes for MNIST.

Deviations from Gu et al. 2024: small models on small sets, minutes instead of 90 to 300 epochs, no
augmentation, growth = alpha / peak rate fixed per recipe instead of tuned, and workers that take
turns on one device, so that seconds show the computation and no network.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags

from experiments import (
    dry_run,
    html_report,
    local_training,
    processes,
    records,
    sync_report,
    writers,
)
from experiments.flag_values import definer
from experiments.local_training import Setup
from experiments.optimizers import SHAPES
from experiments.sync_recipes import RECIPES, Recipe, setting_of
from experiments.sync_rules import RULES, Setting
from experiments.tasks import Task

FLAGS = flags.FLAGS


class Run(NamedTuple):
    rule: str
    peak_rate: float
    seed: int


def runs(rules: Sequence[str], rates: Sequence[float], seeds: int) -> int:
    """How many runs a comparison takes."""
    return len(rules) * (len(rates) + min(sync_report.FINALISTS, len(rates)) * (seeds - 1))


def compare_rules(
    task: Task,
    setup: Setup,
    setting: Setting,
    *,
    rules: Sequence[str],
    peak_rates: Sequence[float],
    seeds: int,
    mesh: jax.sharding.Mesh | None = None,
    done: Sequence[dict] = (),
    on_record: Callable[[dict], None] = lambda record: None,
) -> list[dict]:
    """Trains every rule at every peak rate with seed 0, then the other seeds at its best two.

    A run whose loss is not finite ends with a record that says so, and its rate is out.

    Args:
      task, setup, setting: what to train, and how.
      rules: names of `RULES`.
      peak_rates: > 0; seeds: 0 .. seeds - 1.
      mesh: one device per worker, or None.
      done: records of an earlier call; whole runs among them are not repeated.
      on_record: called with every new record.

    Returns:
      All records of whole runs.
    """
    plans = {name: RULES[name].plan(setting) for name in rules}
    all_records = whole_runs(done, setup.total_steps)
    programs = {}
    total = runs(rules, peak_rates, seeds) * setup.total_steps
    examples = setup.workers * setup.batch_size
    with processes.bar(total=total, unit="step", mininterval=0.5, smoothing=0) as bar:

        def ensure(run: Run):
            bar.set_description(f"{RULES[run.rule].label}, lr {run.peak_rate:g}, seed {run.seed}")
            if any(key_of(r) == run for r in all_records):
                bar.update(setup.total_steps)
                return
            kind = RULES[run.rule].rounds
            if kind not in programs:
                programs[kind] = local_training.build(task, RULES[run.rule], setup, mesh)
            shown = 0
            for record in _train(task, setup, programs[kind], plans[run.rule], setting.rates, run):
                record = processes.of_first(record)  # all go on with the same rates
                all_records.append(record)
                on_record(record)
                bar.update(record["step"] - shown)
                shown = record["step"]
                speed = shown * examples / max(record["seconds"], 1e-9)
                bar.set_postfix(
                    loss=f"{record['batch_loss']:.4f}",
                    examples_per_s=f"{speed:,.0f}",
                    refresh=False,
                )

        for rule in rules:
            for rate in peak_rates:
                ensure(Run(rule, rate, 0))
            for rate in sync_report.finalists(all_records, rule):
                for seed in range(1, seeds):
                    ensure(Run(rule, rate, seed))
    return all_records


def _train(task, setup, program, plan, rates, run: Run) -> Iterator[dict]:
    """The records of one run; the last one says if it diverged."""
    shared = run._asdict()
    last = {"step": 0, "seconds": 0.0, "rounds": 0, "volume": 0.0, "batch_loss": float("inf")}
    try:
        for record in local_training.train(
            task, setup, program, plan, rates=run.peak_rate * rates, seed=run.seed
        ):
            last = shared | record | {"diverged": None}
            yield last
    except FloatingPointError as error:
        yield shared | last | {"step": setup.total_steps, "diverged": str(error)}


def key_of(record: dict) -> Run:
    return Run(*(record[field] for field in Run._fields))


def whole_runs(done: Sequence[dict], total_steps: int) -> list[dict]:
    """The records of runs that reached their last step."""
    ended = {key_of(r) for r in done if r["step"] == total_steps}
    return [r for r in done if key_of(r) in ended]


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    own = "; the recipe's own if unset"

    define = definer(values)
    define(flags.DEFINE_enum, "recipe", "digits", "task and setting", list(RECIPES))
    define(flags.DEFINE_string, "data_dir", None, "where the task's data lie")
    define(flags.DEFINE_list, "rules", ",".join(RULES), f"of {', '.join(RULES)}")
    define(flags.DEFINE_integer, "seeds", 5, "runs per rule at its best rates", lower_bound=1)
    define(flags.DEFINE_list, "peak_rates", None, "tried with every rule" + own)
    define(flags.DEFINE_integer, "total_steps", None, "T" + own, lower_bound=1)
    define(flags.DEFINE_integer, "warmup_steps", None, "of the learning rate" + own)
    define(flags.DEFINE_enum, "schedule", None, "after the warmup" + own, list(SHAPES))
    define(flags.DEFINE_float, "floor", None, "last rate / peak rate" + own)
    define(flags.DEFINE_integer, "decay_steps", None, "of --schedule=step" + own, lower_bound=1)
    define(flags.DEFINE_float, "decay_factor", None, "of --schedule=step" + own)
    define(flags.DEFINE_integer, "h_base", None, "least steps per round" + own)
    define(flags.DEFINE_float, "growth", None, "alpha / peak rate of QSR" + own)
    define(flags.DEFINE_integer, "h_max", None, "most steps per round of the growing rules")
    define(flags.DEFINE_integer, "workers", None, "W" + own, lower_bound=1)
    define(flags.DEFINE_integer, "batch_size", None, "per worker" + own, lower_bound=1)
    define(flags.DEFINE_float, "weight_decay", None, "of the optimizer" + own)
    define(flags.DEFINE_integer, "evaluations", 20, "over the run", lower_bound=1)
    define(flags.DEFINE_enum, "run", "turns", "on one device, or one each", ["turns", "mesh"])
    define(flags.DEFINE_string, "output_dir", None, "results/qsr_RECIPE if unset")
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")
    dry_run.define_flags(values)
    processes.define_flags(values)
    writers.define_flags(values)


def recipe_from_flags(values: flags.FlagValues = FLAGS) -> Recipe:
    """The chosen recipe with the flags that are set in place of its fields.

    Raises:
      ValueError: for rates that are not positive and finite.
    """
    given = {name: values[name].value for name in Recipe._fields if name in values}
    if values.peak_rates:
        given["peak_rates"] = tuple(float(r) for r in values.peak_rates)
    recipe = RECIPES[values.recipe]._replace(**{k: v for k, v in given.items() if v is not None})
    for rate in recipe.peak_rates:
        if not (np.isfinite(rate) and rate > 0):
            raise ValueError(f"a peak rate is {rate}: it must be positive and finite.")
    return recipe


def main(argv: Sequence[str]) -> None:
    del argv
    processes.start()
    if unknown := sorted(set(FLAGS.rules) - set(RULES)):
        raise app.UsageError(f"--rules has {unknown}: it must hold names of {', '.join(RULES)}.")
    recipe = recipe_from_flags()
    setting = setting_of(recipe, FLAGS.h_max)
    plans = {name: RULES[name].plan(setting) for name in FLAGS.rules}  # bad settings end here
    setup = Setup(
        recipe.workers,
        recipe.batch_size,
        recipe.optimizer,
        recipe.weight_decay,
        recipe.total_steps,
        FLAGS.evaluations,
    )
    if FLAGS.dry_run:
        task = recipe.load(None, abstract=True)
        processes.say(dry_run.of_rules(task, setup, plans, dry_run.assumed(FLAGS)))
        return
    task = recipe.load(FLAGS.data_dir)
    folder = FLAGS.output_dir or os.path.join("results", f"qsr_{FLAGS.recipe}")
    settings = {k: v for k, v in recipe._asdict().items() if k not in ("load", "peak_rates")}
    settings |= {
        "recipe": FLAGS.recipe,
        "h_max": FLAGS.h_max,
        "evaluations": FLAGS.evaluations,
        "run": FLAGS.run,
    }
    mesh = processes.mesh_of(FLAGS.run, recipe.workers)
    done = records.open_folder(folder, settings, overwrite=FLAGS.overwrite)
    for name in dict.fromkeys(r["rule"] for r in done):  # of an earlier call with other --rules
        plans.setdefault(name, RULES[name].plan(setting))
    for name, plan in plans.items() if processes.is_first() else ():
        plan.save(os.path.join(folder, f"plan_{name}.json"))
    with writers.open_writers(
        folder,
        tensorboard=FLAGS.tensorboard,
        keep=whole_runs(done, recipe.total_steps),
        run_fields=Run._fields,
    ) as write:
        all_records = compare_rules(
            task,
            setup,
            setting,
            rules=FLAGS.rules,
            peak_rates=recipe.peak_rates,
            seeds=FLAGS.seeds,
            mesh=mesh,
            done=done,
            on_record=write,
        )
    if not processes.is_first():
        return
    title = f"{FLAGS.recipe}, {recipe.workers} workers, {recipe.total_steps} steps"
    print(sync_report.report(all_records, plans, folder, title))
    html_report.of_folder(folder, title=title, command=html_report.command_line())
    print(f"\nWritten to {folder}: metrics, plans, table.md, comparison.png, report.html")


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
