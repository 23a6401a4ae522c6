r"""What does it cost? Microseconds and ratios, every row printed as it is measured.

    python -m experiments.bench --part=balance                  # minutes: kernel and step
    python -m experiments.bench --part=local_steps              # one worker, then a mesh of four
    python -m experiments.bench --part=loops                    # a minute: the loop's own share
    python -m experiments.bench --part=epochs --data_root=DIR   # minutes, half of them compilation
    python -m experiments.bench --part=epochs --task=digits --arms=rr,cd_grab
    python -m experiments.bench --part=echo                     # nothing else may run beside it

balance and local_steps: a step, in `experiments.step_costs`. All rows of a table are measured in
turns, in one process, after a warm-up: the median of --repeats.

loops: microseconds per step of the training loop, by order and rule, on digits with the published
units: every other cost of a step is small, so that what the host does between two segments shows.

epochs: seconds per epoch of the CD-GraB tasks, order by order, with the drawing or finishing of the
next order, without evaluation and compilation; all but HMDA's are of a part of the set. DIR of
--data_root has a folder for every set: hmda, m4, wikitext2, tfds (the prepared cifar10); rows whose
data are not there are left out, and the reason is printed. times_rr is the median over the turns of
an order's seconds over those of D-RR in the same turn, beside its 95 % interval; times_so the same
against one fixed order. Published, off the authors' own plots (Cooper et al., CD-GraB, 2023,
https://arxiv.org/abs/2302.00845): 1.5 to 2.1 times D-RR, from a host loop that waits at every pair.

echo: what slow input leaves of echoing, in `experiments.timing`. Other packages' loaders and loops
are timed in benchmarks/.
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags

from experiments import step_costs, timing
from experiments.results import records
from experiments.study import flags as dialect
from experiments.study import recipes
from experiments.study.tables import ORDERS, SYNC_RULES
from experiments.tasks import TASKS
from experiments.tasks.base import Recipe, Task
from experiments.training.config import num_params

FLAGS = flags.FLAGS
BASELINE = "rr"
SETTING = ("workers", "units_per_step", "unit_size")  # fields of a recipe that are flags
DEVICES = f"--xla_force_host_platform_device_count={step_costs.WORKERS}"
LOOPS = {
    f"{order} {sync}": (order, sync)
    for order in ("rr", "id_pair", "cd_grab")
    for sync in ("parallel", "accumulate", "qsr")
}


class Epochs(NamedTuple):
    """A task, the folder of its data in --data_root, and how it is run."""

    task: str
    choices: dict
    folder: str
    num_train: int | None = None  # so that an epoch takes less than a second
    setting: dict = {}  # what differs from the task's own recipe
    published: tuple[float, float] | None = None  # seconds per epoch, CD-GraB and D-RR


# LeNet has batches of 64 for every W, as published.
EPOCHS = {
    "hmda": Epochs("hmda", {"model": "logistic"}, "hmda", published=(68, 36)),
    "m4": Epochs("m4_weekly", {"model": "mlp"}, "m4", 40_000, published=(73, 35)),
    "lstm": Epochs("wikitext2_small", {"model": "lstm"}, "wikitext2", 512, published=(22.5, 15)),
    "gpt2": Epochs("wikitext2_small", {"model": "gpt2"}, "wikitext2", 256),
} | {
    f"lenet_{workers}": Epochs("cifar10_small", {"model": "lenet"}, "tfds", 1024,
                               {"workers": workers, "unit_size": 64 // workers})
    for workers in (4, 16, 64)
}  # fmt: skip


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    dialect.define(values, "task", "setting", task=None)  # all of epochs
    define = dialect.definer(values)
    text, names = flags.DEFINE_string, flags.DEFINE_list
    define(flags.DEFINE_enum, "part", "balance", "what to measure", list(PARTS))
    define(names, "rows", None, "some rows of a part's table; all if unset")
    define(flags.DEFINE_integer, "repeats", None, "timed calls of every row; the part's own if "
           "unset", lower_bound=1)  # fmt: skip
    define(text, "jsonl", None, "file for the rows as JSON lines, too")
    define(flags.DEFINE_integer, "steps", 400, "echo: T of every run", lower_bound=2)
    define(names, "ratios", ["2", "4", "8"], "echo: R, loads of so many steps' time")
    define(flags.DEFINE_float, "step_ms", 4.0, "echo: what a step is made to take",
           lower_bound=0.1)  # fmt: skip
    define(text, "data_root", None, "epochs: folder of the sets' folders")
    define(names, "arms", ["rr", "so", "unzip", "id_pair", "cd_grab"],
           f"epochs: orders, of {', '.join(ORDERS)}; rr is the baseline")  # fmt: skip


def balance(values: flags.FlagValues) -> Iterator[dict]:
    of = {"kernel": step_costs.kernel_rows, "step": step_costs.step_rows}
    for name in values.rows or of:
        yield from of[name](values.repeats or 9)


def local_steps(values: flags.FlagValues) -> Iterator[dict]:
    # Read when the first device is asked for, which is below.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}"
    of = {"step": step_costs.local_rows, "sync": step_costs.sync_rows}
    for name in values.rows or of:
        yield from of[name](values.repeats or 41)


def loops(values: flags.FlagValues) -> Iterator[dict]:
    task = TASKS["digits"](None)
    arms = {name: LOOPS[name] for name in values.rows or LOOPS}
    recipe = task.recipe._replace(epochs=20, schedule="cosine", floor=1e-3)
    calls, steps = timing.training_calls(task, recipe, arms)
    found = timing.medians(calls, values.repeats or 9)
    first = next(iter(found.values()))
    for name, seconds in found.items():
        order, sync = arms[name]
        yield {
            "part": "loops", "order": ORDERS[order].label, "rule": SYNC_RULES[sync].label,
            "us_per_step": round(seconds / steps * 1e6, 1),
            "times_first": round(seconds / first, 3),
        }  # fmt: skip


def epochs(values: flags.FlagValues) -> Iterator[dict]:
    if BASELINE not in dialect.names_of(values, "arms", ORDERS):
        raise app.UsageError(f"--arms is {values.arms}: it must hold rr, the baseline.")
    if not (values.task or values.data_root):
        raise app.UsageError(
            "pass --data_root=DIR with the folders hmda, m4, wikitext2 and tfds, some or all, or "
            "--task, such as --task=digits, which needs no data."
        )
    for name in [values.task] if values.task else values.rows or EPOCHS:
        row = Epochs(values.task, {}, "") if values.task else EPOCHS[name]
        try:
            task, recipe = _load(row, values)
        except (ValueError, ImportError) as error:
            if values.task:
                raise
            print(f"{name} is left out: {error}")
            continue
        arms = {order: (order, "parallel") for order in values.arms}
        calls, steps = timing.training_calls(task, recipe._replace(epochs=1), arms)
        times = timing.in_turns(calls, values.repeats or 9)
        yield from epochs_rows(name, row, task, recipe, steps, times)


def epochs_rows(name, row: Epochs, task, recipe, steps, times) -> Iterator[dict]:
    """One row per order; ratios are of the same turn."""
    times = {order: np.array(seconds) for order, seconds in times.items()}
    for order, seconds in times.items():
        middle, low, high = timing.median_interval(seconds / times[BASELINE])
        published = row.published if order == "cd_grab" else None
        yield {
            "part": "epochs", "row": name, "parameters": num_params(task.model), "steps": steps,
            "W x B x unit": " x ".join(str(getattr(recipe, field)) for field in SETTING),
            "order": ORDERS[order].label, "s_per_epoch": float(f"{np.median(seconds):.3g}"),
            "times_rr": round(middle, 3), "interval": f"{low:.3f} to {high:.3f}",
            "times_so": round(float(np.median(seconds / times["so"])), 3) if "so" in times else "-",
            "published": f"{published[0] / published[1]:.1f}" if published else "-",
        }  # fmt: skip


def _load(row: Epochs, values: flags.FlagValues) -> tuple[Task, Recipe]:
    """The task and recipe of a row, with what flags choose; raises where the data are not there."""
    data_dir = values.data_dir if values.task else os.path.join(values.data_root, row.folder)
    chosen = row.choices | dialect.given(values, dialect.choices())
    first = chosen.pop("num_train", row.num_train)
    task, recipe = recipes.load(row.task, data_dir, **chosen)
    task = task._replace(train=jax.tree.map(lambda x: x[: first or None], task.train))
    recipe = recipe._replace(**(row.setting | dialect.given(values, SETTING)))
    return task, recipe._replace(total_steps=None)


def echo(values: flags.FlagValues) -> Iterator[dict]:
    try:
        ratios = [float(r) for r in values.ratios]
    except ValueError:
        ratios = []
    if not ratios or not all(1 <= r < 1000 for r in ratios):
        raise app.UsageError(f"--ratios has {values.ratios}: pass numbers >= 1.")
    step = timing.step_of(values.step_ms / 1e3)
    yield from timing.echo_rows(step, ratios, steps=values.steps, repeats=values.repeats or 3)


PARTS = {  # and the names of their rows
    "balance": (balance, ("kernel", "step")),
    "local_steps": (local_steps, ("step", "sync")),
    "loops": (loops, LOOPS),
    "epochs": (epochs, EPOCHS),
    "echo": (echo, ()),
}


def main(argv: Sequence[str], values: flags.FlagValues = FLAGS) -> None:
    del argv
    part, known = PARTS[values.part]
    if unknown := sorted(set(values.rows or ()) - set(known)):
        choice = f"choose of {', '.join(known)}" if known else "all are measured, leave it out"
        raise app.UsageError(f"--rows has {unknown}, and --part={values.part}: {choice}.")
    found = []
    for row in part(values):
        show(row, found[-1] if found else {})
        found.append(row)
        if values.jsonl:
            records.write_lines(values.jsonl, found)
    if not found:
        raise app.UsageError(f"no row has its data in --data_root={values.data_root}.")


def show(row: dict, last: dict) -> None:
    """Prints a row, under the names of its columns where they are other than the last row's."""
    if row.keys() != last.keys():
        print("| " + " | ".join(row) + " |\n|" + " --- |" * len(row), flush=True)
    print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)


if __name__ == "__main__":
    define_flags()
    app.run(main)
