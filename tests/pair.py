"""What several processes are compared by with one, and a start of two: see test_processes.py."""

import importlib
import json
import pathlib
import sys

import jax
import numpy as np
from absl import app
from absl import flags as absl_flags

from experiments import flags
from experiments.processes import distributed
from experiments.results import records
from experiments.studies import evaluations
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.tasks import TASKS, Recipe
from experiments.tasks.base import first_of
from experiments.training import config, program, run
from local_opt import runners

WORKERS, STEPS = 2, 24
RECIPE = Recipe(
    workers=WORKERS, units_per_step=2, unit_size=2, learning_rates=(0.1,), total_steps=STEPS,
    schedule="linear", floor=0.1, h_base=2, echo_factor=2,
)  # fmt: skip
DECISIONS = {"cd_grab": ("cd_grab", "parallel", "fixed"), "qsr": ("dealt", "qsr", "fixed")}


def small_task():
    task = TASKS["digits"](None)
    return task._replace(train=first_of(task.train, 90), test=first_of(task.test, 60), optimum=None)


def trained(mesh, order, sync, echo, rate):
    """(records, orders at every evaluation, what was not finite) of a run."""
    task, row, rule = small_task(), ORDERS[order], SYNC_RULES[sync]
    built = program.build(task, RECIPE, row, rule.rounds, mesh=mesh)
    given = config.config_of(RECIPE, built.sizes, seed=3)
    plans = config.plans_of(given, rule, ECHO_POLICIES[echo], rate=rate)
    found, orders, measure = [], [], evaluations.scalars_of(task, RECIPE)(built, row)

    def evaluate(state):
        orders.append(distributed.on_host(state.orders.current).tolist())
        return measure(len(orders), STEPS, state)

    outcome = run.train(
        built, plans, seed=3, evaluate=evaluate, evaluate_at=(0, 8, 16), on_record=found.append
    )
    return found, orders, outcome.diverged


def measured(mesh) -> dict:
    """CD-GraB and QSR, and how both stop at a rate far too large."""
    found = {}
    for name, decisions in DECISIONS.items():
        records, orders, _ = trained(mesh, *decisions, 0.2)
        stopped = trained(mesh, *decisions, 1e38)[2]
        found[name] = {"records": records, "orders": orders, "stopped": stopped}
    return found


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
    folder, number = pathlib.Path(argv[1]), absl_flags.FLAGS.process_id
    for name in ("cd_grab", "echoing", "qsr"):  # none may start the devices: it would be too early
        importlib.import_module(f"experiments.{name}")
    distributed.start(absl_flags.FLAGS)
    mesh = runners.worker_mesh(WORKERS)
    asked = Asked(np.arange(6.0).reshape(WORKERS, 3))
    keys = jax.random.split(jax.random.key(0), WORKERS)
    placed = distributed.place({"x": asked, "key": keys}, runners.owned_sharding(mesh))
    found = {
        "own": distributed.own_workers(mesh, WORKERS),
        "asked": sorted(asked.rows),
        "here": np.asarray(distributed.own(placed["x"])).tolist(),
        "whole": jax.tree.map(np.ndarray.tolist, distributed.on_host(placed)),
        "first": distributed.of_first({"seconds": number + 0.1, "text": "x" * (1 + 2000 * number)}),
    }
    found["done"] = records.open_folder(str(folder / "run"), {"workers": WORKERS})
    records.write_lines(str(folder / "run" / "metrics.jsonl"), [{"process": number}])
    found |= measured(mesh)
    (folder / f"{number}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    flags.define(absl_flags.FLAGS, "run")
    app.run(main, argv=sys.argv)
