"""Pictures: curves over their costs, effects, and herding bounds."""

import collections
import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments import files
from experiments.report import statistics
from experiments.report.statistics import (
    AVERAGED,
    Chosen,
    Comparison,
    curves,
    interval,
    tested,
)
from experiments.report.tables import LABELS, name_of

# Okabe and Ito's colours, which stay apart for colour-blind readers.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
RED, PINK, BLUE, GREY = "#D55E00", "#CC79A7", "#0072B2", "#999999"
COLOURS = BLACK, ORANGE, SKY, GREEN, RED, PINK, BLUE, GREY
# A method's colour and marker in every picture: baselines are black, one colour per idea.
METHODS = {
    "rr": (BLACK, "o"), "blocks": (SKY, "P"), "unzip": (GREY, "D"), "id_mean": (PINK, "v"),
    "id_pair": (ORANGE, "^"), "cd_grab": (BLUE, "s"), "so": (GREEN, "X"), "herding": (RED, "*"),
    "parallel": (BLACK, "o"), "accumulate": (GREY, "D"), "constant": (RED, "^"),
    "matched": (RED, "v"), "post_local": (ORANGE, "D"), "swap": (SKY, "X"), "inverse": (PINK, "<"),
    "qsr": (GREEN, "P"), "cubic": (BLUE, ">"), "every_load": (SKY, "h"), "every_factor": (RED, "d"),
    "accumulate_factor": (GREY, "P"), "coins": (PINK, "X"),
    "none": (BLACK, "o"), "fixed": (ORANGE, "^"), "bernoulli": (RED, "v"), "diffusion": (PINK, "X"),
    "measured": (SKY, "*"), "local": (GREEN, "p"), "larger_lr": (BLUE, "s"),
    "diffusion_every": (PINK, "d"), "algorithm2": (RED, "<"), "proximal": (ORANGE, "h"),
    "proximal_strong": (ORANGE, "D"),
}  # fmt: skip
CURVES = 5  # of one panel, at most
LOGARITHMIC = (
    "train/above_optimum",
    "bound/linf",
    "bound/l2",
    "drift",
    "loads",
    "rounds",
    "allreduces",
)


class Panel(NamedTuple):
    """A row of a picture."""

    scalar: str  # of the records; "objective" chose the rates, "metric" is what is reported
    x: tuple[str, ...] = ("epoch", "seconds")  # costs of the records, a column each
    fastest: bool = False  # at the rate that is first at the target, which is dotted


class Line(NamedTuple):
    """A scalar of runs, the rows of `Comparison.data`, and its look."""

    scalar: str
    runs: Any
    style: Mapping


ORDER_PANELS = (Panel("objective"), Panel("metric"), Panel("bound/linf"))
SYNC_PANELS = (
    Panel("metric", ("rounds", "seconds")),
    Panel("train/loss", ("step", "seconds")),
    Panel("drift", ("step", "rounds")),
)
RUN_PANELS = tuple(Panel(name, ("step",)) for name in ("objective", "metric", "drift"))
ECHO_PANELS = (Panel("metric", ("loads", "step")), Panel("metric", ("seconds", "rounds")))
COMBINED_PANELS = (
    Panel("objective", ("step", "loads", "allreduces", "seconds")),
    Panel("metric", ("step", "loads", "allreduces", "seconds")),
)


