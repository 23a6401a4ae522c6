"""Pictures: curves over their costs, and effects."""

import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments import files
from experiments.report import statistics
from experiments.report.statistics import AVERAGED, Chosen, Comparison, interval, named, tested
from experiments.report.tables import LABELS, name_of

# Okabe and Ito's colours, which colour-blind readers can tell apart, as rows of a table get them.
COLOURS = BLACK, BLUE, ORANGE, GREEN, PINK, SKY, RED, GREY = (
    "#000000",
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#999999",
)
MARKERS = "os^DvXP"
CURVES = 5  # of one panel, at most
LOGARITHMIC = (
    "train/above_optimum",
    "bound/linf",
    "bound/l2",
    "drift",
    "loads",
    "rounds",
    "allreduces",
    "H",
)


class Panel(NamedTuple):
    """A row of a picture."""

    scalar: str  # of the records; "objective" chose the rates, "metric" is what is reported
    x: tuple[str, ...] = ("epoch", "seconds")  # costs of the records, a column each
    fastest: bool = False  # at the rates that reach the target first; a dotted line shows it


SYNC_PANELS = (
    Panel("metric", ("rounds", "seconds")),
    Panel("train/loss", ("step", "seconds")),
    Panel("drift", ("step", "rounds")),
)
RUN_PANELS = tuple(Panel(name, ("step",)) for name in ("objective", "metric", "drift"))


def styles_of(names: Iterable[str]) -> dict[str, dict]:
    """{name: its colour and marker}, of one cycle: the first row of a table is black."""
    return {
        name: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "markevery": 0.1,
            "ms": 4,
        }
        for i, name in enumerate(names)
    }


def curves(frame, x: str, y: str, *, axis, styles: Mapping[str, Mapping], by="arm", at="step"):
    """Draws a curve for each value of `by`: the mean of y over seeds, with its 95 % interval.

    A curve ends where its shortest run does.

    Args:
      frame: a pandas.DataFrame with the columns x, y, `by`, `at` and "seed".
      x, y: columns, which name the axes; of x the mean over seeds is shown.
      styles: {value of `by`: options of a matplotlib line}.
      at: the column whose equal values are one point of a curve.
    """
    for name, rows in frame.groupby(by, sort=False):
        rows, style = rows.drop_duplicates([at, "seed"], keep="last"), styles[name]
        values = rows.set_index([at, "seed"])[y].unstack().to_numpy(float)
        places = rows.set_index([at, "seed"], drop=False)[x].unstack().to_numpy(float).mean(axis=1)
        kept = np.isfinite(values).all(axis=1) & np.isfinite(places)
        if not kept.any():
            continue
        values, places = values[kept], places[kept]
        mean, half = np.array([interval(of_seeds) for of_seeds in values]).T
        axis.plot(places, mean, **{"label": name} | style)
        axis.plot(places[-1], mean[-1], **style | {"label": None, "markevery": 1, "ms": 6})
        if np.isfinite(half).all():
            low = mean - half
            if y in LOGARITHMIC:  # where a band may not reach 0
                low = np.maximum(low, values.min(axis=1) / 2)
            color = style["color"]
            axis.fill_between(places, low, mean + half, color=color, alpha=0.1, linewidth=0)
    axis.set(xlabel=name_of(x), ylabel=name_of(y))
    axis.grid(alpha=0.3)
    _scale(axis, x)


