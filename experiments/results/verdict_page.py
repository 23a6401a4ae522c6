"""Pages of verdicts: a row per claim, the page of all claims, the page of results, its picture."""

import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from experiments.cluster import files
from experiments.results import archive, plots, report, tables
from experiments.results.claims import AVERAGED, EPOCHS, RUNS
from experiments.results.effects import COSTS, Measure
from experiments.results.rule import (
    MATTERS,
    MISSES,
    UNDECIDED,
    VERDICTS,
    Claim,
    Verdict,
    history,
)
from experiments.results.statistics import Comparison
from experiments.results.tables import markdown, name_of, table

# Whose claims are, and of what. One of a sign alone cannot come out smaller than it.
SIZED, SIGN = "published with a size", "published as a sign, or as a gain that goes"
OURS = "ours, of a sign, which no paper states"
WHOSE = SIZED, SIGN, OURS
COLUMNS = {
    "cd_grab": tables.ORDER_COLUMNS, "qsr": tables.SYNC_COLUMNS, "echoing": tables.ECHO_COLUMNS
}  # fmt: skip
LEFT, RIGHT = -1, 3  # of the picture, in published effects
TICKS = {-1: "-1", 0: "0\nnothing", 0.5: "½", 1: "1\nas published", 2: "2", 3: "3"}
COLOURS = dict(zip(VERDICTS, ("#009E73", "#56B4E9", "#E69F00", "#D55E00", "#8C8C8C"), strict=False))


def load(folder: os.PathLike = archive.FOLDER) -> dict[str, Comparison]:
    """{name: comparison} of the recorded runs, in the order of `RUNS`."""
    found = {name: archive.load(name, folder) for name in RUNS}
    return {name: compared for name, compared in found.items() if compared}


class Row(NamedTuple):
    """A claim, and its verdicts, the latest last."""

    claim: Claim
    history: Sequence[Verdict]

    @property
    def text(self) -> str:
        return ", ".join(filter(None, (self.claim.text, self.claim.setting)))

    @property
    def verdict(self) -> Verdict:
        return self.history[-1]

    @property
    def whose(self) -> str:
        """Who claims what, of `WHOSE`."""
        if self.claim.known is None and self.claim.paper == "-":
            return OURS
        return SIZED if self.claim.known or self.claim.size else SIGN

    @property
    def paper(self) -> str:
        """What was published; "ours" for claims and sizes that no paper gives."""
        claim, size = self.claim, self.verdict.size
        unsaid = self.whose == OURS
        said = "ours" if unsaid else claim.paper
        ours = [kind.words for kind in MATTERS.values() if kind.size == size]
        if claim.size or not ours:
            return said
        return f"ours: {ours[0]}" if unsaid else f"{said} (ours: {ours[0]})"

    @property
    def needs(self) -> str:
        """The seeds that would decide it; "" if it is decided or they are unknown."""
        return f"; needs {self.verdict.needed:,}" if self.verdict.needed else ""

    @property
    def hours(self) -> str:
        """What the seeds that are missing take; "unknown" if they are."""
        hours = self.verdict.hours
        return "unknown" if math.isnan(hours) else f"{hours:.1f}" if hours < 10 else f"{hours:,.0f}"

    @property
    def looks(self) -> str:
        """The verdicts of all looks in one line; "" if there was only one."""
        looks = [f"{verdict.seeds} seeds {verdict.word}" for verdict in self.history]
        return ", ".join(looks) if len(looks) > 1 else ""

    @property
    def cells(self) -> dict[str, str]:
        seeds = f"{self.verdict.seeds or '-'}{self.needs}"
        return {
            "paper's number": self.paper,
            "ours": self.verdict.text,
            "verdict": self.verdict.words,
            "seeds": f"{seeds}; {self.looks}" if self.looks else seeds,
        }


def rows(recorded: Mapping[str, Comparison], claims: Sequence[Claim]) -> list[Row]:
    """One row per claim."""
    return [Row(claim, history(claim, recorded)) for claim in claims]


def count(found: Sequence[Row]) -> str:
    """The number of rows per verdict, apart for what papers say and what we ask."""
    lines = []
    for whose in WHOSE:
        words = [row.verdict.word for row in found if row.whose == whose]
        counts = [f"{words.count(word)} {word}" for word in VERDICTS if word in words]
        lines += [f"- {len(words)} {whose}: {', '.join(counts)}."] * bool(words)
    tested = sum(not math.isnan(row.verdict.found.low) for row in found)
    text = (
        f"{tested} claims were tested, each at an error rate of its own, {100 * MISSES:g} % over "
        f"all looks at it: about {MISSES * tested:.0f} of\nthese intervals may miss by chance. "
        "*Times less* is a geometric mean over seeds, *times fewer*, with ± in the tables of\nthe "
        "runs, an arithmetic one."
    )
    return "\n".join([*lines, "", text])


def undecided(found: Sequence[Row]) -> list[Row]:
    """The undecided rows, those that need the fewest further seeds first."""

    def further(row):
        return (row.verdict.needed or math.inf) - row.verdict.seeds

    return sorted((row for row in found if row.verdict.word == UNDECIDED), key=further)


def averages(recorded: Mapping[str, Comparison]) -> str:
    """What CD-GraB gains over D-RR with last weights and with averaged ones, at 95 %."""
    lines = []
    for name, scalar in AVERAGED.items():
        compared = recorded.get(name)
        for what in (scalar, "epoch") if compared and compared.averaged else ():
            line = {"task": RUNS[name].title, "of": EPOCHS if what in COSTS else name_of(scalar)}
            for head, of in (("last weights", False), ("averaged weights", True)):
                effect = Measure(what, averaged=of)(compared)
                line[head] = effect.text(effect.interval(0.05))
            lines.append(line)
    return markdown(lines) if lines else "None."


