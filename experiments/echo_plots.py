"""The pictures of a comparison of echoing: time to the target, and curves against every cost."""

import numpy as np

from experiments import compare
from experiments.echo_arms import ARMS
from experiments.plan_plots import look
from experiments.plots import pyplot, save

COSTS = {
    "loads": "loads of a fresh batch",
    "step": "steps",
    "seconds": "seconds of training and waiting",
    "rounds": "communication rounds",
}
# Lines in the pictures of curves; the table and the other picture have all arms.
CURVES = (
    "none", "larger_lr", "accumulate", "local", "fixed", "bernoulli", "bernoulli_cosine",
    "diffusion", "diffusion_cosine", "diffusion_every", "measured", "proximal",
)  # fmt: skip


def time_to_target(seconds, path: str, title: str) -> None:
    """Writes a PNG: a panel per loading speed, a row per arm, seconds with their interval.

    Args:
      seconds: {speed: {arm: {seed: seconds to the target, inf where never}}}.
      path, title: of the picture.
    """
    plt = pyplot()
    arms = [arm for arm in ARMS if any(found.get(arm) for found in seconds.values())]
    height = 1.6 + 0.32 * len(arms)
    figure, axes = plt.subplots(
        1, len(seconds), figsize=(3 + 2.6 * len(seconds), height), sharey=True,
        layout="constrained", squeeze=False,
    )  # fmt: skip
    for axis, (speed, found) in zip(axes[0], seconds.items(), strict=True):
        longest = max((s for own in found.values() for s in own.values() if s < np.inf), default=1)
        for row, arm in enumerate(arms):
            values = np.array(list(found.get(arm, {}).values()))
            arrived = values[np.isfinite(values)]
            colour = look(list(ARMS).index(arm))["color"]
            if len(values) and len(arrived) == len(values):
                mean, half = compare.interval(arrived)
                axis.errorbar(mean, row, xerr=np.nan_to_num(half), fmt="o", capsize=3, color=colour)
            axis.plot(arrived, [row] * len(arrived), "|", color=colour, alpha=0.6)
            if len(values) and len(arrived) < len(values):
                text = f"{len(arrived)} of {len(values)} arrive"
                axis.text(0.03 * longest, row, text, va="center", fontsize=8)
        base = np.array(list(found.get("none", {}).values()))
        if len(base) and np.isfinite(base).all():
            axis.axvline(base.mean(), color="#444444", linewidth=0.8, linestyle=":")
        axis.set_xlim(left=0)
        axis.set_title(f"a load takes {speed:g} step{'s' * (speed != 1)}", fontsize=10)
        axis.set_xlabel("seconds to the target")
        axis.grid(axis="x", alpha=0.3)
    axes[0][0].set_yticks(range(len(arms)), [ARMS[arm].label for arm in arms])
    axes[0][0].set_ylim(len(arms) - 0.5, -0.5)
    figure.suptitle(f"{title}\nmean, 95 % interval, seeds; dotted: no echo", fontsize=11)
    save(figure, path)


def curves(runs, path: str, title: str, *, metric: str, target: float) -> None:
    """Writes a PNG: the test metric against loads, steps, seconds and communication rounds.

    Args:
      runs: {arm: records of all seeds at its own best rate}.
      path, title: of the picture; metric: its name; target: of the metric.
    """
    plt = pyplot()
    from matplotlib.ticker import LogLocator, NullFormatter

    figure, axes = plt.subplots(2, 2, figsize=(12, 10), layout="constrained")
    for axis, (cost, label) in zip(axes.ravel(), COSTS.items(), strict=True):
        for arm in CURVES:
            if runs.get(arm):
                _curve(axis, arm, runs[arm], cost)
        axis.axhline(target, color="#444444", linewidth=0.8, linestyle=":")
        axis.set_xlabel(label)
        axis.set_ylabel(f"test {metric}")
        axis.grid(alpha=0.3)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    values = np.array([r["test"] for own in runs.values() for r in own])
    if metric == "accuracy" and len(values):
        lowest = min(np.quantile(values, 0.15), target - 0.02)
        for axis in axes.ravel():
            axis.set_ylim(lowest, values.max() + 0.005)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(
        f"{title}\nmean and 95 % interval, until the first seed is at the target (dotted)",
        fontsize=11,
    )
    save(figure, path)


def _curve(axis, arm, records, cost):
    """Mean over seeds, as long as all of them run."""
    by_step = {}
    for r in records:
        by_step.setdefault(r["step"], []).append(r)
    seeds = len({r["seed"] for r in records})
    points = [found for _, found in sorted(by_step.items()) if len(found) == seeds]
    if not points:
        return
    x = [np.mean([r[cost] for r in found]) for found in points]
    mean, half = np.array([compare.interval([r["test"] for r in found]) for found in points]).T
    style = look(CURVES.index(arm)) | {"label": ARMS[arm].label}
    axis.plot(x, mean, marker=".", **style)
    half = np.nan_to_num(half)
    axis.fill_between(x, mean - half, mean + half, color=style["color"], alpha=0.05, linewidth=0)
