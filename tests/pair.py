"""What several processes are compared by with one, and a start of two: see test_processes.py."""

import importlib
import json
import os
import pathlib
import sys

import jax
import numpy as np
from absl import app, flags

from experiments import launch, local_training, processes, records, training
from experiments.methods import METHODS
from experiments.sync_rules import RULES, Setting
from experiments.tasks import TASKS, Recipe
from experiments.tasks.base import first_of
from local_opt import runners

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKERS, EPOCHS, STEPS = 2, 3, 24
RECIPE = Recipe(WORKERS, 2, 2, EPOCHS, (0.1,), 0.9, bound_every=0)
SETUP = local_training.Setup(WORKERS, 8, "momentum", 1e-3, STEPS, 3)


def start_two(module: str, *arguments: str, folder: pathlib.Path = ROOT, **options) -> int:
    """The exit code of two processes that run a module of the tests, or one of `folder`.

    They have one device each, whatever the tests themselves have.
    """
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    options |= {"processes": 2, "environment": environment, "folder": folder}
    return launch.launch(module, arguments, **options)


def small_task():
    task = TASKS["digits"](None)
    return task._replace(train=first_of(task.train, 90), test=first_of(task.test, 60), optimum=None)


def by_orders(mesh) -> dict:
    """Orders and losses of CD-GraB's epochs, and how it stops at a rate far too large."""
    program = training.build(small_task(), METHODS["cd_grab"], RECIPE, mesh=mesh)
    orders, epoch = [], program.epoch

    def noted(*args):
        out = epoch(*args)
        orders.append(processes.on_host(out[1].current).tolist())
        return out

    program = program._replace(epoch=noted)
    found = list(training.train(RECIPE, program, seed=3, rate=0.1))
    try:
        stopped = list(training.train(RECIPE, program, seed=3, rate=1e38))
    except FloatingPointError as error:
        stopped = str(error)
    return {"orders": orders[:EPOCHS], "epochs": found, "stopped": stopped}


def by_rounds(mesh) -> dict:
    """The records of QSR, and how it stops."""
    program = local_training.build(small_task(), RULES["qsr"], SETUP, mesh)
    rates = np.linspace(1, 0.1, STEPS)
    plan = RULES["qsr"].plan(Setting(rates, warmup_steps=0, h_base=2, alpha=2.0))

    def train(rate):
        return list(
            local_training.train(small_task(), SETUP, program, plan, rates=rate * rates, seed=3)
        )

    try:
        stopped = train(1e38)
    except FloatingPointError as error:
        stopped = str(error)
    return {"looks": train(0.2), "rounds_stopped": stopped}


def measured(mesh) -> dict:
    return by_orders(mesh) | by_rounds(mesh)


class Asked:
    """An array [W, ...] that notes which workers' rows somebody has read."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.rows = set()

    def __getitem__(self, index):
        self.rows.update(np.arange(len(self.values))[index[0]].tolist())
        return self.values[index]


def main(argv) -> None:
    """Writes what each process has found into a file of its own, and records into a shared one."""
    folder, number = pathlib.Path(argv[1]), flags.FLAGS.process_id
    for name in ("cd_grab", "echoing", "qsr"):  # none may start the devices: it would be too early
        importlib.import_module(f"experiments.{name}")
    processes.start()
    mesh = runners.worker_mesh(WORKERS)
    asked = Asked(np.arange(6.0).reshape(WORKERS, 3))
    keys = jax.random.split(jax.random.key(0), WORKERS)
    placed = processes.place({"x": asked, "key": keys}, runners.owned_sharding(mesh))
    found = {
        "own": processes.own_workers(mesh, WORKERS),
        "asked": sorted(asked.rows),
        "here": np.asarray(processes.own(placed["x"])).tolist(),
        "whole": jax.tree.map(np.ndarray.tolist, processes.on_host(placed)),
        "first": processes.of_first({"seconds": number + 0.1, "text": "x" * (1 + 2000 * number)}),
    }
    done = records.open_folder(str(folder / "run"), {"workers": WORKERS})
    with records.appending(str(folder / "run" / "metrics.jsonl")) as append:
        append({"process": number})
    found |= {"done": done} | measured(mesh)
    (folder / f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    processes.define_flags()
    app.run(main, argv=sys.argv)
