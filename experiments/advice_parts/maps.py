"""The map: which combination is best where, over what a load and a sync cost."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.advice_parts.machines import Machine, best_of, predict, times
from experiments.advice_parts.recorded import Combination, Factorial
from experiments.results.plots import COLOURS, panes, save
from experiments.results.statistics import intervals

LOADS = np.geomspace(0.1, 30, 41)  # of a load, in steps
SYNCS = np.geomspace(0.03, 300, 49)  # of a sync, in steps
KINDS = [
    Combination(order, local, uses) for order in (False, True) for local in (False, True)
    for uses in (1, 2)
]  # fmt: skip


class Map(NamedTuple):
    """Over a grid [loads, syncs].

    Fields:
      kind: int, the decisions of the best combination, in KINDS; sure: bool, whether the 95 %
        interval over seeds tells it from all that decide otherwise; times: how many times as fast
        as none.
    """

    kind: np.ndarray
    sure: np.ndarray
    times: np.ndarray


def kind_of(combination: Combination) -> int:
    """Its place in KINDS, which do not ask how often a batch is used."""
    return KINDS.index(combination._replace(uses=min(combination.uses, 2)))


def label_of(kind: int) -> str:
    return KINDS[kind].label.replace("2 uses", "echo")


def draw(found: Factorial, parameters: float, *, ordered: float = 1.0) -> Map:
    """The map of a factorial for a model of D parameters, without latency."""
    machine = Machine(1.0, LOADS[:, None, None], SYNCS[None, :, None], parameters, ordered=ordered)
    logs = {c: np.log(t) for c, t in times(machine, found).items()}
    means = {c: log.mean(axis=-1) for c, log in logs.items()}
    combinations = list(logs)
    best = np.argmin(np.stack([means[c] for c in combinations]), axis=0)
    chosen = np.choose(best[..., None], [logs[c] for c in combinations])
    kinds = np.array([kind_of(c) for c in combinations])
    sure = np.ones(best.shape, bool)
    for combination, log in logs.items():
        other = kinds[best] != kind_of(combination)
        mean, half = intervals(log - chosen)
        sure &= ~other | (mean > half)
    gain = np.exp(means[Combination()] - np.choose(best, [means[c] for c in combinations]))
    return Map(kinds[best], sure, gain)


def regrets(known: Sequence[Factorial], machine: Machine) -> list[dict]:
    """Of every factorial: what the others of its size recommend, against the best of its own."""
    rows = []
    for found in known:
        others = [f for f in known if f.size == found.size and f.task != found.task]
        if not others:
            continue
        own = {c: np.log(t).mean() for c, t in times(machine, found).items()}
        told = {c: logs for c, logs in predict(machine, others).items() if c in own}
        advised, best = best_of(told).best, min(own, key=own.get)
        rows.append({
            "task": found.task, "size": found.size, "advised": advised.label,
            "best": best.label, "regret": float(np.exp(own[advised] - own[best]) - 1),
        })  # fmt: skip
    return rows


def picture(rows: Sequence[tuple[str, Sequence[tuple[str, Map]]]], path: str, title: str) -> None:
    """Writes a PNG: a row of maps per task; hatched where another choice may be best.

    Args:
      rows: (label, its maps with their labels).
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    columns = len(rows[0][1])
    figure, axes = panes(
        len(rows), columns, (1 + 3.4 * columns, 1.6 + 2.7 * len(rows)), sharex=True, sharey=True
    )
    colours = ["#DDDDDD", *COLOURS[1:]]
    for line, (label, maps) in zip(axes, rows, strict=True):
        for axis, (name, found) in zip(line, maps, strict=True):
            axis.pcolormesh(
                SYNCS, LOADS, found.kind, cmap=ListedColormap(colours), vmin=-0.5, vmax=7.5,
                shading="nearest",
            )  # fmt: skip
            unsure = np.where(found.sure, np.nan, 1.0)
            if np.isfinite(unsure).any():
                axis.contourf(
                    SYNCS, LOADS, (~found.sure).astype(float), levels=[0.5, 1.5], colors="none",
                    hatches=["////"],
                )  # fmt: skip
            lines = axis.contour(
                SYNCS, LOADS, found.times, levels=[2, 4, 8, 16], colors="black", linewidths=0.8
            )
            axis.clabel(lines, fmt="%g ×", fontsize="small")
            axis.set(xscale="log", yscale="log")
            axis.set_title(f"{label}, {name}", fontsize="medium")
        line[0].set_ylabel("a load, in steps")
    for axis in axes[-1]:
        axis.set_xlabel("a sync, in steps")
    seen = sorted({int(k) for _, maps in rows for _, found in maps for k in np.unique(found.kind)})
    handles = [Patch(facecolor=colours[k], label=label_of(k)) for k in seen]
    handles.append(Patch(facecolor="white", hatch="////", label="not sure (95 %)"))
    entries = max(1, int(figure.get_figwidth() / 2.8))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(entries, len(handles)))
    save(figure, path, title)
