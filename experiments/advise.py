r"""Recommends which of the three decisions to use on your machine, for your task.

    python -m experiments.advise --task=digits --workers=4 --units_per_step=16
    python -m experiments.advise --task=cifar10 --data_dir=DIR --gbps=10
    python -m experiments.advise --map          # tables and a map over many machines

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
"""

import functools
import itertools
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags as absl_flags

import local_opt
from experiments import timing
from experiments.cluster import entry, processes
from experiments.results import report, tables
from experiments.results.plots import COLOURS, panes, save
from experiments.study import factorials, flags
from experiments.study.cost import Machine
from experiments.study.factorials import NONE, Combination, Factorial
from experiments.tasks import Recipe, ranges
from experiments.training.config import num_params
from local_opt.forecast import sync_seconds
from local_opt.workers import AXIS, owned_sharding

PERIOD = 24  # H of the recorded local steps
STEPS, REPEATS = 64, 5  # of each timing
FORM = "{:.2f} ({:.2f} to {:.2f})"  # a factor and its interval
GBPS, LATENCY = (1.0, 10.0, 100.0, 400.0), 3e-5  # networks; seconds of a sync besides its bytes
# The map: FLOP/s, shortest step in seconds, tokens per example (6 D operations each), time of a
# fresh step with an order in steps; parameters of the models, examples/s that a worker reads.
FLOPS, FLOOR, TOKENS, ORDERED = 1e14, 1e-4, 256.0, 1.05
PARAMETERS, LOADERS = (1e4, 1e6, 1e8), (1e6, 7400.0)
SLOW = {"load": 8.0, "sync": 10.0}  # the slow machine, in steps
LOADS = np.geomspace(0.1, 30, 41)  # time of a load, in steps
SYNCS = np.geomspace(0.03, 300, 49)  # time of a sync, in steps


def define_flags(values: absl_flags.FlagValues) -> None:
    flags.define(values, "task", "setting", "processes", task="digits")
    define = flags.definer(values)
    define(absl_flags.DEFINE_bool, "map", False, "write the map of machines, without measuring")
    define(absl_flags.DEFINE_string, "output_dir", None, "of --map; results/machine_map if unset")
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


def choices_table(known) -> str:
    """The best combination per model, network and loader, one column per factorial."""
    rows = []
    for d, gbps, speed in itertools.product(PARAMETERS, GBPS, LOADERS):
        row = {"parameters": f"{d:,.0f}", "Gb/s": f"{gbps:g}", "examples / s": f"{speed:g}"}
        for found in known:
            examples = found.sizes.units_per_step * found.sizes.unit_size
            step = max(FLOOR, 6 * d * TOKENS * examples / FLOPS)
            sync = link(d, found.sizes.workers, gbps)
            machine = Machine(step, examples / speed, sync, LATENCY, ORDERED, d)
            own = factorials.best_of(factorials.logs_of(machine, found))
            row[f"{found.task}, {found.size}"] = f"{own.best.label}, × {own.times[0]:.1f}"
        rows.append(row)
    return tables.markdown(rows)


def regret_table(known) -> str:
    """Loss from following the other tasks' factorials instead of a task's own, on six machines."""
    lines = []
    for load, sync in ((0, 0), (8, 0), (0, 10), (2, 2), (8, 10), (30, 100)):
        machine = Machine(load=load, sync=sync, ordered=ORDERED, parameters=PARAMETERS[-1])
        for row in factorials.regrets(known, machine):
            price = {"load / steps": load, "sync / steps": sync}
            lines.append(price | row | {"regret": f"{100 * row['regret']:.0f} %"})
    return tables.markdown(lines)


def slow_table(known) -> str:
    """All three decisions against the best with fewer, on slow input and a slow network."""
    rows, columns = [], [f"against the {name} of fewer" for name in ("best", "second", "third")]
    machine = Machine(**SLOW, ordered=ORDERED, parameters=PARAMETERS[-1])
    for found in known:
        logs = factorials.logs_of(machine, found)
        row = {"task": found.task, "workers x units": found.size, "all three": "never arrive"}
        row |= dict.fromkeys(columns, "-")
        if every := [c for c in logs if c.decisions == 3]:
            best = min(every, key=lambda c: logs[c].mean())
            behind = {c: factorials.factor(logs[c] - logs[best]) for c in logs if c.decisions < 3}
            row["all three"] = f"{best.label}: × {FORM.format(*behind[NONE])}"
            for name, c in zip(columns, sorted(behind, key=behind.get), strict=False):
                row[name] = f"{c.label}: × {FORM.format(*behind[c])}"
        rows.append(row)
    return tables.markdown(rows)


