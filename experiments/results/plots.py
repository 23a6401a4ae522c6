"""Pictures: curves over their costs, effects, and herding bounds."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.cluster import files
from experiments.results import archive, statistics
from experiments.results.statistics import AVERAGED, Comparison, interval, tested
from experiments.results.tables import SCALARS, name_of

# Okabe and Ito's colours, which stay apart for colour-blind readers.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#0072B2", "#999999")
DASHES = ("-", (0, (3, 1.5)))


class Panel(NamedTuple):
    """A row of a picture."""

    scalar: str  # of the records; "objective" chose the rates, "metric" is what is reported
    x: tuple[str, ...] = ("epoch", "seconds")  # costs of the records, a column each


ORDER_PANELS = (Panel("objective"), Panel("metric"), Panel("bound/linf"))
SYNC_PANELS = (
    Panel("metric", ("rounds", "seconds")),
    Panel("train/loss", ("step", "seconds")),
    Panel("drift", ("step", "rounds")),
)
ECHO_PANELS = (Panel("metric", ("loads", "step")), Panel("metric", ("seconds", "rounds")))
COMBINED_PANELS = (
    Panel("objective", ("step", "loads", "allreduces", "seconds")),
    Panel("metric", ("step", "loads", "allreduces", "seconds")),
)


def comparison(
    compared: Comparison, panels: Sequence[Panel], path: str, title: str, speed: float | None = None
) -> None:
    """Writes a PNG: a row per panel, each arm at its own best rate, mean and 95 % interval.

    Scalars without a row of SCALARS get a panel over steps too; those that were not recorded are
    left out. Nothing is written if every run diverged.
    """
    rows, goal = _rows(compared, panels, speed), tested(compared.criterion)
    if not rows:
        return
    shown = [own for own in compared.at(speed) if own.runs]
    width = max(len(x) for _, x in rows)
    size = max(6.5, 4.7 * width), 3.7 * len(rows) + 0.9  # the title is so wide
    figure, axes = panes(len(rows), width, size, sharey="row")
    for row, (scalar, names) in zip(axes, rows, strict=True):
        curves = [(scalar, look([*compared.arms].index(own.arm)), own) for own in shown]
        curves += _averaged(compared, scalar, shown)
        for axis, x in zip(row, names, strict=False):
            for name, style, own in curves:
                style = {"label": f"{own.label} (lr {own.rate:g})"} | style
                _draw(axis, own.runs.values(), x, name, style)
            if goal.when == "target" and scalar == goal.scalar:
                axis.axhline(goal.target, color="#444444", linewidth=0.8, linestyle=":")
            _label(axis, x)
        for axis in row[len(names) :]:
            axis.set_visible(False)
        row[0].set_ylabel(name_of(scalar))
        if _logarithmic(scalar) and row[0].dataLim.y1 > 0:
            row[0].set_yscale("log")
        else:
            _zoom(row[0], [statistics.values(own.runs.values(), name) for name, _, own in curves])
    legend(figure)
    counts = [len(own.runs) for own in shown]
    few, seeds = min(counts), max(counts)
    many = "one seed" if seeds == 1 else f"{seeds} seeds, mean and 95 % interval"
    many = many if few == seeds else f"{few} to {many}"
    at = "" if speed is None else f", R = {speed:g}"
    save(
        figure, path,
        f"{title}{at}\neach at its own best learning rate, {many}",
    )  # fmt: skip


def _logarithmic(name: str) -> bool:
    """Whether curves or costs differ by factors."""
    known = SCALARS.get(name.removesuffix(AVERAGED))
    return known is not None and known.logarithmic


def _averaged(compared, scalar: str, shown) -> list[tuple]:
    """(scalar, look, arm) of these arms' averaged weights, each at its best rate for these."""
    found, other = [], compared.averaged
    for own in [other.chosen.get((own.arm, own.speed)) for own in shown] if other else []:
        if own and own.runs:  # of slow input: reported at this rate too
            style = look([*compared.arms].index(own.arm)) | {"linestyle": ":"}
            style["label"] = f"{own.label}, averaged (lr {own.rate:g})"
            found.append((scalar + AVERAGED, style, own))
    return found


