"""The picture of plans: how many steps pass between syncs, over the run."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.results.archive import corners
from experiments.results.plots import DASHES, legend, look, panes, save
from experiments.results.statistics import Comparison
from local_opt import SyncPlan


def periods(compared: Comparison) -> tuple[str, Callable]:
    """Section: H of every arm's plan over the steps of the run."""
    plans = {compared.arms[arm]: plan for arm, plan in compared.plans.items()}
    return "periods.png", lambda path, title: period_panels({"": (None, plans)}, path, title)


def period_panels(shown: Mapping[str, tuple], path: str, title: str) -> None:
    """Writes a PNG with a column per run: H of every plan over its steps, the learning rate below.

    Args:
      shown: {title: (learning rates float[T] or None, {label: plan of T steps})}; a label has the
        same look in every column.

    Raises:
      ValueError: if the plans of a run are of different lengths.

    Example:
      >>> import os, tempfile, local_opt
      >>> path = os.path.join(tempfile.mkdtemp(), "periods.png")
      >>> plans = {"H = 4": local_opt.constant(4, total_steps=100)}
      >>> period_panels({"one run": (None, plans)}, path, "constant")
      >>> os.path.exists(path)
      True
    """
    with_rate = any(rates is not None for rates, _ in shown.values())
    size, heights = (max(7.0, 6.0 * len(shown)), 4.6 + 1.5 * with_rate), [4, 1][: 1 + with_rate]
    figure, axes = panes(1 + with_rate, len(shown), size, sharex="col", height_ratios=heights)
    labels = list(dict.fromkeys(label for _, plans in shown.values() for label in plans))
    for column, (name, (rates, plans)) in zip(axes.T, shown.items(), strict=True):
        lengths = {plan.total_steps for plan in plans.values()}
        lengths |= set() if rates is None else {len(rates)}
        if len(lengths) != 1:
            raise ValueError(
                f"the plans of {name!r} have {sorted(lengths)} steps: one panel shows plans of one "
                "run; give every run its own panel."
            )
        draw_plans(column[0], plans, labels)
        column[0].set_title(name, fontsize="medium")
        if rates is not None:
            column[1].plot(np.arange(len(rates)), rates, color="#444444", linewidth=1.2)
            column[1].set(ylabel="learning rate", ylim=(0, None))
            column[1].grid(alpha=0.3)
        column[-1].set_xlabel("step")
    legend(figure)
    save(figure, path, title)


def draw_plans(axis, plans: Mapping[str, SyncPlan], labels: Sequence[str]) -> None:
    """H over steps; a label's place among `labels` decides its look.

    Many plans share H for a while: of the solid lines later ones are thinner, and dashes lie above
    them all, so that none hides another.
    """
    for label, plan in plans.items():
        place = labels.index(label)
        style = look(place)
        dashed = style["linestyle"] != DASHES[0]
        width = (2.4 if dashed else 5) - (0.6 if dashed else 3.2) * place / max(1, len(labels) - 1)
        style |= {"linewidth": width, "zorder": 2 + 0.5 * dashed}
        style |= {"solid_capstyle": "butt", "dash_capstyle": "butt"}
        axis.step(*corners(plan), where="post", label=label, **style)
    axis.set(yscale="log", ylabel="H, steps from sync to sync", xlim=(0, plan.total_steps))
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.xaxis.get_major_locator().set_params(nbins=6)
    axis.grid(alpha=0.3)