def measured_table() -> str:
    """Measured seconds with slow loads and syncs, and their ratio to all three decisions."""
    found, rows = factorials.measured(), []
    for combination in dict.fromkeys(c for of in found.values() for c in of):
        row = {"decisions": combination.label}
        for task, of in found.items():
            every = next(seconds for c, seconds in of.items() if c.decisions == 3)
            row[f"{task}, seconds"] = tables.show(of[combination], "{:.1f}")
            times = factorials.factor(np.log(of[combination] / every))
            row[f"{task}, times all three"] = FORM.format(*times)
        rows.append(row)
    return tables.markdown(rows)


def gains_table(known) -> str:
    """How many times fewer loads the order needs, with a sync every step and with local steps."""
    rows, most = [], sorted({c.uses for found in known for c in found.taken})
    for found in known:
        row = {"task": found.task, "workers x units": found.size}
        for local, uses in itertools.product((False, True), most):
            pair = [Combination(order, local, uses) for order in (False, True)]
            name = f"{'local steps' if local else 'every step'}, e = {uses}"
            row[name] = "-"
            if all(c in found.taken for c in pair):
                plain, order = (np.log(found.taken[c].loads) for c in pair)
                row[name] = FORM.format(*factorials.factor(plain - order))
        rows.append(row)
    return tables.markdown(rows)


def picture(known, path: str) -> None:
    """Writes a PNG: one row of maps per task, hatched where another choice may be best."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    of = {(found.task, found.size): found for found in known}
    sizes = list(dict.fromkeys(found.size for found in known))
    tasks = [t for t in dict.fromkeys(t for t, _ in of) if all((t, size) in of for size in sizes)]
    columns = list(itertools.product(sizes, (PARAMETERS[0], PARAMETERS[-1])))
    shape = (1 + 3.4 * len(columns), 1.6 + 2.7 * len(tasks))
    figure, axes = panes(len(tasks), len(columns), shape, sharex=True, sharey=True)
    colours, seen = ListedColormap(["#DDDDDD", *COLOURS[1:]]), set()
    grid = {"load": LOADS[:, None, None], "sync": SYNCS[None, :, None], "ordered": ORDERED}
    for axis, (task, (size, d)) in zip(axes.flat, itertools.product(tasks, columns), strict=True):
        kind, sure, times = factorials.map_of(of[task, size], Machine(**grid, parameters=d))
        seen |= set(np.unique(kind).tolist())
        axis.pcolormesh(SYNCS, LOADS, kind, cmap=colours, vmin=-0.5, vmax=7.5, shading="nearest")
        if not sure.all():
            axis.contourf(SYNCS, LOADS, ~sure, [0.5, 1.5], colors="none", hatches=["////"])
        lines = axis.contour(SYNCS, LOADS, times, [2, 4, 8, 16], colors="black", linewidths=0.8)
        axis.clabel(lines, fmt="%g ×", fontsize="small")
        axis.set(xscale="log", yscale="log", xlabel="a sync, in steps", ylabel="a load, in steps")
        axis.set_title(f"{task}, {size}, {d:,.0f} parameters", fontsize="medium")
        axis.label_outer()
    names = {k: factorials.KINDS[k].label.replace("2 uses", "echo") for k in sorted(seen)}
    handles = [Patch(facecolor=colours(k), label=name) for k, name in names.items()]
    handles.append(Patch(facecolor="white", hatch="////", label="not sure (95 %)"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    save(figure, path, "The best combination of decisions (lines: times as fast as none of them)")


def write_map(known: Sequence[Factorial], folder: str) -> None:
    """Prints and writes the tables of docs/results/machine_map.md, and draws its picture."""
    written = {
        "slow": slow_table(known),
        "measured": measured_table(),
        "gains": gains_table(known),
        "choices": choices_table(known),
        "regret": regret_table(known),
    }
    pictures = {"map.png": functools.partial(picture, known)}
    report.write_tables(folder, "Where the three decisions pay", [], written, pictures)


def run(values: absl_flags.FlagValues) -> None:
    print("Reading the recorded runs", file=sys.stderr, flush=True)
    known, measured = factorials.load(), ["task", "data_dir", "gbps", *flags.choices()]
    given = [name for name in [*measured, *Recipe._fields] if values[name].present]
    if values.map and given:
        raise ValueError(f"--map measures nothing: leave --{', --'.join(given)} out.")
    if values.output_dir and not values.map:
        raise ValueError("--output_dir is of --map: leave it out, as the advice is printed.")
    if values.map:
        write_map(known, values.output_dir or "results/machine_map")
    else:
        advise(known, values)


if __name__ == "__main__":
    entry.main(define_flags, run)
