r"""What does an epoch cost with balancing? Seconds per epoch of the CD-GraB tasks, order by order.

    python -m experiments.bench_epochs --data_root=DIR     # minutes, half of them compilation
    python -m experiments.bench_epochs --data_root=DIR --rows=hmda,m4 --num_train=0
    python -m experiments.bench_epochs --task=digits --orders=rr,cd_grab

DIR has a folder for every set, as the tasks read them: hmda (2017-NJ-features.zip and
2017-NJ-target.zip), m4 (Weekly-train.csv, Weekly-test.csv), wikitext2 (test.txt, valid.txt), tfds
(the prepared cifar10). Rows whose data are not there are left out, and the reason is printed.

An epoch is that of `training.build`, with the drawing or finishing of the next order, without
evaluation and compilation. All but HMDA's are of a part of the set, with the same workers. The
orders of a row take turns in one process, one epoch each, after an epoch to warm up; no turn is
dropped. times_rr is the median over the turns of an order's seconds over those of D-RR in the same
turn; beside it the 95 % interval of that median (order statistics; of fewer than six turns the
range, which covers less). D-RR looks at no gradient but draws permutations, which cost as much as
the steps of tiny models: times_so is the same median against one fixed order, which draws nothing.

Published, off the authors' own plots (Cooper et al., CD-GraB, 2023,
https://arxiv.org/abs/2302.00845): 1.5 to 2.1 times D-RR, from a host loop that waits at every pair.
Aim: times_rr of CD-GraB below the published number of its row. Expected (one core, --repeats=7):
hmda 0.47, m4 1.53, lstm 1.04, gpt2 1.22, lenet 1.06, 1.05 and 1.23. Only the ratios compare: their
seconds are of other machines and whole sets. Here one device simulates all workers, the text and
its models are those of `wikitext2_small`, the images the 4,096 of `cifar10_small`.

Writes metrics.jsonl, a line per epoch, and table.md into --output_dir; rows that are measured to
the end are kept when the same command, or one with other --rows, is given again.
"""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags
from scipy.stats import binom

from experiments import compare, records, training
from experiments.flag_values import definer
from experiments.methods import METHODS
from experiments.tasks import TASKS, Recipe, Task
from experiments.timing import in_turns

FLAGS = flags.FLAGS
BASELINE = "rr"
SETTING = ("workers", "units_per_step", "unit_size")  # fields of a recipe that are flags


class Row(NamedTuple):
    """A task, the folder of its data in --data_root, and how it is run."""

    task: str
    model: str
    folder: str
    num_train: int | None = None  # so that an epoch takes less than a second
    setting: dict = {}  # what differs from the task's own recipe
    published: tuple[float, float] | None = None  # seconds per epoch, CD-GraB and D-RR


ROWS = {
    "hmda": Row("hmda", "logistic", "hmda", published=(68, 36)),
    "m4": Row("m4_weekly", "mlp", "m4", 40_000, published=(73, 35)),
    "lstm": Row("wikitext2_small", "lstm", "wikitext2", 512, published=(22.5, 15)),
    "gpt2": Row("wikitext2_small", "gpt2", "wikitext2", 256),
    # Batches of 64 for every W, as published.
    "lenet_4": Row("cifar10_small", "lenet", "tfds", 1024, {"workers": 4, "unit_size": 16}),
    "lenet_16": Row("cifar10_small", "lenet", "tfds", 1024, {"workers": 16, "unit_size": 4}),
    "lenet_64": Row("cifar10_small", "lenet", "tfds", 1024, {"workers": 64, "unit_size": 1}),
}


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    orders = "rr,so,unzip,id_pair,cd_grab"
    own = "; the row's own if unset"

    define = definer(values)
    define(flags.DEFINE_string, "data_root", None, "folder of the sets' folders")
    define(flags.DEFINE_list, "rows", ",".join(ROWS), "of the table")
    define(flags.DEFINE_enum, "task", None, "one task instead of the table", sorted(TASKS))
    define(flags.DEFINE_string, "model", None, "of --task; its own if unset")
    define(flags.DEFINE_string, "data_dir", None, "where the data of --task lie")
    define(flags.DEFINE_list, "orders", orders, f"of {', '.join(METHODS)}; rr is the baseline")
    define(flags.DEFINE_integer, "workers", None, "W" + own)
    define(flags.DEFINE_integer, "units_per_step", None, "B, per worker" + own)
    define(flags.DEFINE_integer, "unit_size", None, "examples per unit" + own)
    define(flags.DEFINE_integer, "num_train", None, "examples that train, the first of every set; "
           "0: all" + own, lower_bound=0)  # fmt: skip
    define(flags.DEFINE_integer, "repeats", 9, "timed epochs of every order", lower_bound=1)
    define(flags.DEFINE_string, "output_dir", "results/bench_epochs", "where the numbers go")
    define(flags.DEFINE_bool, "overwrite", False, "forget another run in the output folder")


def cut(task: Task, num_train: int | None) -> Task:
    """The task with at most the first `num_train` of its training examples; 0 or None: all."""
    return task._replace(train=jax.tree.map(lambda x: x[: num_train or None], task.train))