def page_of_results(found: Sequence[Row], recorded: Mapping[str, Comparison]) -> str:
    """The picture, the number of claims per verdict, averaged weights, the undecided claims."""
    lines = [
        {
            "undecided": row.text,
            "paper's number": row.paper,
            "seeds": row.verdict.seeds or "-",
            "needs": f"{row.verdict.needed:,}" if row.verdict.needed else "unknown",
            "hours": row.hours,
        }
        for row in undecided(found)
    ]
    changed = [row for row in found if len({verdict.word for verdict in row.history}) > 1]
    again = "\n".join(f"- {row.text}: {row.looks}." for row in changed)
    return "\n\n".join([
        "![Effects of the recorded runs in units of those published](results.png)",
        f"{len(found)} claims ([every one, with the published number and ours]"
        f"(papers.md#verdicts)):\n\n{count(found)}",
        "## Averaged weights",
        "CD-GraB against D-RR at the end of a run, and how many epochs each takes to the best of "
        "D-RR with the same weights.\nEvery order has its own rate, with averaged weights another. "
        "Intervals are 95 %.",
        averages(recorded),
        *(["## Verdicts that more seeds changed", again] if again else []),
        "## Undecided claims",
        "Those that need the fewest further seeds come first. *Needs* is the number of seeds with "
        "which the next look\nwould decide, if mean and variance stay the same, *hours* what those "
        "that are missing take on one core: each the mean\nof the recorded seconds per run. Claims "
        "of one run share its seeds.",
        markdown(lines) if lines else "None.",
        "## Effect sizes that we chose",
        markdown([{"of": kind.of, "size that matters": kind.words} for kind in MATTERS.values()]),
    ])  # fmt: skip


def page_of_claims(found: Sequence[Row], recorded: Mapping[str, Comparison], folder) -> str:
    """Every claim with its verdict, and the recorded runs."""
    lines = []
    for row in found:
        command = row.claim.command or "-"
        if name := next(iter(row.claim.runs), None):
            command = f"[{name}](#{name})" if name in recorded else "shown by `verdicts`"
        lines.append({"claim": row.text, **row.cells, "command": command})
    sections = [section(name, own, folder) for name, own in recorded.items()]
    return "\n\n".join([count(found), markdown(lines), "## Runs", *sections])


def section(name: str, comparison: Comparison, folder: os.PathLike = archive.FOLDER) -> str:
    """A recorded run: command, versions, and its table and picture or a link to them."""
    run, path = RUNS[name], pathlib.Path(folder) / name
    versions = files.read_json(path / archive.VERSIONS)
    command = (path / archive.COMMAND).read_text(encoding="utf-8").rstrip()
    parts = [
        f"### {name}",
        f"{run.title}. Scaled down: {run.scaled}. JAX {versions['jax']} on {versions['device']}.",
        "\n".join(f"    {line}" for line in command.splitlines()),
    ]
    if run.tables:
        return "\n\n".join([*parts, f"Tables and pictures: [{run.tables}]({run.tables})."])
    study = comparison.records[0]["study"]
    parts += [table(comparison, COLUMNS[study], speed) for speed in comparison.speeds]
    parts += [report.diverged_rates(comparison)]
    if study == "cd_grab":
        parts += [f"![{run.title}](orders_{name}.png)"]
    return "\n\n".join(filter(None, parts))


def picture(found: Sequence[Row], path: str) -> None:
    """Writes a PNG: per published effect, its interval in units of that effect, and its verdict."""
    known = [row for row in found if row.claim.size and not math.isnan(row.verdict.found.low)]
    figure, ((axis,),) = plots.panes(1, 1, (11.5, 2.5 + 0.24 * max(len(known), 3)))
    axis.axvspan(0.5, 1, color="#009E73", alpha=0.07, linewidth=0)
    for x, style in ((0, "-"), (0.5, ":"), (1, "-")):
        axis.axvline(x, color="#444444", linewidth=0.9, linestyle=style, zorder=1)
    beside = {"va": "center", "fontsize": 8, "transform": axis.get_yaxis_transform()}
    for y, row in enumerate(known):
        verdict, colour = row.verdict, COLOURS[row.verdict.word]
        mean, low, high = np.clip(np.divide(verdict.found, verdict.size), LEFT, RIGHT)
        axis.plot([low, high], [y, y], color=colour, linewidth=1.8, label=verdict.word)
        face = "white" if verdict.note.endswith("as well") else colour
        marker = {LEFT: "<", RIGHT: ">"}.get(mean, "o")
        axis.plot(mean, y, marker, color=colour, markerfacecolor=face, ms=5.5, clip_on=False)
        axis.text(1.01, y, f"{verdict.seeds} seeds{row.needs}", **beside)
    axis.set_yticks(range(len(known)), [row.text for row in known], fontsize=8)
    axis.set(xlim=(LEFT, RIGHT), ylim=(max(len(known), 3) - 0.3, -0.8))
    axis.set_xticks(list(TICKS), list(TICKS.values()))
    axis.set_xlabel("effect here / effect published (points / points, or log ratio / log ratio)")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    plots.legend(figure)
    title = (
        "Published effects in the recorded runs\ndot: estimate, line: interval over seeds at the "
        "level of the look; triangle: beyond the axis; open: a control does as well"
    )
    plots.save(figure, path, title, fontsize=11)