def _rows(compared, panels, speed) -> list[tuple[str, tuple]]:
    """The (scalar, costs) that were recorded."""
    names = {
        "objective": tested(compared.criterion).scalar,
        "metric": f"test/{statistics.metric_of(compared)}",
    }
    runs = [run for own in compared.at(speed) for run in own.runs.values()]
    known = {k for run in runs for r in run for k, v in r.items() if v is not None}
    if any(len(statistics.timed(own.runs)) < len(own.runs) for own in compared.at(speed)):
        known.discard("seconds")
    new = (k for k in known if re.match("(?!train|valid|test).+/", k) and k not in SCALARS)
    panels = [*panels, *(Panel(name, ("step",)) for name in sorted(new))]
    rows = [(names.get(p.scalar, p.scalar), p.x) for p in panels]
    rows = [(scalar, tuple(n for n in x if n in known)) for scalar, x in rows if scalar in known]
    rows = [(scalar, x) for scalar, x in rows if x]
    return list(dict.fromkeys(rows))


def _draw(axis, runs, cost: str, scalar: str, style) -> None:
    """A curve with its interval, up to the end of the shortest run."""
    found, at = statistics.values(runs, scalar), statistics.values(runs, cost).mean(axis=0)
    kept = np.isfinite(found).all(axis=0) & np.isfinite(at)
    if not kept.any():
        return
    x, found = at[kept], found[:, kept]
    mean, half = np.array([interval(v) for v in found.T]).T
    low, high = mean - np.nan_to_num(half), mean + np.nan_to_num(half)
    if _logarithmic(scalar):  # where a band may not reach 0
        low = np.maximum(low, found.min(axis=0) / 2)
    axis.plot(x, mean, **style, marker="o" if len(x) < 20 else None, ms=3)
    axis.fill_between(x, low, high, color=style["color"], alpha=0.1, linewidth=0)
    axis.plot(x[-1], mean[-1], "o", color=style["color"], ms=5)


def _label(axis, x):
    axis.set_xlabel(name_of(x))
    axis.grid(alpha=0.3)
    if _logarithmic(x):
        axis.set_xscale("log")
        _plain(axis.xaxis)
    else:
        axis.locator_params(axis="x", nbins=5)
        axis.xaxis.set_major_formatter("{x:,g}")


def _plain(axis):
    """Labels a logarithmic axis with plain numbers instead of powers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    # Of a few numbers between two powers, those that are there; of many powers, these alone.
    subs = (1, 1.25, 2, 5, 8) if high < 5 * low else (1, 2, 5) if high < 200 * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def _zoom(axis, found: Sequence[np.ndarray]):
    """Limits the axis to the values after the first fifth, which would flatten the rest."""
    late = np.concatenate([v[:, v.shape[1] // 5 :].ravel() for v in found])
    late = late[np.isfinite(late)]
    if len(late):
        margin = 0.08 * (late.max() - late.min()) + 1e-3 * (abs(late.max()) or 1)
        axis.set_ylim(late.min() - margin, late.max() + margin)


def look(place: int) -> dict:
    """Colour and dash of the line in this place; a colour's second use has the other dash."""
    dashed = (place + place // len(COLOURS)) % 2
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[dashed]}


