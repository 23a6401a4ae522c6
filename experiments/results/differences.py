"""The test metric of arms less that of others, paired by seed: a table and a picture."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.results import plots, statistics
from experiments.results.statistics import Chosen, Comparison, interval, last
from experiments.results.tables import markdown, show
from experiments.tasks.metrics import METRICS


def table(comparison: Comparison, bases: Sequence[str]) -> str:
    """A row per arm of several seeds, a column per base."""
    metric, rows = statistics.metric_of(comparison), []
    label, (_, unit) = METRICS[metric].label, _unit(metric)
    for own in _repeated(comparison):
        row = {f"{label}, {unit} against": own.label}
        for base in bases:
            found = less(comparison, own, base)
            row[comparison.arms[base]] = show(found, "{:+.2f}") if own.arm != base else "-"
        rows.append(row)
    return markdown(rows)


def picture(comparisons: Mapping[str, Comparison], base: str, path: str, title: str) -> None:
    """Writes a PNG: a panel per comparison, each arm less the base with its 95 % interval."""
    most = max(len(_repeated(c)) for c in comparisons.values())
    size = (6.5 * len(comparisons), 1.5 + 0.45 * most)
    figure, axes = plots.panes(1, len(comparisons), size)
    for axis, (name, comparison) in zip(axes.flat, comparisons.items(), strict=True):
        metric = statistics.metric_of(comparison)
        shown = [own for own in _repeated(comparison) if own.arm != base]
        found = [interval(less(comparison, own, base)) for own in shown]
        mean, half = np.transpose(found)
        axis.axvline(0, color="0.5", linewidth=1)
        y = np.arange(len(shown))
        axis.errorbar(mean, y, xerr=half, fmt="o", capsize=3, color=plots.COLOURS[6])
        axis.set_yticks(y, [own.label for own in shown])
        axis.invert_yaxis()
        axis.grid(alpha=0.3, axis="x")
        axis.set_title(name)
        axis.set_xlabel(f"{METRICS[metric].label}, {_unit(metric)[1]}")
    plots.save(figure, path, f"{title}\nless {comparison.arms[base]}, paired; 95 % intervals")


def less(comparison: Comparison, own: Chosen, base: str) -> np.ndarray:
    """The metric of an arm less that of another, of every seed that both have."""
    metric = statistics.metric_of(comparison)
    ends = [
        {seed: last(run, f"test/{metric}") for seed, run in arm.runs.items()}
        for arm in (own, comparison.chosen[base, own.speed])
    ]
    pairs = statistics.paired(*ends)
    return _unit(metric)[0] * (pairs[:, 0] - pairs[:, 1])


def _repeated(comparison: Comparison) -> list[Chosen]:
    return [own for own in comparison.at() if len(own.runs) > 1]


def _unit(metric: str) -> tuple[float, str]:
    return (100, "points") if metric == "accuracy" else (1, "difference")