def comparison(
    compared: Comparison, panels: Sequence[Panel], path: str, title: str, speed: float | None = None
) -> None:
    """Writes a PNG: a row per panel, each arm at its own best rate, mean and 95 % interval.

    With many arms, each of `groups` has its own row with the same axes. Scalars without a row in
    LABELS get a panel over steps, too; those that were not recorded are left out. Nothing is
    written if every run diverged.
    """
    rows, goal = _rows(compared, panels, speed), tested(compared.criterion)
    if not rows:
        return
    shown = [one for one in compared.at(speed) if len(one.runs)]
    styles, split = styles_of(compared.arms), groups([one.arm for one in shown])
    target = statistics.target_of(compared)
    count, width = len(split), max(len(panel.x) for panel in rows)
    high, wide = (3.7, 4.7) if count == 1 else (2.5, 4.0)
    size = max(6.5, wide * width), high * count * len(rows) + 1.2  # the title is so wide
    figure, axes = panes(count * len(rows), width, size)
    for panel, block in zip(rows, np.split(axes, len(rows)), strict=True):
        drawn = []
        _share(block, panel)
        for row, arms in zip(block, split, strict=True):
            lines = _lines(compared, panel, [one for one in shown if one.arm in arms], styles)
            drawn += lines
            for axis, x in zip(row, panel.x, strict=False):
                for line in lines:
                    curve(axis, line.runs, x, line.scalar, line.style)
                if (panel.fastest or goal.when == "target") and panel.scalar == goal.scalar:
                    best = f"{compared.baseline().label}'s best" if panel.fastest else None
                    axis.axhline(target, color="#444444", linewidth=0.8, linestyle=":", label=best)
                    table = statistics.frame(compared, "fastest") if panel.fastest else None
                    for arm in arms if panel.fastest else ():
                        taken = statistics.column(table, arm, f"to {x}")
                        _arrival(axis, taken, target, styles[arm])
            row[0].set_ylabel(textwrap.fill(name_of(panel.scalar), int(9.6 * high)))
        for axis, x in zip(block[0], panel.x, strict=False):
            _scale(axis, x)
        if _logarithmic(panel.scalar) and max(axis.dataLim.y1 for axis in block.flat) > 0:
            block[0, 0].set_yscale("log")
        else:
            _zoom(block[0, 0], [_shared(line.runs, line.scalar) for line in drawn])
    legend(figure)
    counts = [one.runs.seed.nunique() for one in shown]
    few, seeds = min(counts), max(counts)
    many = "one seed" if seeds == 1 else f"{seeds} seeds, mean and 95 % interval"
    many = many if few == seeds else f"{few} to {many}"
    at = "" if speed is None else f", R = {speed:g}"
    if rows[0].fastest:  # the legend says at which rates
        return save(figure, path, f"{title}{at}: {many}")
    several = any(len(one.tried) > 1 for one in shown)
    best = "each at its own best learning rate, " * several
    subtitle = textwrap.fill(f"{best}{many}", int(12 * size[0]))
    save(figure, path, f"{title}{at}\n{subtitle}")


def groups(arms: Sequence[str]) -> list[list[str]]:
    """Groups of arms for one panel each: one if they are few; else each has the first arm."""
    if len(arms) <= CURVES:
        return [[*arms]]
    most = math.ceil((len(arms) - 1) / math.ceil((len(arms) - 1) / (CURVES - 1)))
    result = [[]]
    for _, of_method in itertools.groupby(arms[1:], key=lambda arm: arm.split("+")[0]):
        group = [*of_method]
        if result[-1] and len(result[-1]) + len(group) > most:
            result.append([])
        result[-1] += group
    return [[arms[0], *others] for others in result]


def _lines(compared, panel: Panel, best: Sequence[Chosen], styles) -> list[Line]:
    """The curves of a panel: of arms, then of other best rates and averaged weights, hollow."""
    first, other = best, compared.averaged
    if panel.fastest and math.isfinite(statistics.target_of(compared)):
        first = [statistics.at(compared, one, "fastest") for one in best]
    slower = [one for one, fast in zip(best, first, strict=True) if one.rate != fast.rate]
    averaged = [other.chosen.get((one.arm, one.speed)) for one in best] if other else []

    def line(one, ending="", weights="", **style):
        style = styles[one.arm] | {"label": f"{one.label}{ending} (lr {one.rate:g})"} | style
        return Line(panel.scalar + weights, one.runs, style)

    hollow = {"markerfacecolor": "white", "linewidth": 0.8}
    return [
        *(line(one) for one in first),
        *(line(one, ", lowest", **hollow) for one in slower),
        *(line(one, ", averaged", AVERAGED, **hollow) for one in averaged if one and len(one.runs)),
    ]


def _share(block, panel: Panel):
    """Shares a panel's axes: one scale per cost, one of the scalar; labels only at the edges."""
    for i, row in enumerate(block):
        for axis, top, x in zip(row, block[0], panel.x, strict=False):
            if axis is not block[0, 0]:
                axis.sharey(block[0, 0])
            if axis is not top:
                axis.sharex(top)
            axis.grid(alpha=0.3)
            axis.set_xlabel(name_of(x) if i == len(block) - 1 else "")
            axis.tick_params(labelleft=axis is row[0], labelbottom=i == len(block) - 1)
        for axis in row[len(panel.x) :]:
            axis.set_visible(False)


