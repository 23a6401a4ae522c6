"""The picture of plans: how many steps pass between syncs, over the run."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.plots import COLOURS, pyplot, save
from local_opt.plan import SyncPlan
from plans import evaluate_schedule

DASHES = ("-", (0, (3, 1.5)))


class Panel(NamedTuple):
    """One run: its plans by label, and the learning rate that they follow."""

    title: str
    plans: Mapping[str, SyncPlan]
    lr: object = None  # a schedule, a number or float[T]; None leaves its row out


def periods(plans: Mapping[str, SyncPlan], path: str, title: str, *, lr=None) -> None:
    """Writes a PNG: H of every plan over the steps of one run, the learning rate below.

    Args:
      plans: by label, all of one run.
      path: of the PNG.
      title: above the picture.
      lr: schedule, number or float[T]; None for a picture of the plans alone.

    Raises:
      ValueError: if there is no plan, or the plans are of different lengths.

    Example:
      >>> import os, tempfile, local_opt
      >>> path = os.path.join(tempfile.mkdtemp(), "periods.png")
      >>> periods({"H = 4": local_opt.constant(4, total_steps=100)}, path, "constant")
      >>> os.path.exists(path)
      True
    """
    period_panels([Panel("", plans, lr)], path, title)


def period_panels(panels: Sequence[Panel], path: str, title: str) -> None:
    """As `periods`, one column per run; a label has the same look in every column."""
    for panel in panels:
        lengths = sorted({plan.total_steps for plan in panel.plans.values()})
        if len(lengths) != 1:
            raise ValueError(
                f"the plans of {panel.title!r} have {lengths} steps: one panel shows plans of one "
                "run; give every run its own panel."
            )
    plt = pyplot()
    with_rate = any(panel.lr is not None for panel in panels)
    figure, axes = plt.subplots(
        1 + with_rate,
        len(panels),
        figsize=(max(7.0, 6.0 * len(panels)), 4.6 + 1.5 * with_rate),
        squeeze=False,
        sharex="col",
        height_ratios=[4, 1][: 1 + with_rate],
        layout="constrained",
    )
    labels = list(dict.fromkeys(label for panel in panels for label in panel.plans))
    for column, panel in enumerate(panels):
        draw_plans(axes[0][column], panel.plans, labels)
        axes[0][column].set_title(panel.title, fontsize="medium")
        if panel.lr is not None:
            _draw_rate(axes[1][column], panel)
        axes[-1][column].set_xlabel("step")
    handles = {}
    for axis in axes[0]:
        handles |= dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=min(4, len(labels)),
    )
    figure.suptitle(title)
    save(figure, path)


def look(place: int) -> dict:
    """Colour and dash of the line in this place; a colour's second use has the other dash."""
    dashed = (place + place // len(COLOURS)) % 2
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[dashed]}


def draw_plans(axis, plans: Mapping[str, SyncPlan], labels: Sequence[str]) -> None:
    """H over steps; a label's place among `labels` decides its look."""
    for label, plan in plans.items():
        place = labels.index(label)
        style = look(place)
        # Many plans share H for a while: of the solid lines later ones are thinner, and dashes
        # lie above them all, so that none hides another.
        dashed = style["linestyle"] != DASHES[0]
        width = (2.4 if dashed else 5) - (0.6 if dashed else 3.2) * place / max(1, len(labels) - 1)
        steps, lengths = corners(plan)
        axis.step(
            steps,
            lengths,
            where="post",
            label=label,
            **style,
            linewidth=width,
            zorder=2 + 0.5 * dashed,
            solid_capstyle="butt",
            dash_capstyle="butt",
        )
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_ylabel("H, steps from sync to sync")
    axis.set_xlim(0, plan.total_steps)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    axis.xaxis.get_major_locator().set_params(nbins=6)
    axis.grid(alpha=0.3)


def _draw_rate(axis, panel):
    steps = next(iter(panel.plans.values())).total_steps
    values = panel.lr
    if callable(values) or np.ndim(values) == 0:
        values = evaluate_schedule(values, steps, "lr")
    axis.plot(np.arange(steps), values, color="#444444", linewidth=1.2)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("learning rate")
    axis.grid(alpha=0.3)


def corners(plan: SyncPlan) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which H changes, with the end of the run, and H from there on.

    A line needs no other points, and rounds of equal length are most of them.
    """
    kept = np.flatnonzero(np.diff(plan.periods, prepend=-1))
    steps = np.append(plan.starts[kept], plan.total_steps)
    return steps, np.append(plan.periods[kept], plan.periods[-1])