def comparison(
    compared: Comparison, panels: Sequence[Panel], path: str, title: str, speed: float | None = None
) -> None:
    """Writes a PNG: a row per panel, each arm at its own best rate, mean and 95 % interval.

    With many arms, each of `groups` has its own row with the same axes. Scalars without a row in
    LABELS or among the panels get one over steps; those that were not recorded are left out.
    Nothing is written if every run diverged.
    """
    rows = _rows(compared, panels, speed)
    if not rows:
        return
    shown = [one for one in compared.at(speed) if len(one.runs)]
    split = groups([one.arm for one in shown])
    count, width = len(split), max(len(panel.x) for panel in rows)
    high, wide = (3.7, 4.7) if count == 1 else (2.5, 4.0)
    size = max(6.5, wide * width), high * count * len(rows) + 1.2  # the title is so wide
    figure, axes = panes(count * len(rows), width, size)
    for panel, block in zip(rows, np.split(axes, len(rows)), strict=True):
        _share(block, len(panel.x))
        frame, styles = _lines(compared, panel, shown)
        for row, arms in zip(block, split, strict=True):
            for axis, x in zip(row, panel.x, strict=False):
                of_arms = frame[frame.arm.isin(arms)]
                curves(of_arms, x, panel.scalar, axis=axis, styles=styles, by="line")
                _target(compared, panel, x, arms, axis)
        _trim(block, len(panel.x), int(9.6 * high))
        if panel.scalar in LOGARITHMIC and max(axis.dataLim.y1 for axis in block.flat) > 0:
            block[0, 0].set_yscale("log")
        else:
            _zoom(block[0, 0], frame, panel.scalar)
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


def _lines(compared, panel: Panel, best: Sequence[Chosen]):
    """The rows of a panel's curves, which "line" names, and {line: its style}.

    The curves are of the arms; then, hollow, of other best rates and of averaged weights.
    """
    import pandas

    first, other, colours = best, compared.averaged, styles_of(compared.arms)
    if panel.fastest and math.isfinite(statistics.target_of(compared)):
        first = [statistics.at(compared, one, "fastest") for one in best]
    slower = [one for one, fast in zip(best, first, strict=True) if one.rate != fast.rate]
    averaged = [other.chosen.get((one.arm, one.speed)) for one in best] if other else []
    parts, styles, hollow = [], {}, {"markerfacecolor": "white", "linewidth": 0.8}
    for chosen, ending, weights, look in (
        (first, "", "", {}),
        (slower, ", lowest", "", hollow),
        (averaged, ", averaged", AVERAGED, hollow),
    ):
        for one in (one for one in chosen if one and len(one.runs)):
            line, label = one.arm + ending, f"{one.label}{ending} (lr {one.rate:g})"
            styles[line] = colours[one.arm] | look | {"label": label}
            values = one.runs.get(panel.scalar + weights, math.nan)
            parts.append(one.runs.assign(line=line, **{panel.scalar: values}))
    return pandas.concat(parts), styles


def _target(compared, panel: Panel, x: str, arms: Sequence[str], axis):
    """The target as a dotted line; at the fastest rates also where all seeds of an arm reach it."""
    goal, target = tested(compared.criterion), statistics.target_of(compared)
    if panel.scalar != goal.scalar or not (panel.fastest or goal.when == "target"):
        return
    best = f"{compared.baseline().label}'s best" if panel.fastest else None
    axis.axhline(target, color="#444444", linewidth=0.8, linestyle=":", label=best)
    styles = styles_of(compared.arms)
    for arm in arms if panel.fastest else ():
        taken = statistics.column(statistics.frame(compared, "fastest"), arm, f"to {x}")
        mean, half = interval(taken)
        if math.isfinite(mean):
            look = {"ms": 10, "markeredgecolor": "white", "linewidth": 2.5, "capsize": 5}
            look |= {name: styles[arm][name] for name in ("color", "marker")}
            axis.errorbar(mean, target, xerr=np.nan_to_num(half), zorder=4, **look)


def _share(block, width: int):
    """Shares a panel's axes: one scale for each of its costs, and one of the scalar."""
    for row in block:
        for axis, top in zip(row[:width], block[0], strict=False):
            if axis is not block[0, 0]:
                axis.sharey(block[0, 0])
            if axis is not top:
                axis.sharex(top)
        for axis in row[width:]:
            axis.set_visible(False)


def _trim(block, width: int, wide: int):
    """Names and numbers at the edges of a panel alone."""
    for i, row in enumerate(block):
        for axis in row[:width]:
            left, low = axis is row[0], i == len(block) - 1
            axis.set_ylabel(textwrap.fill(axis.get_ylabel(), wide) if left else "")
            axis.set_xlabel(axis.get_xlabel() if low else "")
            axis.tick_params(labelleft=left, labelbottom=low)


