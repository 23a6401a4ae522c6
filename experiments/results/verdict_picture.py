"""One picture of the verdicts on published sizes: intervals, in units of what was published."""

import math
from collections.abc import Sequence

from experiments.results.plots import legend, panes, save
from experiments.results.rule import NONE, OPPOSITE, REPRODUCED, SMALLER, UNDECIDED
from experiments.results.verdict_page import Row, needs

LEFT, RIGHT = -1.0, 3.0  # of the axis, in published effects
TICKS = {-1: "-1", 0: "0\nnothing", 0.5: "½", 1: "1\nas published", 2: "2", 3: "3"}
# Of Okabe and Ito, which stay apart for colour-blind readers.
COLOURS = {
    REPRODUCED: "#009E73", SMALLER: "#56B4E9", NONE: "#E69F00", OPPOSITE: "#D55E00",
    UNDECIDED: "#8C8C8C",
}  # fmt: skip


def shown(rows: Sequence[Row]) -> list[Row]:
    """Those that have a published size and an interval, in groups."""
    sized = [row for row in rows if getattr(row.claim.judge, "size", 0) > 0]
    known = [row for row in sized if not math.isnan(row.verdict.low)]
    order = list(dict.fromkeys(row.group for row in known))
    return sorted(known, key=lambda row: order.index(row.group))


def draw(rows: Sequence[Row], path: str) -> None:
    """Writes a PNG: a row per claim, its interval in published effects, coloured by the verdict."""
    rows, places, below, group = shown(rows), [], 0.0, None
    figure, ((axis,),) = panes(1, 1, (11.5, 2.5 + 0.24 * max(len(rows), 3)))
    axis.axvspan(0.5, 1, color="#009E73", alpha=0.07, linewidth=0)
    for x, style in ((0, "-"), (0.5, ":"), (1, "-")):
        axis.axvline(x, color="#444444", linewidth=0.9, linestyle=style, zorder=1)
    _text(axis, 1.01, 0, "seeds; time to decide", fontweight="bold")
    for row in rows:
        if row.group != group:
            group, below = row.group, below + 1.3 * (group is not None)
            _text(axis, -0.005, below, group or "Other", ha="right", fontweight="bold")
        below += 1
        places.append(below)
        _interval(axis, row, below)
        _text(axis, 1.01, below, f"{row.verdict.seeds}{needs(row)}")
    axis.set_yticks(places, [row.text for row in rows], fontsize=8)
    axis.set(xlim=(LEFT, RIGHT), ylim=(max(below, 3) + 0.7, -0.8))
    axis.set_xticks(list(TICKS), list(TICKS.values()))
    axis.set_xlabel("effect here / effect published (points / points, or log ratio / log ratio)")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    words = [row.verdict.word for row in rows]
    for word, colour in COLOURS.items():
        if word in words:
            label = f"{word} ({words.count(word)})"
            axis.plot([], [], color=colour, marker="o", ms=5.5, linewidth=1.8, label=label)
    legend(figure)
    save(
        figure, path,
        "What the recorded runs say of published effects\ndot: estimate, line: interval over seeds "
        "at the level of the look, arrow: goes on; open: a control does as well",
        fontsize=11,
    )  # fmt: skip


def _text(axis, x, y, text, **style):
    """Beside the axis: x in its widths."""
    axis.text(x, y, text, va="center", fontsize=8, transform=axis.get_yaxis_transform(), **style)


def _interval(axis, row, y):
    """The line, cut at the axis with an arrow where it goes on, and the dot if it lies within."""
    verdict, colour = row.verdict, COLOURS[row.verdict.word]
    low, high, mean = (v / verdict.size for v in (verdict.low, verdict.high, verdict.mean))
    gap = 0.02 * (RIGHT - LEFT)  # for the arrow, which is drawn around its point
    start, end = max(low, LEFT + gap), min(high, RIGHT - gap)
    if start < end:
        axis.plot([start, end], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
    for beyond, x, marker in ((low < LEFT, LEFT + gap, "<"), (high > RIGHT, RIGHT - gap, ">")):
        if beyond:
            axis.plot(x, y, marker, color=colour, ms=6, markeredgewidth=0)
    if LEFT + gap < mean < RIGHT - gap:
        face = "white" if verdict.note.endswith("as well") else colour
        axis.plot(mean, y, "o", color=colour, markerfacecolor=face, ms=5.5, zorder=3)
