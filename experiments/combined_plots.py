"""The pictures of the factorial: the course of all arms, and the effects."""

import numpy as np

from experiments.combined_runs import above_optimum, metric_of
from experiments.compare import interval
from experiments.metrics import METRICS
from experiments.plots import COLOURS, pyplot, save

AXES = (
    ("step", "steps"),
    ("loads", "loads"),
    ("sent", "sent, in all-reduces"),
    ("seconds", "seconds of training"),
)


def comparison(all_records, chosen, path: str, title: str) -> None:
    """Writes a PNG: train loss and test metric against steps, loads, volume and seconds.

    Mean and 95 % interval over seeds; a colour per order and sync, dashed with echoing.
    """
    plt = pyplot()
    above = above_optimum(all_records)
    metric = metric_of(all_records)
    rows = [
        ("suboptimality", "train loss above the optimum")
        if above
        else ("train_loss", "train loss"),
        (f"test_{metric}", METRICS[metric].label),
    ]
    figure, axes = plt.subplots(2, 4, figsize=(18, 8.4), layout="constrained", sharey="row")
    styles = _styles(chosen)
    for row, (name, label) in enumerate(rows):
        for column, (x_name, x_label) in enumerate(AXES):
            axis = axes[row][column]
            for arm, runs in chosen.items():
                _draw(axis, runs, x_name, name, arm.label, styles[arm], (0.14, 0.06)[row])
            axis.set_xlabel(x_label)
            axis.grid(alpha=0.3)
            if row == 0 and above:  # over decades
                axis.set_yscale("log")
            if x_name == "loads":
                _epochs_on_top(axis, runs[0][-1])
        axes[row][0].set_ylabel(label)
    late = [r[rows[1][0]] for runs in chosen.values() for run in runs for r in run[len(run) // 4 :]]
    margin = 0.08 * (max(late) - min(late)) + 1e-9
    axes[1][0].set_ylim(min(late) - margin, max(late) + margin)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    seeds = len(next(iter(chosen.values())))
    figure.suptitle(
        f"{title}\nevery arm at its own best learning rate, {seeds} seeds, mean and 95 % interval"
    )
    save(figure, path)


def effects(found: dict, path: str, title: str) -> None:
    """Writes a PNG: a panel per response, a row per effect with its 95 % interval."""
    plt = pyplot()
    columns = 3
    lines = -(-len(found) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(15, 3.6 * lines), layout="constrained", sharey=True, squeeze=False
    )
    for axis, (response, each) in zip(axes.flat, found.items(), strict=False):
        bounds = np.array([(e.mean, e.mean - e.half_width, e.mean + e.half_width) for e in each])
        if response.relative:
            bounds = np.exp(bounds)
            _factors_on(axis, bounds)
        mean, low, high = bounds.T
        y = np.arange(len(each))
        axis.axvline(1 if response.relative else 0, color="0.5", linewidth=1)
        axis.hlines(y, low, high, color=COLOURS[6], linewidth=2)
        axis.plot(mean, y, "o", color=COLOURS[4], ms=5)
        axis.set_yticks(y, [" × ".join(e.factors) for e in each])
        kind = "factor on the" if response.relative else "change of the"
        axis.set_xlabel(f"{kind} {response.label}")
        axis.grid(alpha=0.3, axis="x")
    axes[0][0].invert_yaxis()
    for axis in list(axes.flat)[len(found) :]:
        axis.set_visible(False)
    figure.suptitle(
        f"{title}\neffects from the first level to the second, 95 % intervals over seeds"
    )
    save(figure, path)


def _styles(chosen):
    kinds = list(dict.fromkeys((arm.order, arm.sync) for arm in chosen))
    echoes = list(dict.fromkeys(arm.echo for arm in chosen))
    return {
        arm: {
            "color": COLOURS[(0, 1, 6, 4, 3, 5, 2, 7)[kinds.index((arm.order, arm.sync)) % 8]],
            "linestyle": ("-", "--")[echoes.index(arm.echo) % 2],
        }
        for arm in chosen
    }


def _draw(axis, runs, x_name, name, label, style, alpha):
    """Curves over seeds; the x of a look is nearly the same for all of them."""
    x = np.mean([[r[x_name] for r in run] for run in runs], axis=0)
    y = np.array([[r[name] for r in run] for run in runs])
    mean, half = np.array([interval(v) for v in y.T]).T
    half = np.nan_to_num(half)
    low = np.maximum(mean - half, y.min(axis=0) / 2) if y.min() > 0 else mean - half
    axis.plot(x, mean, label=label, **style)
    axis.fill_between(x, low, mean + half, color=style["color"], alpha=alpha, linewidth=0)


def _factors_on(axis, bounds):
    """A logarithmic axis with a few plain numbers."""
    axis.set_xscale("log")
    low, high = min(np.nanmin(bounds), 0.8), max(np.nanmax(bounds), 1.25)
    ticks = (0.5, 0.8, 1, 1.25, 2)
    if high / low > 12:
        ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)
    if high / low > 200:
        ticks = (0.001, 0.01, 0.1, 1, 10, 100, 1000)
    ticks = [t for t in ticks if low <= t <= high]
    axis.set_xlim(low / 1.05, high * 1.05)
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()


def _epochs_on_top(axis, last):
    per_epoch = last["loads"] / last["epoch"]
    top = axis.secondary_xaxis("top", (lambda x: x / per_epoch, lambda x: x * per_epoch))
    top.set_xlabel("epochs")
