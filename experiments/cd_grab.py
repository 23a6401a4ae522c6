r"""Does a coordinated example order need fewer epochs than random reshuffling?

    python -m experiments.cd_grab                      # digits, embedded, about a minute
    python -m experiments.cd_grab --task=hmda --data_dir=DIR --seeds=5
    python -m experiments.cd_grab --task=mnist --model=lenet --data_dir=DIR --orders=rr,cd_grab

Trains every order at every learning rate with every seed, from the same first orders, and writes
metrics, table.md, comparison.png and report.html into --output_dir. A run that was interrupted goes
on where it stopped when the same command is given again.

Expected on digits (32 workers, 5 seeds): see the table in the README. Deviations from Cooper et
al. 2023: the optimum is computed, every order is also shown at its own best learning rate, and
independent balance and the unzip order stand beside as controls.
"""

import os
from collections.abc import Sequence

from absl import app, flags
from tqdm import tqdm

from experiments import (
    compare,
    dry_run,
    html_report,
    plots,
    processes,
    records,
    training,
    writers,
)
from experiments.flag_values import definer
from experiments.methods import METHODS
from experiments.optimizers import OPTIMIZERS, SHAPES
from experiments.task_flags import task_from_flags
from experiments.tasks import TASKS, Recipe, Task

FLAGS = flags.FLAGS


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    orders = "rr,unzip,id_mean,id_pair,cd_grab"
    own = "; the task's own if unset"

    define = definer(values)

    def enum(name, choices, text):
        define(flags.DEFINE_enum, name, choices[0], text, choices)

    define(flags.DEFINE_enum, "task", "digits", "what to train on", sorted(TASKS))
    define(flags.DEFINE_string, "model", None, "the model" + own)
    define(flags.DEFINE_string, "data_dir", None, "where the task's data lie")
    define(
        flags.DEFINE_integer, "num_train", None, "first examples alone; all if unset", lower_bound=1
    )
    define(flags.DEFINE_list, "orders", orders, f"of {', '.join(METHODS)}; rr is the baseline")
    define(flags.DEFINE_integer, "seeds", 5, "runs per order and learning rate", lower_bound=1)
    define(flags.DEFINE_list, "learning_rates", None, "tried with every order" + own)
    define(flags.DEFINE_integer, "epochs", None, "passes over the data" + own)
    define(flags.DEFINE_integer, "workers", None, "W" + own)
    define(flags.DEFINE_integer, "units_per_step", None, "B, per worker" + own)
    define(flags.DEFINE_integer, "unit_size", None, "examples per unit" + own)
    define(flags.DEFINE_enum, "optimizer", None, "of all orders" + own, list(OPTIMIZERS))
    define(flags.DEFINE_float, "momentum", None, "of SGD; first moment of AdamW" + own)
    define(flags.DEFINE_float, "weight_decay", None, "of the optimizer" + own)
    define(flags.DEFINE_enum, "schedule", None, "of the learning rate" + own, list(SHAPES))
    define(flags.DEFINE_integer, "decay_every", None, "epochs, of --schedule=step" + own)
    define(flags.DEFINE_float, "decay_factor", None, "of --schedule=step" + own)
    define(flags.DEFINE_integer, "bound_every", None, "epochs between herding bounds, 0: never")
    enum("run", ["vmap", "mesh"], "all workers on one device, or one device per worker")
    enum("input", ["device", "stream"], "data that stay on the device, or read through tf.data")
    define(flags.DEFINE_string, "output_dir", None, "results/cd_grab_TASK if unset")
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")
    dry_run.define_flags(values)
    processes.define_flags(values)
    writers.define_flags(values)


def compare_orders(
    task: Task,
    recipe: Recipe,
    *,
    orders: Sequence[str],
    seeds: int,
    streamed: bool = False,
    mesh=None,
    done: Sequence[dict] = (),
    on_record=lambda record: None,
) -> list[dict]:
    """Trains every order at every learning rate with every seed.

    Args:
      task, recipe: what to train; orders: names of `METHODS`; seeds: 0 .. seeds - 1.
      streamed: read through tf.data; mesh: None simulates the workers on one device.
      done: records of an earlier call; whole runs among them are not repeated.
      on_record: called with every new record.

    Returns:
      All records, those of `done` that belong to whole runs included.
    """
    optimum = task.optimum() if task.optimum else None
    kept = whole_runs(done, recipe.epochs)
    all_records = list(kept)
    finished = {(r["order"], r["learning_rate"], r["seed"]) for r in kept}
    total = len(orders) * len(recipe.learning_rates) * seeds * recipe.epochs
    with processes.bar(total=total, unit="epoch", mininterval=0.5, smoothing=0) as bar:
        for order in orders:
            runs = [(order, rate, s) for rate in recipe.learning_rates for s in range(seeds)]
            missing = [run for run in runs if run not in finished]
            bar.update((len(runs) - len(missing)) * recipe.epochs)
            if not missing:
                continue
            program = training.build(task, METHODS[order], recipe, streamed=streamed, mesh=mesh)
            for _, rate, seed in missing:
                bar.set_description(f"{METHODS[order].label}, lr {rate:g}")
                for record in _train(recipe, program, order, seed, rate, optimum):
                    all_records.append(record)
                    on_record(record)
                    _show_progress(bar, record, len(task.train["y"]))
    return all_records