def _rows(compared, panels, speed) -> list[Panel]:
    """The panels of what was recorded."""
    runs = [one.runs.select_dtypes("number") for one in compared.at(speed)]
    scalars = {name for rows in runs for name in rows if np.isfinite(rows[name]).any()}
    if not all(one.runs.timed.all() for one in compared.at(speed)):
        scalars.discard("seconds")
    others = scalars - {panel.scalar for panel in panels} - LABELS.keys()
    new = (name for name in others if re.match("(?!train|valid|test).+/", name))
    fastest = any(panel.fastest for panel in panels[:1])
    panels = [*panels, *(Panel(name, ("step",), fastest) for name in sorted(new))]
    rows = [
        p._replace(scalar=named(compared, p.scalar), x=tuple(n for n in p.x if n in scalars))
        for p in panels
    ]
    return list(dict.fromkeys(row for row in rows if row.scalar in scalars and row.x))


def _scale(axis, x):
    if x in LOGARITHMIC:
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


def _zoom(axis, frame, scalar: str):
    """Limits the axis to the values after the first fifth, which would flatten the rest."""
    ends = frame.groupby("line").step.transform("max")
    late = frame.loc[frame.step > 0.2 * ends, scalar]
    late = late[np.isfinite(late)]
    if len(late):
        margin = 0.08 * (late.max() - late.min()) + 1e-3 * (abs(late.max()) or 1)
        axis.set_ylim(late.min() - margin, late.max() + margin)


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


def periods(shown: Mapping[str, tuple], path: str, title: str) -> None:
    """Writes a PNG with a column per run: H of every plan over its steps, the learning rate below.

    Args:
      shown: {title: (learning rates float[T], {label: plan of T steps})}.
    """
    import pandas

    from experiments.report import archive

    size = max(7.0, 6.0 * len(shown)), 6.1
    figure, axes = panes(2, len(shown), size, sharex="col", height_ratios=(4, 1))
    for (above, below), (name, (rates, plans)) in zip(axes.T, shown.items(), strict=True):
        styles, parts = styles_of(plans), []
        for place, (label, plan) in enumerate(plans.items()):
            # Many plans share H for a while: later lines are thinner, and lie above.
            width = 5 - 3.5 * place / max(1, len(plans) - 1)
            styles[label] |= {"drawstyle": "steps-post", "linewidth": width, "ms": 8}
            styles[label] |= {"markeredgecolor": "white"}
            steps, periods = archive.corners(plan)
            parts.append(pandas.DataFrame({"arm": label, "seed": 0, "step": steps, "H": periods}))
        curves(pandas.concat(parts), "step", "H", axis=above, styles=styles)
        above.set(title=name, yscale="log", xlabel="")
        above.yaxis.set_major_formatter("{x:,g}")
        below.plot(np.arange(len(rates)), rates, color="#444444", linewidth=1.2)
        below.set(xlabel="steps", xlim=(0, len(rates)), ylabel="learning rate", ylim=(0, None))
        below.grid(alpha=0.3)
    legend(figure)
    save(figure, path, title)


def herding(records, labels: Mapping[str, str], path: str, title: str) -> None:
    """Writes a PNG: the bound over rounds at the most workers, and over workers at the end."""
    import pandas

    frame = pandas.DataFrame(records).assign(seed=0).rename(columns={"bound": "bound/linf"})
    figure, ((left, right),) = panes(1, 2, (11, 4.4))
    styles = {name: style | {"label": labels[name]} for name, style in styles_of(labels).items()}
    for axis, over, other in ((left, "round", "workers"), (right, "workers", "round")):
        at_most = frame[frame[other] == frame[other].max()]
        curves(at_most, over, "bound/linf", axis=axis, styles=styles, by="order", at=over)
        axis.set_yscale("log")
        _plain(axis.yaxis)
    widths = sorted(frame.workers.unique())
    left.set_xlabel(f"rounds (W = {widths[-1]})")
    right.set(xlabel=f"workers (after {frame['round'].max()} rounds)", xscale="log")
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
