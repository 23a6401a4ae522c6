"""The picture of a comparison of synchronisation rules."""

import numpy as np

from experiments import compare
from experiments.plan_plots import draw_plans, look
from experiments.plots import pyplot, save
from experiments.sync_rules import RULES


def comparison(chosen, plans, path: str, title: str) -> None:
    """Writes a PNG: accuracy against volume and against time, H over steps, drift over steps.

    Args:
      chosen: {rule: records of all seeds at its best rate}.
      plans: {rule: SyncPlan}.
      path, title: of the picture.
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
    panels = axes.ravel()
    for rule, records in chosen.items():
        if records:
            equal = [r for r in chosen if plans[r].rounds == plans[rule].rounds]
            aside = 1.04 ** (equal.index(rule) - (len(equal) - 1) / 2)
            _volume(panels[0], rule, records, aside * plans[rule].volume)
            _curve(panels[1], rule, records, "seconds", "test_accuracy")
            _curve(panels[3], rule, records, "step", "drift")
    _label(
        panels[0],
        "volume, share of steps with a sync (equal ones side by side)",
        "test accuracy at the end",
    )
    panels[0].set_xscale("log")
    panels[0].set_xticks([0.05, 0.1, 0.2, 0.5, 1.0], ["5 %", "10 %", "20 %", "50 %", "100 %"])
    panels[0].minorticks_off()
    panels[0].set_xlim(0.8 * min(p.volume for p in plans.values()), 1.15)
    _label(panels[1], "seconds of training (workers in turn, no network)", "test accuracy")
    _zoom(panels[1], chosen)
    labels = [rule.label for rule in RULES.values()]
    draw_plans(panels[2], {RULES[rule].label: plans[rule] for rule in chosen}, labels)
    panels[2].set_xlabel("step")
    _label(panels[3], "step", "worker drift at syncs, |x_w - mean| / |mean|")
    panels[3].set_yscale("log")
    handles, labels = panels[2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    seeds = max((len({r["seed"] for r in own}) for own in chosen.values()), default=0)
    figure.suptitle(
        f"{title}: each rule at its own best peak rate, {seeds} seeds, mean and 95 % interval"
    )
    save(figure, path)


def style(rule: str) -> dict:
    """One look per rule, the same in every picture."""
    return look(list(RULES).index(rule)) | {"label": RULES[rule].label}


def _by_step(records, name):
    """float[seeds, evaluations]; gaps are nan."""
    seeds = sorted({r["seed"] for r in records})
    steps = sorted({r["step"] for r in records})
    values = {(r["seed"], r["step"]): r.get(name) for r in records}
    return np.array([[values.get((s, t)) for t in steps] for s in seeds], float)


def _volume(axis, rule, records, x):
    mean, half = compare.interval(_by_step(records, "test_accuracy")[:, -1])
    look = style(rule)
    half = None if np.isnan(half) else half
    axis.errorbar(x, mean, yerr=half, marker="o", capsize=4, **look)


def _curve(axis, rule, records, x_name, name):
    values = _by_step(records, name)
    kept = ~np.isnan(values).any(axis=0)
    if not kept.any():
        return
    x = _by_step(records, x_name).mean(axis=0)[kept]
    mean, half = np.array([compare.interval(v) for v in values[:, kept].T]).T
    half = np.nan_to_num(half)
    look = style(rule)
    axis.plot(x, mean, **look)
    low = mean - half
    if name == "drift":  # on a logarithmic axis, where a band may not reach 0
        low = np.maximum(low, values[:, kept].min(axis=0) / 2)
    axis.fill_between(x, low, mean + half, color=look["color"], alpha=0.12, linewidth=0)


def _label(axis, x, y):
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)


def _zoom(axis, chosen):
    """Leaves out the first evaluations' low accuracies, which would flatten the rest."""
    values = [_by_step(own, "test_accuracy") for own in chosen.values() if own]
    late = np.concatenate([v[:, v.shape[1] // 4 :].ravel() for v in values])
    margin = 0.1 * (late.max() - late.min()) + 1e-3
    axis.set_ylim(late.min() - margin, late.max() + margin)