def _train(recipe, program, order, seed, rate, optimum):
    """The records of one run; one whose loss is not finite ends with a record that says so."""
    shared = {"order": order, "learning_rate": rate}
    last = {"seed": seed}
    try:
        for record in training.train(recipe, program, seed=seed, rate=rate, optimum=optimum):
            last = shared | record
            yield last
    except FloatingPointError as error:
        yield shared | last | {"epoch": recipe.epochs, "diverged": str(error)}


def _show_progress(bar: tqdm, record: dict, examples: int) -> None:
    if record["epoch"]:
        speed = record["epoch"] * examples / record["seconds"]
        loss = f"{record['train_loss']:.4f}"
        bar.set_postfix(loss=loss, examples_per_s=f"{speed:,.0f}", refresh=False)
        bar.update()


def whole_runs(done: Sequence[dict], epochs: int) -> list[dict]:
    """The records of runs that were finished."""
    ended = {(r["order"], r["learning_rate"], r["seed"]) for r in done if r["epoch"] == epochs}
    return [r for r in done if (r["order"], r["learning_rate"], r["seed"]) in ended]


def report(all_records: Sequence[dict], folder: str, title: str) -> str:
    """Writes table.md and comparison.png into the folder and returns the table."""
    text = compare.table(compare.summarise(all_records))
    for order, rate in compare.diverged(all_records):
        text += f"\n\n{METHODS[order].label} diverged at learning rate {rate:g}."
    records.write_whole(os.path.join(folder, "table.md"), text + "\n")
    plots.comparison(all_records, os.path.join(folder, "comparison.png"), title)
    return text


def main(argv: Sequence[str]) -> None:
    del argv
    processes.start()
    unknown = sorted(set(FLAGS.orders) - set(METHODS))
    if unknown or "rr" not in FLAGS.orders:
        raise app.UsageError(
            f"--orders is {','.join(FLAGS.orders)}: it must hold rr, the baseline, and names of "
            f"{', '.join(METHODS)}."
        )
    task, recipe = task_from_flags()
    if FLAGS.dry_run:
        processes.say(dry_run.of_orders(task, recipe, FLAGS.orders, dry_run.assumed(FLAGS)))
        return
    folder = FLAGS.output_dir or os.path.join("results", f"cd_grab_{task.name}")
    settings = {
        "task": task.name,
        "model": FLAGS.model,
        "recipe": recipe._asdict(),
        "run": FLAGS.run,
        "input": FLAGS.input,
    }
    if FLAGS.num_train:  # settings of whole sets stay as they were written before
        settings["num_train"] = FLAGS.num_train
    mesh = processes.mesh_of(FLAGS.run, recipe.workers)
    done = records.open_folder(folder, settings, overwrite=FLAGS.overwrite)
    with writers.open_writers(
        folder,
        tensorboard=FLAGS.tensorboard,
        keep=whole_runs(done, recipe.epochs),
        run_fields=("order", "learning_rate", "seed"),
    ) as write:
        all_records = compare_orders(
            task,
            recipe,
            orders=FLAGS.orders,
            seeds=FLAGS.seeds,
            streamed=FLAGS.input == "stream",
            mesh=mesh,
            done=done,
            on_record=write,
        )
    if not processes.is_first():
        return
    left_out = len(task.train["y"]) % (recipe.workers * recipe.unit_size)
    if left_out:
        print(f"{left_out} examples belong to no worker: they do not fill {recipe.workers} units.")
    title = f"{task.name}, {recipe.workers} workers"
    print(report(all_records, folder, title))
    html_report.of_folder(folder, title=title, command=html_report.command_line())
    print(f"\nWritten to {folder}: metrics, table.md, comparison.png, report.html")


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