def _logarithmic(name: str) -> bool:
    """Whether curves or costs differ by factors."""
    return name.removesuffix(AVERAGED) in LOGARITHMIC


def _averaged(compared, scalar: str, shown, styles) -> list[tuple]:
    """(scalar, style, arm) of the arms' averaged weights, each at its best rate for averages."""
    curves, other = [], compared.averaged
    for chosen in [other.chosen.get((one.arm, one.speed)) for one in shown] if other else []:
        if chosen and chosen.runs:  # of slow input: reported at this rate too
            style = styles[chosen.arm] | {"markerfacecolor": "white", "linewidth": 0.8}
            style["label"] = f"{chosen.label}, averaged (lr {chosen.rate:g})"
            curves.append((scalar + AVERAGED, style, chosen))
    return curves


def _rows(compared, panels, speed) -> list[Panel]:
    """The panels of what was recorded."""
    names = {
        "objective": tested(compared.criterion).scalar,
        "metric": f"test/{statistics.metric_of(compared)}",
    }
    runs = [one.runs.select_dtypes("number") for one in compared.at(speed)]
    scalars = {name for rows in runs for name in rows if np.isfinite(rows[name]).any()}
    if not all(one.runs.timed.all() for one in compared.at(speed)):
        scalars.discard("seconds")
    new = (k for k in scalars if re.match("(?!train|valid|test).+/", k) and k not in LABELS)
    panels = [*panels, *(Panel(name, ("step",), panels[0].fastest) for name in sorted(new))]
    rows = [
        p._replace(scalar=names.get(p.scalar, p.scalar), x=tuple(n for n in p.x if n in scalars))
        for p in panels
    ]
    return list(dict.fromkeys(row for row in rows if row.scalar in scalars and row.x))


def curve(axis, runs, x: str, y: str, style) -> None:
    """A scalar of runs over a cost: its mean and 95 % interval, up to the end of the shortest."""
    values, at = curves(runs, y), curves(runs, x).mean(axis=1, skipna=False)
    kept = np.isfinite(values).all(axis=1) & np.isfinite(at)
    if not kept.any():
        return
    x, values = at[kept].to_numpy(), values[kept].to_numpy()
    mean, half = np.array([interval(of_seeds) for of_seeds in values]).T
    low, high = mean - np.nan_to_num(half), mean + np.nan_to_num(half)
    if _logarithmic(y):  # where a band may not reach 0
        low = np.maximum(low, values.min(axis=1) / 2)
    axis.plot(x, mean, **style)
    axis.fill_between(x, low, high, color=style["color"], alpha=0.1, linewidth=0)
    axis.plot(x[-1], mean[-1], **style | {"label": None, "markevery": 1, "ms": 6})


def _shared(runs, scalar: str):
    """Its curves at the steps that all runs have."""
    return curves(runs, scalar)[curves(runs, "step").notna().all(axis=1)]


def _arrival(axis, taken: Iterable[float], target: float, style):
    """Marks the mean cost at which all seeds reach the target, with its interval."""
    mean, half = interval(taken)
    if math.isfinite(mean):
        axis.errorbar(
            mean,
            target,
            xerr=np.nan_to_num(half),
            color=style["color"],
            marker=style["marker"],
            ms=10,
            markeredgecolor="white",
            linewidth=2.5,
            capsize=5,
            zorder=4,
        )


