"""The picture of a comparison: what was recorded, against epochs and against seconds."""

import os

import numpy as np

from experiments import compare
from experiments.methods import METHODS
from experiments.metrics import METRICS

# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#999999")
PANELS = (
    ("suboptimality", "train loss above the optimum", True),
    ("train_loss", "train loss", False),
    *((f"test_{name}", metric.label, False) for name, metric in METRICS.items()),
    ("bound_linf", "parallel herding bound, L∞", True),
)


def comparison(records, path: str, title: str) -> None:
    """Writes a PNG: one column per metric, first row against epochs, second against seconds.

    Every order is shown at its own best learning rate: mean and 95 % interval over seeds.
    """
    plt = pyplot()
    curves = compare.gather(records)
    orders = list(dict.fromkeys(c.order for c in curves))
    shown = [compare.best_of(curves, order) for order in orders]
    names = {name for c in shown for name in c.values}
    panels = [p for p in PANELS if p[0] in names]
    if "suboptimality" in names:
        panels = [p for p in panels if p[0] != "train_loss"]
    figure, axes = plt.subplots(
        2, len(panels), figsize=(4.6 * len(panels), 7.6), squeeze=False, layout="constrained"
    )
    for column, (name, label, logarithmic) in enumerate(panels):
        for row, unit in enumerate(("epochs", "seconds of training")):
            axis = axes[row][column]
            axis.set_yscale("log" if logarithmic else "linear")
            for curve in shown:
                if name in curve.values:
                    _draw(axis, curve, name, row == 1)
            axis.set_xlabel(unit)
            axis.locator_params(axis="x", nbins=5)
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
            if name in compare.TEST_METRICS:
                _zoom(axis, shown, name)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    seeds = len(shown[0].seeds)
    figure.suptitle(
        f"{title}\neach order at its own best learning rate, {seeds} seeds, mean and 95 % interval"
    )
    save(figure, path)


def herding(records, path: str, title: str, norm: str) -> None:
    """Writes a PNG: the bound over rounds at the most workers, and over workers at the end."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    widths = sorted({r["workers"] for r in records})
    last = max(r["round"] for r in records)
    names = list(dict.fromkeys(r["order"] for r in records))
    for name in names:
        own = [r for r in records if r["order"] == name]
        over_rounds = [
            [r["bound"] for r in own if (r["workers"], r["round"]) == (widths[-1], k)]
            for k in range(last + 1)
        ]
        over_workers = [
            [r["bound"] for r in own if (r["workers"], r["round"]) == (w, last)] for w in widths
        ]
        for axis, x, groups in (
            (left, range(last + 1), over_rounds),
            (right, widths, over_workers),
        ):
            mean, half = np.array([compare.interval(g) for g in groups]).T
            axis.errorbar(
                list(x),
                mean,
                yerr=None if np.isnan(half).all() else np.minimum(half, 0.9 * mean),
                **_style(name),
                marker="o",
                ms=4,
                capsize=3,
                label=METHODS[name].label,
            )
    left.set_xlabel(f"rounds (W = {widths[-1]})")
    right.set_xlabel(f"workers (after {last} rounds)")
    right.set_xscale("log")
    right.set_xticks(widths, [str(w) for w in widths])
    right.minorticks_off()
    for axis in (left, right):
        axis.set_yscale("log")
        axis.set_ylabel(f"parallel herding bound, L{'∞' if norm == 'inf' else '2'}")
        axis.grid(alpha=0.3)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    figure.suptitle(title)
    save(figure, path)


def pyplot():
    """matplotlib is imported where a picture is made: it takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save(figure, path):
    temporary = f"{path}.tmp.png"
    figure.savefig(temporary, dpi=110)
    pyplot().close(figure)
    os.replace(temporary, path)


def _style(order):
    """One look per order, the same in every picture."""
    row, colour = divmod(list(METHODS).index(order), len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": ("-", "--")[row % 2]}


def _draw(axis, curve, name, against_seconds):
    values = curve.values[name]
    kept = ~np.isnan(values).any(axis=0)
    pairs = [compare.interval(v) for v in values[:, kept].T]
    mean, half = np.array(pairs).T
    x = (curve.seconds.mean(axis=0) if against_seconds else curve.epoch)[kept]
    label = f"{METHODS[curve.order].label} (lr {curve.learning_rate:g})"
    low = mean - np.nan_to_num(half)
    if axis.get_yscale() == "log":  # where a band may not reach 0
        low = np.maximum(low, values[:, kept].min(axis=0) / 2)
    style = _style(curve.order)
    axis.plot(x, mean, **style, label=label, marker="o" if len(x) < 20 else None, ms=3)
    high = mean + np.nan_to_num(half)
    axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def _zoom(axis, shown, name):
    """Leaves out the first epochs' bad values, which would flatten the rest."""
    late = np.concatenate([c.values[name][:, len(c.epoch) // 5 :].ravel() for c in shown])
    margin = 0.1 * (late.max() - late.min()) + 1e-3
    axis.set_ylim(late.min() - margin, late.max() + margin)
