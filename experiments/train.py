r"""One run: any task, any order, any synchronisation rule and any echo policy together.

    python -m experiments.train                           # digits, CD-GraB, QSR, no echo: seconds
    python -m experiments.train --order=rr --sync=parallel --echo=diffusion_cosine
    python -m experiments.train --task=mnist --model=lenet --data_dir=DIR --workers=4 --run=mesh
    python -m experiments.launch --processes=2 -- experiments.train --run=mesh --workers=2

Writes metrics.jsonl, metrics.csv, the plans, settings and versions into --output_dir, checkpoints
of the whole state, and in the end the mean over the workers as `model`, which orbax restores.
SIGTERM and SIGINT save and leave; the same command, given again, goes on from the last checkpoint,
and ends bitwise as the run that was never stopped.

T is --total_steps, or --epochs passes over the data without echoing; with echoing the same steps
take fewer loads.
"""

import os
import sys
from collections.abc import Callable, Sequence

from absl import app, flags

from experiments import loop, processes, records, resumable, run_setting, training, writers
from experiments.echo_policies import POLICIES
from experiments.flag_values import definer
from experiments.methods import METHODS
from experiments.sync_rules import RULES
from experiments.task_flags import task_from_flags
from experiments.volume import order_sent
from experiments.whole import build, check_setup, num_params

FLAGS = flags.FLAGS


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define = definer(values)
    define(flags.DEFINE_enum, "order", "cd_grab", "which unit comes next", list(METHODS))
    define(flags.DEFINE_enum, "sync", "qsr", "when workers meet", list(RULES))
    define(flags.DEFINE_enum, "echo", "none", "when a batch is used again", list(POLICIES))
    define(flags.DEFINE_float, "learning_rate", None, "peak; the middle of the task's if unset")
    define(flags.DEFINE_integer, "seed", 0, "of parameters, orders and coins", lower_bound=0)
    define(flags.DEFINE_integer, "evaluations", 10, "over the run", lower_bound=1)
    define(flags.DEFINE_integer, "checkpoint_every", 500, "steps; 0: at the end", lower_bound=0)
    define(flags.DEFINE_enum, "input", "device", "where batches come from", ["device", "stream"])
    run_setting.define_flags(values)
    writers.define_flags(values)
    define(flags.DEFINE_string, "output_dir", None, "results/train_TASK if unset")


def describe(plans: loop.Plans, order_sent: Callable[[int], float]) -> str:
    """All that is known before the run; `order_sent` as of `volume`."""
    if plans.timed:
        return f"{plans.sync.describe()}\n\nechoing follows the input: loads are not known before"
    order = order_sent(plans.echo.loads) / plans.total_steps
    return (
        f"{plans.sync.describe()}\n\n{plans.echo.describe()}\n\nvolume: {plans.sync.volume:.3%} "
        f"by syncs and {order:.3%} by the order, of an all-reduce in every step"
    )


def main(argv: Sequence[str]) -> None:
    del argv
    processes.start()
    task, recipe = task_from_flags()
    setup = run_setting.setup_of(recipe)
    sizes = check_setup(task, setup)
    decisions = run_setting.decisions_from_flags(
        recipe, sizes.loads_per_epoch, sync=FLAGS.sync, echo=FLAGS.echo
    )
    rate = FLAGS.learning_rate
    if rate is None:
        rate = recipe.learning_rates[len(recipe.learning_rates) // 2]
    training.check_recipe(recipe._replace(learning_rates=(rate,)))
    plans = run_setting.plans_of(
        decisions, recipe, sizes.loads_per_epoch, rate=rate, seed=FLAGS.seed
    )
    method = METHODS[FLAGS.order]
    if FLAGS.dry_run:
        processes.say(describe(plans, order_sent(method, sizes, num_params(task.model))))
        return
    program = build(
        task,
        method,
        RULES[FLAGS.sync].rounds,
        setup,
        epochs=-(-decisions.total_steps // sizes.loads_per_epoch),
        streamed=FLAGS.input == "stream" or plans.timed,
        mesh=processes.mesh_of(FLAGS.run, recipe.workers),
    )
    folder = FLAGS.output_dir or os.path.join("results", f"train_{task.name}")
    names = ("model", "num_train", "order", "seed", "evaluations", "input", "run")
    settings = {name: FLAGS[name].value for name in names}
    settings |= {"task": task.name, "learning_rate": rate, **setup._asdict()}
    settings |= {**decisions._asdict(), "decay": [recipe.decay_every, recipe.decay_factor]}
    done = records.open_folder(folder, settings, overwrite=FLAGS.overwrite)
    stopped = resumable.train_in(
        folder,
        program,
        plans,
        seed=FLAGS.seed,
        evaluations=FLAGS.evaluations,
        checkpoint_every=FLAGS.checkpoint_every,
        done=done,
        tensorboard=FLAGS.tensorboard,
        overwrite=FLAGS.overwrite,
    )
    if stopped:
        sys.exit(128 + stopped)


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