def _scale(axis, x):
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
    # Over a narrow range, ticks between the powers of ten; over many powers, only these.
    subs = (1, 1.25, 2, 5, 8) if high < 5 * low else (1, 2, 5) if high < 200 * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def _zoom(axis, tables: Sequence):
    """Limits the axis to the values after the first fifth, which would flatten the rest."""
    late = np.concatenate([table[len(table) // 5 :].to_numpy().ravel() for table in tables])
    late = late[np.isfinite(late)]
    if len(late):
        margin = 0.08 * (late.max() - late.min()) + 1e-3 * (abs(late.max()) or 1)
        axis.set_ylim(late.min() - margin, late.max() + margin)


def styles_of(names: Iterable[str]) -> dict[str, dict]:
    """{name: its colour, marker and dash}.

    Methods are words of a name. The first one that is not black gives the colour and the last the
    marker, independently of the other names. Names without a method get a free colour; dashes
    distinguish names that would look equal.
    """
    styles, used = {}, collections.Counter()
    for name in sorted(names, key=lambda name: not METHODS.keys() & {*name.split("+")}):
        styled = [METHODS[word] for word in name.split("+") if word in METHODS]
        free = min(COLOURS, key=[colour for colour, _ in used.elements()].count), "o"
        coloured = [style for style in styled if style[0] != BLACK] or styled[:1] or [free]
        coloured = coloured[0][0], coloured[-1][1]
        line = (0, (6, *(1.5, 1.5) * (used[coloured] - 1), 1.5)) if used[coloured] else "-"
        used[coloured] += 1
        styles[name] = dict(
            color=coloured[0], marker=coloured[1], linestyle=line, markevery=0.1, ms=4
        )
    return {name: styles[name] for name in names}


def effects(
    responses: Sequence,
    path: str,
    title: str,
    subtitle: str = "effects, first level to second",
    styles: Mapping[str, dict] | None = None,
) -> None:
    """Writes a PNG: a panel per `combined.Response`, a row per effect with its interval."""
    columns = min(3, len(responses))
    size = 5 * columns, len(responses) // columns * (1.6 + 0.3 * len(responses[0].effects))
    figure, axes = panes(len(responses) // columns, columns, size, sharey=True)
    for axis, response in zip(axes.flat, responses, strict=True):
        names, (mean, half) = [*response.effects], np.transpose([*response.effects.values()])
        half, zero = np.nan_to_num(half), 1 if response.relative else 0  # one seed: no interval
        bounds = np.array([mean, mean - half, mean + half])
        mean, low, high = np.exp(bounds) if response.relative else bounds
        axis.axvline(zero, color="0.5", linewidth=1)
        for y, name in enumerate(names):
            style = (styles or {}).get(name, {"color": BLACK, "marker": "o"})
            axis.hlines(y, low[y], high[y], color=style["color"], linewidth=2, alpha=0.5)
            axis.plot(mean[y], y, **style | {"markevery": None, "ms": 6})
        axis.set_yticks(range(len(names)), [textwrap.fill(name, 34) for name in names])
        axis.margins(y=0.15)
        kind = "factor on the" if response.relative else "change of the"
        axis.set_xlabel(f"{kind} {response.label}")
        axis.grid(alpha=0.3, axis="x")
        if response.relative:
            axis.set_xscale("log")
            axis.set_xlim(min(low.min(), 0.8) / 1.05, max(high.max(), 1.25) * 1.05)
            _plain(axis.xaxis)
    axes[0][0].invert_yaxis()
    one = all(math.isnan(width) for each in responses for _, width in each.effects.values())
    many = "one seed" if one else "95 % intervals over seeds"
    save(figure, path, f"{title}\n{subtitle}, {many}")


def periods(shown: Mapping[str, tuple], names: Mapping[str, str], path: str, title: str) -> None:
    """Writes a PNG with a column per run: H of every plan over its steps, the learning rate below.

    Args:
      shown: {title: (learning rates float[T], {label: plan of T steps})}.
      names: {label: words of the rule}, which give its look.
    """
    from experiments.report import archive

    styles = styles_of(names.values())
    size = max(7.0, 6.0 * len(shown)), 6.1
    figure, axes = panes(2, len(shown), size, sharex="col", height_ratios=(4, 1))
    for (above, below), (name, (rates, plans)) in zip(axes.T, shown.items(), strict=True):
        for place, (label, plan) in enumerate(plans.items()):
            # Many plans share H for a while: later lines are thinner, and lie above.
            style = styles[names[label]] | {"ms": 8, "markeredgecolor": "white"}
            style["linewidth"] = 5 - 3.5 * place / max(1, len(plans) - 1)
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
    for name, style in styles_of(labels).items():
        bounds = {(r["workers"], r["round"]): r["bound"] for r in records if r["order"] == name}
        style = style | {"label": labels[name]}
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
    entries = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    widest = 0.75 + 0.09 * max(map(len, entries), default=0)  # inches of an entry
    columns = max(1, min(4, len(entries), int(figure.get_figwidth() / widest)))
    figure.legend(
        entries.values(), entries, loc="outside lower center", ncols=columns, handlelength=3.5
    )


def save(figure, path: str, title: str) -> None:
    figure.suptitle(title)
    figure.savefig(content := io.BytesIO(), dpi=110)
    files.write_whole(path, content.getvalue())