def effects(found: Sequence, path: str, title: str) -> None:
    """Writes a PNG: a panel per `combined.Response`, of six, a row per effect with its interval."""
    figure, axes = panes(2, 3, (15, 7.2), sharey=True)
    for axis, response in zip(axes.flat, found, strict=True):
        names, (mean, half) = [*response.effects], np.transpose([*response.effects.values()])
        half = np.nan_to_num(half)  # of one seed
        bounds, y = np.array([mean, mean - half, mean + half]), np.arange(len(names))
        mean, low, high = np.exp(bounds) if response.relative else bounds
        axis.axvline(1 if response.relative else 0, color="0.5", linewidth=1)
        axis.hlines(y, low, high, color=COLOURS[6], linewidth=2)
        axis.plot(mean, y, "o", color=COLOURS[4], ms=5)
        axis.set_yticks(y, names)
        kind = "factor on the" if response.relative else "change of the"
        axis.set_xlabel(f"{kind} {response.label}")
        axis.grid(alpha=0.3, axis="x")
        if response.relative:
            axis.set_xscale("log")
            axis.set_xlim(min(low.min(), 0.8) / 1.05, max(high.max(), 1.25) * 1.05)
            _plain(axis.xaxis)
    axes[0][0].invert_yaxis()
    one = all(math.isnan(width) for own in found for _, width in own.effects.values())
    many = "one seed" if one else "95 % intervals over seeds"
    save(figure, path, f"{title}\neffects from the first level to the second, {many}")


def periods(shown: Mapping[str, tuple], path: str, title: str) -> None:
    """Writes a PNG with a column per run: H of every plan over its steps, the learning rate below.

    Args:
      shown: {title: (learning rates float[T], {label: plan of T steps})}; a label has the same look
        in every column.
    """
    labels = list(dict.fromkeys(label for _, plans in shown.values() for label in plans))
    size = max(7.0, 6.0 * len(shown)), 6.1
    figure, axes = panes(2, len(shown), size, sharex="col", height_ratios=(4, 1))
    for (above, below), (name, (rates, plans)) in zip(axes.T, shown.items(), strict=True):
        for label, plan in plans.items():
            # Many plans share H for a while: later lines are thinner, and lie above.
            place = labels.index(label)
            style = look(place) | {"linewidth": 5 - 3.5 * place / max(1, len(labels) - 1)}
            above.step(*archive.corners(plan), where="post", label=label, **style)
        above.set(title=name, yscale="log", ylabel="H, steps from sync to sync")
        above.yaxis.set_major_formatter("{x:,g}")
        below.plot(np.arange(len(rates)), rates, color="#444444", linewidth=1.2)
        below.set(xlabel="step", xlim=(0, len(rates)), ylabel="learning rate", ylim=(0, None))
        for axis in (above, below):
            axis.grid(alpha=0.3)
    legend(figure)
    save(figure, path, title)


def herding(records, labels: Mapping[str, str], path: str, title: str) -> None:
    """Writes a PNG: the bound over rounds at the most workers, and over workers at the end."""
    figure, ((left, right),) = panes(1, 2, (11, 4.4))
    widths, rounds = (sorted({r[name] for r in records}) for name in ("workers", "round"))
    for i, (name, label) in enumerate(labels.items()):
        bounds = {(r["workers"], r["round"]): r["bound"] for r in records if r["order"] == name}
        style = look(i) | {"label": label, "marker": "o", "ms": 4}
        left.plot(rounds, [bounds[widths[-1], k] for k in rounds], **style)
        right.plot(widths, [bounds[width, rounds[-1]] for width in widths], **style)
    for axis in (left, right):
        axis.set(yscale="log", ylabel=name_of("bound/linf"))
        _plain(axis.yaxis)
        axis.grid(alpha=0.3)
    left.set_xlabel(f"rounds (W = {widths[-1]})")
    right.set(xlabel=f"workers (after {rounds[-1]} rounds)", xscale="log")
    right.set_xticks(widths, [str(w) for w in widths])
    right.minorticks_off()
    legend(figure)
    save(figure, path, title)


def panes(rows: int, columns: int, size: tuple[float, float], **options):
    """(figure, axes [rows, columns]). Imports matplotlib, which takes a second."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def legend(figure) -> None:
    """One legend for all axes, below them."""
    found = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    widest = 0.6 + 0.09 * max(map(len, found), default=0)  # inches of an entry
    columns = max(1, min(4, len(found), int(figure.get_figwidth() / widest)))
    figure.legend(found.values(), found, loc="outside lower center", ncols=columns)


def save(figure, path: str, title: str, **options) -> None:
    figure.suptitle(title, **options)
    figure.savefig(content := io.BytesIO(), dpi=110)
    files.write_whole(path, content.getvalue())