def measure(task: Task, recipe: Recipe, *, orders: Sequence[str], repeats: int) -> list[dict]:
    """One record per order and timed epoch, all orders in turns.

    Args:
      task, recipe: what is trained, at the first learning rate of the recipe.
      orders: names of `METHODS`; repeats: timed epochs of each, after one to warm up.
    """
    calls, steps = {}, 0
    for order in orders:
        program = training.build(task, METHODS[order], recipe)
        calls[order] = _epochs(program, recipe.learning_rates[0])
        num_units = jax.tree.leaves(program.data)[0].shape[1]
        steps = -(-num_units // recipe.units_per_step)
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    shared = {name: getattr(recipe, name) for name in SETTING} | {
        "steps": steps,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
    }
    return [
        shared | {"order": order, "turn": turn, "seconds": seconds}
        for order, times in in_turns(calls, repeats).items()
        for turn, seconds in enumerate(times)
    ]


def _epochs(program: training.Program, rate: float) -> Callable:
    """A call that trains one epoch more; buffers are donated, so the state is kept here."""
    held, key = list(program.init(0, rate)), jax.random.key(0)

    def epoch():
        held[0], held[1], *_ = program.epoch(*held, key)
        return held

    return epoch


def median_interval(values) -> tuple[float, float, float]:
    """Median and the order statistics that hold it with 95 % confidence, if there are six."""
    ordered = np.sort(np.asarray(values, float))
    count = len(ordered)
    low = int(binom.ppf(0.025, count, 0.5))
    ends = max(low - 1, 0), min(count - low, count - 1)
    return float(np.median(ordered)), *(float(ordered[end]) for end in ends)


def summarise(found: Sequence[dict]) -> list[dict]:
    """Lines of the table: one per row and order, in the order of the records."""
    times = {}
    for record in sorted(found, key=lambda r: r["turn"]):
        times.setdefault((record["row"], record["order"]), []).append(record["seconds"])
    times = {name: np.array(seconds) for name, seconds in times.items()}
    lines = []
    for first in (r for r in found if r["turn"] == 0):
        row, order = first["row"], first["order"]
        seconds, fixed = times[row, order], times.get((row, "so"))
        middle, low, high = median_interval(seconds / times[row, BASELINE])
        lines.append({
            "row": row, "W x B x unit": " x ".join(str(first[name]) for name in SETTING),
            "parameters": first["parameters"], "steps": first["steps"],
            "order": METHODS[order].label, "s_per_epoch": f"{np.median(seconds):.3g}",
            "times_rr": f"{middle:.3f}",
            "interval": "-" if order == BASELINE else f"{low:.3f} to {high:.3f}",
            "times_so": "-" if fixed is None else f"{np.median(seconds / fixed):.3f}",
            "published": _published(row) if order == "cd_grab" else "-",
        })  # fmt: skip
    return lines


def _published(row):
    if row not in ROWS or ROWS[row].published is None:
        return "-"
    balanced, plain = ROWS[row].published
    return f"{balanced / plain:.1f} ({balanced:g}/{plain:g} s)"


def whole_rows(done: Sequence[dict], orders: Sequence[str], repeats: int) -> list[dict]:
    """The records of rows that were measured to the end."""
    count = {row: sum(r["row"] == row for r in done) for row in {r["row"] for r in done}}
    return [r for r in done if count[r["row"]] == len(set(orders)) * repeats]


def load(name: str, values: flags.FlagValues = FLAGS) -> tuple[Task, Recipe]:
    """The task and recipe of a row of the table, or of --task.

    Raises:
      ValueError: if the data are not there.
      ImportError: if the package that reads them is not there.
    """
    if values.task:
        row, data_dir = Row(values.task, values.model, ""), values.data_dir
    else:
        row = ROWS[name]
        data_dir = os.path.join(values.data_root, row.folder)
    task = TASKS[row.task](data_dir, **({"model": row.model} if row.model else {}))
    given = {field: values[field].value for field in SETTING}
    given = {field: value for field, value in given.items() if value is not None}
    recipe = task.recipe._replace(**(row.setting | given))
    return cut(task, row.num_train if values.num_train is None else values.num_train), recipe


def _check(values):
    for flag, table in (("orders", METHODS), ("rows", ROWS)):
        unknown = sorted(set(values[flag].value) - set(table))
        if unknown:
            raise app.UsageError(f"--{flag} has {unknown}: choose of {', '.join(table)}.")
    if BASELINE not in values.orders:
        raise app.UsageError(f"--orders is {values.orders}: it must hold rr, the baseline.")
    if not (values.task or values.data_root):
        raise app.UsageError(
            "pass --data_root=DIR with the folders hmda, m4, wikitext2 and tfds, some or all, or "
            "--task, such as --task=digits, which needs no data."
        )


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    _check(values)
    names = [" ".join(filter(None, (values.task, values.model)))] if values.task else values.rows
    settings = {k: values[k].value for k in (*SETTING, "orders", "num_train", "repeats")}
    done = records.open_folder(values.output_dir, settings, overwrite=values.overwrite)
    found = whole_rows(done, values.orders, values.repeats)
    metrics = os.path.join(values.output_dir, "metrics.jsonl")
    records.write_lines(metrics, found)
    for name in names:
        if any(record["row"] == name for record in found):
            continue
        try:
            task, recipe = load(name, values)
        except (ValueError, ImportError) as error:
            if values.task:
                raise
            print(f"{name} is left out: {error}")
            continue
        timed = measure(task, recipe, orders=values.orders, repeats=values.repeats)
        found += [{"row": name} | record for record in timed]
        records.write_lines(metrics, found)
    if not found:
        raise app.UsageError(f"no row has its data in --data_root={values.data_root}.")
    text = compare.markdown(summarise(found))
    records.write_whole(os.path.join(values.output_dir, "table.md"), text + "\n")
    print(f"{text}\n\nWritten to {values.output_dir}: metrics.jsonl, table.md")


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
