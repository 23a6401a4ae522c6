r"""Recommends which of the three decisions to use on your machine, for your task.

    python -m experiments.advise --task=digits --workers=4 --units_per_step=16
    python -m experiments.advise --task=cifar10 --data_dir=DIR --gbps=10
    python -m experiments.advise --map          # tables and a map over many machines
    python -m experiments.advise --order_share --task=digits    # is the loss the order's doing?

It measures for about a minute, on one worker: a step, the same step with an order, and the time to
load a batch from the task's own source. With --run=mesh it also measures the network, as an
all-reduce of the parameters over the devices of one or several processes; otherwise each value of
--gbps is one network. It then prices every combination of decisions in the recorded factorials
(experiments/runs, those with the nearest number of units per worker and step). It prints the
fastest combination, its price, and which others are statistically tied with it. To use your own
task, add a file to experiments/tasks/.

With --map nothing is measured. The recorded factorials (made by `experiments.combined`, with the
command beside each) are priced on a grid of machines for three model sizes, and on four networks
with two loaders. This takes seconds and writes map.png and table_*.md into --output_dir.
docs/results/machine_map.md shows them, and how good the advice is for unseen tasks.

With --order_share no machine is measured. Copies of D-RR that differ in their permutations alone
are trained at every learning rate, and tell how many epochs a balanced order, averages of the
weights, or both can save (order_share.py). docs/use/orders.md explains the answer.
"""

import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags as absl_flags

import local_opt
from experiments import machine_map, order_share, timing
from experiments.cluster import entry, processes
from experiments.machine_map import FORM, GBPS, LATENCY, link
from experiments.results import report, tables
from experiments.study import factorials, flags, unused
from experiments.study.cost import Machine
from experiments.study.factorials import Combination, Factorial
from experiments.study.study import arm_of
from experiments.tasks import Recipe, ranges
from experiments.training.config import num_params
from local_opt.workers import AXIS, owned_sharding

PERIOD = 24  # H of the recorded local steps
STEPS, REPEATS = 64, 5  # of each timing
AVERAGES = ("epoch", "ema")  # of --order_share: those that do not depend on a run's end


def define_flags(values: absl_flags.FlagValues) -> None:
    flags.define(values, "task", "setting", "processes", task="digits")
    define = flags.definer(values)
    define(absl_flags.DEFINE_bool, "map", False, "write the map of machines, without measuring")
    flags.define(values, "output")
    text = "Gb/s of a worker's network, if it is not measured"
    define([ranges.SPEED], "gbps", [*GBPS], text)
    text = "measure how much of the training loss is the order's, and nothing else"
    define(absl_flags.DEFINE_bool, "order_share", False, text)
    text = "runs of --order_share at every rate, which differ in their permutations alone"
    define(ranges.COPIES, "copies", 8, text)
    text = "words of an arm that --order_share trains too, as cd_grab: what it gains, measured"
    define(absl_flags.DEFINE_string, "beside", None, text)


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
        raise ValueError("--gbps is unused, as --run=mesh measures the network: leave one out.")
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


def share_of_order(values: absl_flags.FlagValues) -> None:
    processes.start(values)
    task, recipe = flags.setting_from_flags(values)
    recipe = recipe._replace(average=recipe.average or AVERAGES)
    arms = [order_share.ARM]
    if values.beside is not None:
        try:
            arms.append(arm_of(values.beside))
        except ValueError as error:
            raise ValueError(f"--beside is {values.beside!r}: {error}") from error
        if arms[1].echo != "none":
            raise ValueError(f"--beside is {values.beside!r}: leave its echoing out.")
    unused.check(values, recipe, arms)
    found, *more = (
        dict(order_share.measured(task, recipe, copies=values.copies, arm=arm)) for arm in arms
    )
    if not found:
        raise ValueError("every rate diverges: lower --learning_rates.")
    for arm, own in zip(arms[1:], more, strict=True):
        found = order_share.joined(found, arm.label, own)
    processes.say(
        f"{task.name}: {values.copies} copies of D-RR with {recipe.workers} workers x "
        f"{recipe.units_per_step} units, which differ in their permutations alone. Losses are "
        f"those of training, and averages the best of {', '.join(recipe.average)}.\n\n"
        f"{order_share.report(found, above=task.optimum is not None)}"
    )


def check(values: absl_flags.FlagValues) -> None:
    """Raises ValueError for flags that what is asked for does not use."""
    setting = ["task", "data_dir", *flags.choices(), *Recipe._fields]
    unread = {"evaluations", "evaluate_every", "bound_every"}
    told = {
        "--map measures nothing": values.map
        and [*setting, "gbps", "order_share", "copies", "beside"],
        "--order_share measures no machine": values.order_share
        and ["gbps", "output_dir", "overwrite"],
        "--order_share looks after every epoch": values.order_share and sorted(unread),
        "--output_dir is of --map, as the advice is printed": not values.map
        and ["output_dir", "overwrite"],
        "swa averages a run's end alone": "swa" in (values.average or ()) and ["average"],
        "these are of --order_share": not values.order_share
        and ["copies", "beside", "average", "ema_epochs"],  # fmt: skip
    }
    for why, names in told.items():
        if given := [name for name in names or () if values[name].present]:
            raise ValueError(f"{why}: leave --{', --'.join(given)} out.")


def run(values: absl_flags.FlagValues) -> None:
    check(values)
    if values.order_share:
        return share_of_order(values)
    print("Reading the recorded runs", file=sys.stderr, flush=True)
    if values.map:
        with report.opened("machine_map", values) as folder:
            machine_map.write_map(factorials.load(), folder)
    else:
        advise(factorials.load(), values)


if __name__ == "__main__":
    entry.main(define_flags, run)
