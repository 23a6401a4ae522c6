"""The picture of drifts: where runs end against theory, over the learning rate."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.results.plots import legend, look, panes, save
from experiments.results.statistics import interval


def drift_panels(
    records: Sequence[Mapping],
    curves: Mapping[tuple, tuple],
    titles: Mapping[str, tuple[str, str]],
    labels: Mapping[str, str],
    path: str,
    title: str,
) -> None:
    """Writes a PNG: a row per problem, a column per number of workers, a colour per rule.

    Args:
      records: of `experiments.slow_sde`; points are means of "end" with their 95 % intervals.
      curves: {(problem, number of workers, rule): (rates from 0 on, the theory at them)}.
      titles: {problem: (its title, what was measured)}; labels: {rule: its label}.
      path: of the picture; title: over all.
    """
    widths = sorted({r["workers"] for r in records})
    names = [name for name in titles if any(r["problem"] == name for r in records)]
    size = 1 + 3.3 * len(widths), 1.3 + 3.4 * len(names)
    figure, axes = panes(len(names), len(widths), size, sharex=True, sharey="row")
    for row, name in zip(axes, names, strict=True):
        for axis, workers in zip(row, widths, strict=True):
            own = [r for r in records if (r["problem"], r["workers"]) == (name, workers)]
            for place, rule in enumerate(labels):
                at = [r for r in own if r["rule"] == rule]
                if at:
                    _draw(axis, at, curves[name, workers, rule], look(place), labels[rule])
            axis.set_title(f"{titles[name][0]}\nK = {workers}", fontsize="medium")
            axis.set(xlim=(-0.004, None))
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"{titles[name][1]} at the end")
    for axis in axes[-1]:
        axis.set_xlabel("learning rate η")
    legend(figure)
    save(figure, path, f"{title}\npoints: mean and 95 % interval; lines: theory, its limit at 0")


def _draw(axis, records, curve, style, label):
    """One rule's points, and the line of its theory."""
    rates = sorted({r["learning_rate"] for r in records})
    at = [[r for r in records if r["learning_rate"] == rate] for rate in rates]
    mean, half = np.array([interval([r["end"] for r in found]) for found in at]).T
    bars = None if np.isnan(half).all() else half
    axis.plot(*curve, **style, linewidth=1.2)
    axis.plot(0, curve[1][0], "D", color=style["color"], ms=4, clip_on=False)
    axis.errorbar(rates, mean, yerr=bars, fmt="o", ms=4, capsize=3, color=style["color"])
    axis.plot([], [], marker="o", ms=4, label=label, **style)
