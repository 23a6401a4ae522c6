"""What does an epoch cost with balancing? Seconds per epoch of the CD-GraB tasks, order by order.

DIR of --data_root has a folder for every set, as the tasks read them: hmda (2017-NJ-features.zip,
2017-NJ-target.zip), m4 (Weekly-train.csv, Weekly-test.csv), wikitext2 (test.txt, valid.txt), tfds
(the prepared cifar10). Rows whose data are not there are left out, and the reason is printed.

An epoch is that of the training loop, with the drawing or finishing of the next order, without
evaluation and compilation; all but HMDA's are of a part of the set. The orders of a row take turns,
one epoch each, after an epoch to warm up. times_rr is the median over the turns of an order's
seconds over those of D-RR in the same turn; beside it the 95 % interval of that median (of fewer
than six turns the range). D-RR's permutations are drawn on the host, beside the steps; times_so is
the same median against one fixed order.

Published, off the authors' own plots (Cooper et al., CD-GraB, 2023,
https://arxiv.org/abs/2302.00845): 1.5 to 2.1 times D-RR, from a host loop that waits at every pair.
Aim: times_rr of CD-GraB below the published number of its row. Only the ratios compare: their
seconds are of other machines and whole sets.

Writes metrics.jsonl, a line per epoch, and table.md into --output_dir; rows that are measured to
the end are kept when the same command, or one with other --rows, is given again.
"""

import collections
import os
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags

from experiments import flags as dialect
from experiments.bench_parts.timing import in_turns, median_interval, training_calls
from experiments.results import records
from experiments.results.tables import markdown
from experiments.studies import recipes
from experiments.studies.tables import ORDERS
from experiments.tasks import Recipe, Task
from experiments.training.parts import num_params

REPEATS = 9
BASELINE = "rr"
SETTING = ("workers", "units_per_step", "unit_size")  # fields of a recipe that are flags


class Row(NamedTuple):
    """A task, the folder of its data in --data_root, and how it is run."""

    task: str
    choices: dict
    folder: str
    num_train: int | None = None  # so that an epoch takes less than a second
    setting: dict = {}  # what differs from the task's own recipe
    published: tuple[float, float] | None = None  # seconds per epoch, CD-GraB and D-RR


# LeNet has batches of 64 for every W, as published.
ROWS = {
    "hmda": Row("hmda", {"model": "logistic"}, "hmda", published=(68, 36)),
    "m4": Row("m4_weekly", {"model": "mlp"}, "m4", 40_000, published=(73, 35)),
    "lstm": Row("wikitext2_small", {"model": "lstm"}, "wikitext2", 512, published=(22.5, 15)),
    "gpt2": Row("wikitext2_small", {"model": "gpt2"}, "wikitext2", 256),
} | {
    f"lenet_{workers}": Row("cifar10_small", {"model": "lenet"}, "tfds", 1024,
                            {"workers": workers, "unit_size": 64 // workers})
    for workers in (4, 16, 64)
}  # fmt: skip


def measure(task: Task, recipe: Recipe, *, orders: Sequence[str], repeats: int) -> list[dict]:
    """One record per order and timed epoch, all orders in turns, after an epoch to warm up."""
    recipe = recipe._replace(epochs=1, total_steps=None)
    calls, steps = training_calls(task, recipe, {name: (name, "parallel") for name in orders})
    shared = {name: getattr(recipe, name) for name in SETTING}
    shared |= {"steps": steps, "parameters": num_params(task.model)}
    return [
        shared | {"order": order, "turn": turn, "seconds": seconds}
        for order, times in in_turns(calls, repeats).items()
        for turn, seconds in enumerate(times)
    ]


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
        published = ROWS[row].published if row in ROWS and order == "cd_grab" else None
        lines.append({
            "row": row, "W x B x unit": " x ".join(str(first[name]) for name in SETTING),
            "parameters": first["parameters"], "steps": first["steps"],
            "order": ORDERS[order].label, "s_per_epoch": f"{np.median(seconds):.3g}",
            "times_rr": f"{middle:.3f}",
            "interval": "-" if order == BASELINE else f"{low:.3f} to {high:.3f}",
            "times_so": "-" if fixed is None else f"{np.median(seconds / fixed):.3f}",
            "published": "{:.1f} ({:g}/{:g} s)".format(published[0] / published[1], *published)
            if published else "-",
        })  # fmt: skip
    return lines


def load(name: str, values: flags.FlagValues) -> tuple[Task, Recipe]:
    """The task and recipe of a row of the table, or of --task, with what flags choose.

    Raises:
      ValueError: if the data are not there.
      ImportError: if the package that reads them is not there.
    """
    row = Row(values.task, {}, "") if values.task else ROWS[name]
    data_dir = values.data_dir if values.task else os.path.join(values.data_root, row.folder)
    chosen = row.choices | dialect.given(values, dialect.choices())
    first = chosen.pop("num_train", row.num_train)
    task, recipe = recipes.load(row.task, data_dir, **chosen)
    task = task._replace(train=jax.tree.map(lambda x: x[: first or None], task.train))
    return task, recipe._replace(**(row.setting | dialect.given(values, SETTING)))


def _check(values):
    if BASELINE not in dialect.names_of(values, "arms", ORDERS):
        raise app.UsageError(f"--arms is {values.arms}: it must hold rr, the baseline.")
    if not (values.task or values.data_root):
        raise app.UsageError(
            "pass --data_root=DIR with the folders hmda, m4, wikitext2 and tfds, some or all, or "
            "--task, such as --task=digits, which needs no data."
        )


def main(values: flags.FlagValues) -> None:
    _check(values)
    repeats, folder = values.repeats or REPEATS, values.output_dir
    own = " ".join(filter(None, (values.task, values.model)))
    settings = dialect.given(values, (*SETTING, *dialect.choices(), "arms")) | {"repeats": repeats}
    done = records.open_folder(folder, settings, overwrite=values.overwrite)
    metrics, whole = os.path.join(folder, records.METRICS), len(set(values.arms)) * repeats
    counts = collections.Counter(r["row"] for r in done)
    found = [r for r in done if counts[r["row"]] == whole]  # of rows measured to the end
    records.write_lines(metrics, found)
    for name in [own] if values.task else values.rows or ROWS:
        if counts[name] == whole:
            continue
        try:
            task, recipe = load(name, values)
        except (ValueError, ImportError) as error:
            if values.task:
                raise
            print(f"{name} is left out: {error}")
            continue
        timed = measure(task, recipe, orders=values.arms, repeats=repeats)
        found += [{"row": name} | record for record in timed]
        records.write_lines(metrics, found)
    if not found:
        raise app.UsageError(f"no row has its data in --data_root={values.data_root}.")
    text = markdown(summarise(found))
    records.write_whole(os.path.join(folder, "table.md"), text + "\n")
    print(f"{text}\n\nWritten to {folder}: metrics.jsonl, table.md")
