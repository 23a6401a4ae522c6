"""The map of `advise --map`: which combination of decisions is the fastest on which machine.

The recorded factorials are priced on a grid of machines for three model sizes, and on four networks
with two loaders. docs/results/machine_map.md shows the tables.
"""

import functools
import itertools
from collections.abc import Sequence

import numpy as np

from experiments.results import report, tables
from experiments.results.plots import COLOURS, panes, save
from experiments.study import factorials
from experiments.study.cost import Machine
from experiments.study.factorials import NONE, Combination, Factorial
from local_opt.forecast import sync_seconds

FORM = "{:.2f} ({:.2f} to {:.2f})"  # a factor and its interval
GBPS, LATENCY = (1.0, 10.0, 100.0, 400.0), 3e-5  # networks; seconds of a sync besides its bytes
# FLOP/s, shortest step in seconds, tokens per example (6 D operations each), time of a fresh step
# with an order in steps; parameters of the models, examples/s that a worker reads.
FLOPS, FLOOR, TOKENS, ORDERED = 1e14, 1e-4, 256.0, 1.05
PARAMETERS, LOADERS = (1e4, 1e6, 1e8), (1e6, 7400.0)
SLOW = {"load": 8.0, "sync": 10.0}  # the slow machine, in steps
LOADS = np.geomspace(0.1, 30, 41)  # time of a load, in steps
SYNCS = np.geomspace(0.03, 300, 49)  # time of a sync, in steps


def link(parameters: float, workers: int, gbps: float) -> float:
    """Seconds of a sync of float32 parameters over links of `gbps` Gb/s."""
    speed = {"gigabits_per_second": gbps, "latency_seconds": LATENCY}
    return sync_seconds(int(parameters), num_workers=workers, **speed)


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
