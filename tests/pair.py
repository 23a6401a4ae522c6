"""What several processes are compared by with one, and a start of two: see test_processes.py."""

import importlib
import json
import pathlib
import sys

import jax
import numpy as np
import pytest
from absl import app
from absl import flags as absl_flags

import local_opt
import models
from experiments import fingerprints
from experiments.compare import flags
from experiments.compare.arms import row_of
from experiments.data import Recipe, Task
from experiments.data.base import first_of
from experiments.distributed import agreement, devices, processes
from experiments.distributed.devices import worker_mesh, worker_sharding
from experiments.report import records
from experiments.trainer import config, measure, pipeline, program
from experiments.trainer.train import Hooks, compile_and_train
from ordering import steps

WORKERS, STEPS = 2, 24
RECIPE = Recipe(
    workers=WORKERS,
    units_per_step=2,
    unit_size=2,
    learning_rates=(0.1,),
    total_steps=STEPS,
    schedule="linear",
    floor=0.1,
    h_base=2,
    echo_factor=2,
)


def small_task():
    x = np.random.default_rng(0).normal(size=(90, 6)).astype(np.float32)
    data = {"x": x, "y": x[:, :3].argmax(axis=1).astype(np.int32)}
    model = models.softmax_regression(num_features=6, num_classes=3)
    return Task("random", model, data, first_of(data, 60), RECIPE)


def trained(mesh):
    """CD-GraB and QSR: records, orders at every evaluation, and how a rate too large stops them."""
    task, row, rule = small_task(), row_of("order", "cd_grab+dealt"), row_of("sync", "qsr")
    built = program.build(task, RECIPE, row, rule.rounds, mesh=mesh)
    given = config.config_of(RECIPE, built.sizes, seed=3)
    scalars, outcomes = measure.scalars_of(task, RECIPE)(built), {}

    for rate in (0.2, 1e38):
        results, orders = [], []

        def begin(step, total, state, orders=orders):
            orders.append(pipeline.on_host(state.orders.current).tolist())
            return scalars.begin(step, total, state)

        plans = given.plans(rule, row_of("echo", "fixed"), rate=rate)
        hooks = Hooks(results.append, measure.Scalars(lambda total: (0, 8, 16), begin))
        outcome = compile_and_train(built, plans, hooks, seed=3)
        outcomes[rate] = {"records": results, "orders": orders, "stopped": outcome.diverged}
    return outcomes[0.2] | {"stopped": outcomes[1e38]["stopped"]}


def differences(number: int) -> str:
    """What a process says of settings and data that are not the same in both."""
    task = small_task()
    if number:
        task = task._replace(train=first_of(task.train, 80))
    absl_flags.FLAGS["checkpoint_every"].value = number
    with pytest.raises(ValueError) as error:
        agreement.check(fingerprints.facts(absl_flags.FLAGS, fingerprints.data_hash(task)))
    return str(error.value)


def main(argv) -> None:
    """Writes what each process has found into a file of its own, and records into a shared one."""
    folder, number = pathlib.Path(argv[1]), absl_flags.FLAGS.process_id
    for name in ("cd_grab", "echoing", "qsr"):  # none may start the devices: it would be too early
        importlib.import_module(f"experiments.{name}")
    processes.start(absl_flags.FLAGS)
    mesh = worker_mesh(WORKERS)
    values = np.arange(6.0).reshape(WORKERS, 3)
    keys = jax.random.split(jax.random.key(0), WORKERS)
    placed = pipeline.place({"x": values, "key": keys}, worker_sharding(mesh))
    assert pipeline.place_as(placed, placed)["x"] is placed["x"]  # as what was restored
    results = {
        "workers": pipeline.workers_here(mesh, WORKERS),
        "placed": [s.index[0].start or 0 for s in placed["x"].addressable_shards],
        "here": np.concatenate([rows for _, rows in steps.of_process(placed["x"])]).tolist(),
        "whole": jax.tree.map(np.ndarray.tolist, pipeline.on_host(placed)),
        "first": processes.of_first({"seconds": number + 0.1, "text": "x" * (1 + 2000 * number)}),
    }
    folded = local_opt.replicate(jax.random.key(3), mesh, keys="fold")
    results["folded"] = [jax.random.key_data(s.data).tolist() for s in folded.addressable_shards]
    plan = local_opt.constant(2 + number, total_steps=6)
    refused = {
        "alone": lambda: devices.mesh_of("vmap", WORKERS),
        "counted": lambda: local_opt.replicate(0.0, WORKERS),
        "planned": lambda: plan.after(0, placed["x"], mesh),  # no sync is due in either process
    }
    for name, call in refused.items():
        with pytest.raises(ValueError) as error:
            call()
        results[name] = str(error.value)
    results["differs"] = differences(number)
    results["done"] = records.read_folder(str(folder / "run"))
    records.open_folder(str(folder / "run"), {"workers": WORKERS})
    records.rewrite(str(folder / "run"), [{"process": number}])
    results |= trained(mesh)
    (folder / f"{number}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    flags.define(absl_flags.FLAGS, "run")
    app.run(main, argv=sys.argv)
