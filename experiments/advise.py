r"""Recommends which of the three decisions to use on your machine, for your task.

    python -m experiments.advise --task=digits --workers=4 --units_per_step=16
    python -m experiments.advise --task=cifar10 --data_dir=DIR --gbps=10

It measures for about a minute, on one worker: a step, the same step with an order, and the time to
load a batch from the task's own source. With --run=mesh it also measures the network, as an
all-reduce of the parameters over the devices of one or several processes; otherwise each value of
--gbps is one network. It then prices every combination of decisions in the recorded factorials
(experiments/runs, those with the nearest number of units per worker and step). It prints the
fastest combination, its price, and which others are statistically tied with it. To use your own
task, add a file to experiments/tasks/.
"""

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags as absl_flags

import local_opt
from experiments import timing
from experiments.cluster import entry, processes
from experiments.results import tables
from experiments.study import factorials, flags
from experiments.study.cost import Machine
from experiments.study.factorials import Combination, Factorial
from experiments.tasks import ranges
from experiments.training.config import num_params
from local_opt.forecast import sync_seconds
from local_opt.workers import AXIS, owned_sharding
from syncopate.refusals import UserError

PERIOD = 24  # H of the recorded local steps
STEPS, REPEATS = 64, 5  # of each timing
FORM = "{:.2f} ({:.2f} to {:.2f})"  # a factor and its interval
GBPS, LATENCY = (1.0, 10.0, 100.0, 400.0), 3e-5  # networks; seconds of a sync besides its bytes


def define_flags(values: absl_flags.FlagValues) -> None:
    flags.define(values, "task", "setting", "processes", task="digits")
    define = flags.definer(values)
    text = "Gb/s of a worker's network, if it is not measured"
    define([ranges.SPEED], "gbps", [*GBPS], text)


def link(parameters: float, workers: int, gbps: float) -> float:
    """Seconds of a sync of float32 parameters over links of `gbps` Gb/s."""
    speed = {"gigabits_per_second": gbps, "latency_seconds": LATENCY}
    return sync_seconds(int(parameters), num_workers=workers, **speed)


def order_ratio(task, recipe, order: str) -> float:
    """Time of a fresh step with the order over one without, timed side by side; at least 1."""
    short = recipe._replace(total_steps=STEPS, warmup_steps=0, bound_every=0)
    calls, _ = timing.training_calls(
        task, short, {"plain": ("rr+dealt", "parallel"), "order": (order, "parallel")}
    )
    seconds = timing.medians(calls, REPEATS)
    return max(1.0, seconds["order"] / seconds["plain"])


def measured_sync(mesh, parameters: int) -> float:
    """Seconds of an all-reduce of float32 parameters over the mesh."""
    owned = owned_sharding(mesh)
    meet = lambda x: jax.lax.pmean(x, AXIS)  # noqa: E731
    mean = jax.jit(local_opt.lift(meet, mesh, inputs="owned", outputs="owned"))
    shape = mesh.devices.size, parameters
    zeros = jax.jit(lambda: jnp.zeros(shape), out_shardings=owned)()
    return timing.medians({"sync": lambda: mean(zeros)}, REPEATS)["sync"]


def machines_of(task, recipe, order, values) -> list[Machine]:
    """One machine per network, from what was measured here."""
    size, workers = num_params(task.model), recipe.workers
    mesh = processes.mesh_of(recipe.run, workers)
    if mesh is not None and values["gbps"].present:
        raise UserError("--gbps is unused, as --run=mesh measures the network: leave one out.")
    here = timing.measure(task, recipe)
    here = here._replace(ordered=order_ratio(task, recipe, order), parameters=size)
    if mesh is not None:
        syncs = {"measured": measured_sync(mesh, size)}
    else:
        syncs = {f"{gbps:g} Gb/s": link(size, workers, gbps) for gbps in values.gbps}
    return [
        here._replace(label=name, sync=sync, latency=min(LATENCY, sync))
        for name, sync in syncs.items()
    ]


def command_of(combination: Combination, order: str) -> str:
    """Flags of `experiments.train` for these decisions, as they were recorded."""
    parts = [f"--order={order if combination.order else 'rr+dealt'}"]
    parts += [f"--sync=constant --h_base={PERIOD}" if combination.local else "--sync=parallel"]
    if combination.uses > 1:
        parts.append(f"--echo=fixed --echo_factor={combination.uses}")
    return " ".join(parts)


def advice(machine: Machine, known: Sequence[Factorial]) -> str:
    """The recommendation for a machine, and a table of the combinations, fastest first."""
    logs = factorials.predict(machine, known)
    choice = factorials.best_of(logs)
    rivals, (mean, low, high) = ", ".join(c.label for c in choice.rivals), choice.times
    doubt = f"Statistically tied: {rivals}." if rivals else "No other combination is close."
    rows = [
        {
            "decisions": c.label,
            "speed-up over none": FORM.format(*factorials.factor(-logs[c])),
            "per task": ", ".join(
                f"{found.task} {np.exp(-x):.2f}" for found, x in zip(known, logs[c], strict=True)
            ),
        }
        for c in sorted(logs, key=lambda c: logs[c].mean())
    ]
    return (
        f"{machine.label}: a load takes {machine.ratio:.2f} steps, a sync "
        f"{machine.sync / machine.step:.2f}. Use {choice.best.label}: {mean:.1f} times as fast as "
        f"none ({low:.1f} to {high:.1f}, 95 % over {len(known)} tasks). {doubt}\n"
        f"    {command_of(choice.best, known[0].order)}\n\n{tables.markdown(rows)}"
    )


def advise(known: Sequence[Factorial], values: absl_flags.FlagValues) -> None:
    processes.start(values)
    task, recipe = flags.setting_from_flags(values)
    processes.say("Measuring a load, and steps with and without an order", file=sys.stderr)
    known = factorials.near(known, recipe.units_per_step)
    found = machines_of(task, recipe, known[0].order, values)
    first, each = found[0], recipe.units_per_step * recipe.unit_size
    processes.say(
        f"{task.name}, {first.parameters:,} parameters, {recipe.workers} workers with {each} "
        f"examples per step each. Measured: {1e3 * first.step:.3g} ms for a step, "
        f"{first.ordered:.2f} times that with an order, {1e3 * first.load:.3g} ms for a load. "
        f"Recorded tasks: {', '.join(f.task for f in known)} at {known[0].size}."
    )
    for machine in found:
        processes.say(f"\n{advice(machine, known)}")


def run(values: absl_flags.FlagValues) -> None:
    print("Reading the recorded runs", file=sys.stderr, flush=True)
    advise(factorials.load(), values)


if __name__ == "__main__":
    entry.main(define_flags, run)
