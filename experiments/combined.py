r"""Do the three decisions help each other? The factorial of order x sync x echo on one task.

    python -m experiments.combined                        # digits, embedded, a minute
    python -m experiments.combined --task=tinyshakespeare --data_dir=DIR --workers=4 ...

Eight arms: --order against D-RR, --sync against parallel, --echo against none. Every arm first
trains once at each learning rate and then, with the remaining seeds, at its best two; the mean over
seeds of the last train loss chooses. All arms take the same number of steps, under one seed from
the same parameters and first orders. Writes metrics.jsonl, table*.md, comparison.png,
effects.png and report.html into --output_dir; the same command goes on where it was stopped.

Expected: docs/combined.md holds the tables of two tasks, with their commands.

Simulated workers show no network, and resident data no slow input: seconds are those of the
computation. --load_steps and --sync_steps price what they leave out, in steps of computation.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
from absl import app, flags

from experiments import (
    combined_report,
    html_report,
    loop,
    processes,
    records,
    run_setting,
    writers,
)
from experiments.combined_runs import Arm, Run, finalists, run_of, runs_per_arm, whole_runs
from experiments.echo_policies import POLICIES
from experiments.flag_values import definer
from experiments.methods import METHODS
from experiments.run_setting import Decisions
from experiments.sync_rules import RULES
from experiments.task_flags import task_from_flags
from experiments.tasks import Recipe, Task
from experiments.volume import order_sent
from experiments.whole import build, check_setup, num_params

FLAGS = flags.FLAGS


class Factors(NamedTuple):
    """The second level of every factor; the first is what data-parallel training usually does."""

    order: str
    sync: str
    echo: str

    @property
    def arms(self) -> list[Arm]:
        return [
            Arm(order, sync, echo)
            for order in ("rr", self.order)
            for sync in ("parallel", self.sync)
            for echo in ("none", self.echo)
        ]


def compare_arms(
    task: Task,
    recipe: Recipe,
    decisions: Decisions,
    arms: Sequence[Arm],
    *,
    seeds: int,
    evaluations: int,
    mesh: jax.sharding.Mesh | None = None,
    done: Sequence[dict] = (),
    on_record: Callable[[dict], None] = lambda record: None,
) -> list[dict]:
    """Trains every arm at every learning rate with seed 0, then the other seeds at its best two.

    A run whose loss is not finite ends with a record that says so, and its rate is out.

    Args:
      task, recipe: what to train, in which setting; decisions: but for the arms' own.
      arms: of a factorial, or any.
      seeds: 0 .. seeds - 1; evaluations: evenly spread over a run.
      mesh: one device per worker, or None.
      done: records of an earlier call; whole runs among them are not repeated.
      on_record: called with every new record.

    Returns:
      All records of whole runs.
    """
    setup, optimum = run_setting.setup_of(recipe), task.optimum() if task.optimum else None
    per_epoch = check_setup(task, setup).loads_per_epoch
    all_records = whole_runs(done, decisions.total_steps)
    ran = {run_of(r) for r in all_records}
    rates = recipe.learning_rates
    total = len(arms) * runs_per_arm(len(rates), seeds) * decisions.total_steps
    examples = setup.workers * setup.units_per_step * setup.unit_size
    with processes.bar(total=total, unit="step", mininterval=0.5, smoothing=0) as bar:
        program, built_for = None, None

        def ensure(arm: Arm, run: Run):
            nonlocal program, built_for
            bar.set_description(f"{arm.label}, lr {run.learning_rate:g}, seed {run.seed}")
            if run in ran:  # in an earlier call
                bar.update(decisions.total_steps)
                return
            plans = plans_of(arm, decisions, recipe, per_epoch, run)
            kind = (arm.order, RULES[arm.sync].rounds)
            if kind != built_for:  # whether batches are echoed does not matter
                program, built_for = built(task, setup, arm, decisions, mesh), kind
            loop.warm_up(program, plans)
            ran.add(run)
            shown = 0
            for record in trained(program, plans, run, evaluations, optimum):
                all_records.append(record)
                on_record(record)
                bar.update(record["step"] - shown)
                shown = record["step"]
                speed = shown * examples / max(record["seconds"], 1e-9)
                loss = f"{record['batch_loss']:.4f}"
                bar.set_postfix(loss=loss, examples_per_s=f"{speed:,.0f}", refresh=False)

        for arm in arms:
            for rate in rates:
                ensure(arm, Run(*arm, rate, 0))
            # A rate at which a later seed diverges is out, and the next best takes its place.
            while missing := [
                Run(*arm, rate, seed)
                for rate in finalists(all_records, arm)
                for seed in range(1, seeds)
                if Run(*arm, rate, seed) not in ran
            ]:
                ensure(arm, missing[0])
    return all_records


def built(task, setup, arm: Arm, decisions: Decisions, mesh):
    """The program of an arm's order and rounds."""
    return build(
        task,
        METHODS[arm.order],
        RULES[arm.sync].rounds,
        setup,
        epochs=-(-decisions.total_steps // check_setup(task, setup).loads_per_epoch),
        mesh=mesh,
    )


def plans_of(arm: Arm, decisions: Decisions, recipe: Recipe, per_epoch: int, run: Run):
    """The plans of an arm, at a learning rate and with the coins of a seed."""
    own = decisions._replace(sync=arm.sync, echo=arm.echo)
    return run_setting.plans_of(own, recipe, per_epoch, rate=run.learning_rate, seed=run.seed)


def forecast(task, arms, decisions, recipe, machines) -> str:
    """What the arms cost, known before a run."""
    sizes, count = check_setup(task, run_setting.setup_of(recipe)), num_params(task.model)
    plans = {
        arm: plans_of(arm, decisions, recipe, sizes.loads_per_epoch, Run(*arm, 1.0, 0))
        for arm in arms
    }
    sent = {arm: order_sent(METHODS[arm.order], sizes, count) for arm in arms}
    return combined_report.forecast(plans, sent, machines)


def trained(program, plans: loop.Plans, run: Run, evaluations: int, optimum) -> Iterator[dict]:
    """The records of one run; the last one says if it diverged."""
    found, state = [], program.init(run.seed)
    try:
        loop.train(program, plans, state, evaluations=evaluations, on_record=found.append)
    except FloatingPointError as error:
        nothing = {"batch_loss": float("inf"), "train_loss": float("inf"), "seconds": 0.0}
        last = found[-1] if found else nothing
        found.append(last | {"step": plans.total_steps, "diverged": str(error)})
    for record in found:
        above = {} if optimum is None else {"suboptimality": record["train_loss"] - optimum}
        yield run._asdict() | {"diverged": None} | record | above


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define = definer(values)
    run_setting.define_flags(values)
    writers.define_flags(values)
    define(flags.DEFINE_enum, "order", "cd_grab", "against rr", list(METHODS))
    define(flags.DEFINE_enum, "sync", "qsr", "against parallel", list(RULES))
    define(flags.DEFINE_enum, "echo", "diffusion_cosine", "against none", list(POLICIES))
    define(flags.DEFINE_list, "learning_rates", None, "tried with every arm; the task's if unset")
    define(flags.DEFINE_integer, "seeds", 5, "runs per arm at its best rates", lower_bound=1)
    define(flags.DEFINE_integer, "evaluations", 50, "over a run", lower_bound=1)
    define(flags.DEFINE_float, "load_steps", 4.0, "priced: a load, in steps of computation")
    define(flags.DEFINE_float, "sync_steps", 2.0, "priced: an all-reduce, in the same unit")
    define(flags.DEFINE_string, "output_dir", None, "results/combined_TASK if unset")


def main(argv: Sequence[str]) -> None:
    del argv
    processes.start()
    task, recipe = task_from_flags()
    factors = Factors(FLAGS.order, FLAGS.sync, FLAGS.echo)
    if same := {"rr", "parallel", "none"} & set(factors):
        raise app.UsageError(f"--order, --sync, --echo name {same}: that is the first level.")
    if POLICIES[FLAGS.echo].timed:
        plans = [name for name, policy in POLICIES.items() if not policy.timed]
        raise app.UsageError(
            f"--echo is {FLAGS.echo}, which follows slow input, and data on the devices are not "
            f"slow: choose one of {', '.join(plans[1:])}."
        )
    setup = run_setting.setup_of(recipe)
    sizes = check_setup(task, setup)
    decisions = run_setting.decisions_from_flags(
        recipe, sizes.loads_per_epoch, sync=factors.sync, echo=factors.echo
    )
    machines = combined_report.prices(FLAGS.load_steps, FLAGS.sync_steps)
    if FLAGS.dry_run:
        processes.say(forecast(task, factors.arms, decisions, recipe, machines))
        return
    folder = FLAGS.output_dir or os.path.join("results", f"combined_{task.name}")
    settings = {name: FLAGS[name].value for name in ("model", "num_train", "evaluations", "run")}
    settings |= {"task": task.name, "decay": [recipe.decay_every, recipe.decay_factor]}
    settings |= setup._asdict() | decisions._asdict() | factors._asdict()
    done = records.open_folder(folder, settings, overwrite=FLAGS.overwrite)
    kept = whole_runs(done, decisions.total_steps)
    with writers.open_writers(
        folder, tensorboard=FLAGS.tensorboard, keep=kept, run_fields=Run._fields
    ) as write:
        all_records = compare_arms(
            task,
            recipe,
            decisions,
            factors.arms,
            seeds=FLAGS.seeds,
            evaluations=FLAGS.evaluations,
            mesh=processes.mesh_of(FLAGS.run, recipe.workers),
            done=done,
            on_record=write,
        )
    if processes.is_first():
        title = f"{task.name}, {recipe.workers} workers, {decisions.total_steps} steps"
        print(combined_report.report(all_records, factors.arms, folder, title, machines))
        html_report.of_folder(folder, title=title, command=html_report.command_line())
        print(f"\nWritten to {folder}: metrics, tables, pictures, report.html")


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
