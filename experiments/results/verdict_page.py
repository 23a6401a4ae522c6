"""Verdicts as people read them: a row per claim, their table, the page of results, its picture."""

import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.results import archive, plots, report, statistics, tables
from experiments.results.claims import RUNS
from experiments.results.rule import MATTERS, UNDECIDED, VERDICTS, Claim, Verdict, history
from experiments.results.statistics import Comparison
from experiments.results.tables import markdown, table

PICTURE = "results.png"
ALL = "../experiments/README.md#verdicts"
STUDIES = {  # (heading, columns)
    "cd_grab": ("Orders", tables.ORDER_COLUMNS),
    "qsr": ("Synchronisation", tables.SYNC_COLUMNS),
    "echoing": ("Echoing", tables.ECHO_COLUMNS),
}


def load(folder: os.PathLike = archive.FOLDER) -> dict[str, Comparison]:
    """{name: comparison} of the recorded runs of `RUNS`, in their order."""
    found = {name: archive.load(name, folder) for name in RUNS}
    return {name: compared for name, compared in found.items() if compared}


class Row(NamedTuple):
    """A claim, at all learning rates at which the same was seen.

    Fields:
      text: the claim with its settings; claim: at the first of them.
      history: its verdicts, the latest last; hours: to decide it, None where that is unknown.
      group: of the picture.
    """

    text: str
    claim: Claim
    history: Sequence[Verdict]
    hours: float | None
    group: str

    @property
    def verdict(self) -> Verdict:
        return self.history[-1]


def rows(recorded: Mapping[str, Comparison], claims: Sequence[Claim]) -> list[Row]:
    """One per claim; of one thing at several learning rates one, where all is equal."""
    found = {}
    for claim in claims:
        past, name = history(claim, recorded), next(iter(claim.runs), None)
        group = STUDIES[recorded[name].records[0]["study"]][0] if name in recorded else ""
        row = Row(claim.text, claim, past, _hours(claim, past[-1], recorded), group)
        settings = found.setdefault((claim.text, name, *_cells(row).values()), (row, []))[1]
        settings.append(claim.setting)
    joined = []
    for row, settings in found.values():
        text = ", ".join(filter(None, (row.text, " and ".join(filter(None, settings)))))
        joined.append(row._replace(text=text))
    return joined


def _hours(claim, verdict, recorded) -> float | None:
    """Of the seeds that are needed, of both arms at their own rates, in all of a claim's runs."""
    if not verdict.needed:
        return None
    asked = {}
    for name, runs in zip(claim.runs, verdict.runs, strict=False):
        asked.setdefault(name, set()).update(runs)
    each = [archive.seconds_per_seed(recorded[name], runs) for name, runs in asked.items()]
    if None in each:
        return None
    return (verdict.needed - verdict.seeds) * sum(each) / 3600


def count(found: Sequence[Row]) -> str:
    """How many rows have which verdict."""
    words = [row.verdict.word for row in found]
    return ", ".join(f"{words.count(word)} {word}" for word in VERDICTS if word in words)


def page_of_results(found: Sequence[Row]) -> str:
    """The picture, how many have which verdict, what is undecided."""
    undecided = [row for row in found if row.verdict.word == UNDECIDED]
    undecided.sort(key=lambda row: math.inf if row.hours is None else row.hours)
    lines = [
        {
            "undecided": row.text,
            "paper's number": paper(row),
            "seeds": row.verdict.seeds or "-",
            "needs": f"{row.verdict.needed:,}" if row.verdict.needed else "unknown",
            "time": "unknown" if row.hours is None else show_hours(row.hours),
        }
        for row in undecided
    ]
    changed = [row for row in found if len({verdict.word for verdict in row.history}) > 1]
    again = "\n".join(f"- {row.text}: {looks(row)}." for row in changed)
    return "\n\n".join([
        f"![Effects of the recorded runs in units of those published]({PICTURE})",
        f"All {len(found)} claims: {count(found)}.\n[Every claim, what was published and what was "
        f"seen]({ALL}).",
        *(["## Verdicts that more seeds changed", again] if again else []),
        "## Undecided, the cheapest first",
        "With so many seeds the next look would decide, if mean and variance stay, or further "
        "seeds are like these\nwhere some never arrive; the time is that of both arms on the "
        "machine that ran them, and claims of one run\nshare its seeds.",
        markdown(lines) if lines else "None.",
        "## Sizes that are ours",
        markdown([{"of": kind.of, "size that matters": kind.words} for kind in MATTERS.values()]),
    ])  # fmt: skip


def page_of_claims(found: Sequence[Row], recorded: Mapping[str, Comparison], folder) -> str:
    """All that is known of every claim, and the recorded runs."""
    lines = []
    for row in found:
        name = next(iter(row.claim.runs), None)
        command = row.claim.command or "-"
        if name in recorded:
            command = f"[{name}](#{name})"
        elif name and RUNS[name].command:
            command = f"`verdicts --run=undecided --names={name}`"
        lines.append({"claim": row.text, **_cells(row), "command": command})
    sections = [section(name, own, folder) for name, own in recorded.items()]
    return "\n\n".join([f"{count(found)}.", markdown(lines), "## Runs", *sections])


def _cells(row: Row) -> dict[str, str]:
    claim, verdict = row.claim, row.verdict
    return {
        "paper's number": paper(row),
        "ours": verdict.text,
        "scaled down": claim.scaled or (RUNS[claim.runs[0]].scaled if claim.runs else "-"),
        "verdict": verdict.words,
        "seeds": "; ".join(filter(None, (f"{verdict.seeds or '-'}{needs(row)}", looks(row)))),
    }


def paper(row: Row) -> str:
    """What was published; what no paper says, and a size that none says, are ours."""
    claim, size = row.claim, row.verdict.size
    ours = [kind.words for kind in MATTERS.values() if kind.size == size]
    unsaid = claim.judge is not None and claim.paper == "-"
    said = "ours" if unsaid else claim.paper
    if getattr(claim.judge, "size", None) != 0 or not ours:
        return said
    return f"ours: {ours[0]}" if unsaid else f"{said} (ours: {ours[0]})"


def needs(row: Row) -> str:
    """What would decide it: "" for what is decided, or where it is unknown."""
    if not row.verdict.needed:
        return ""
    hours = "" if row.hours is None else f", {show_hours(row.hours)}"
    return f"; needs {row.verdict.needed:,}{hours}"


def show_hours(hours: float) -> str:
    """In two digits.

    Example:
      >>> show_hours(0.02), show_hours(12.3), show_hours(1234.0)
      ('1 min', '12 h', '1,200 h')
    """
    if hours < 1:
        return f"{max(1, round(60 * hours))} min"
    return f"{float(f'{hours:.2g}'):,g} h"


def looks(row: Row) -> str:
    """The verdicts of all looks in a line; "" where there was one."""
    if len(row.history) == 1:
        return ""
    return ", ".join(f"{verdict.seeds} seeds {verdict.word}" for verdict in row.history)


def section(name: str, comparison: Comparison, folder: os.PathLike = archive.FOLDER) -> str:
    """A recorded run: its command, versions, table and picture, or where these are."""
    run, path = RUNS[name], pathlib.Path(folder) / name
    versions = json.loads((path / archive.VERSIONS).read_text(encoding="utf-8"))
    command = (path / archive.COMMAND).read_text(encoding="utf-8").rstrip()
    parts = [
        f"### {name}",
        f"{run.title}. Scaled down: {'; '.join(filter(None, (run.scaled, run.details)))}. JAX "
        f"{versions['jax']} on {versions['device']}.",
        "\n".join(f"    {line}" for line in command.splitlines()),
    ]
    if run.tables:
        return "\n\n".join([*parts, f"Tables and pictures: [{run.tables}]({run.tables})."])
    study = comparison.records[0]["study"]
    parts += [table(comparison, STUDIES[study][1], speed) for speed in comparison.speeds]
    parts += [report.diverged_rates(comparison)]
    if study == "cd_grab":
        parts += [f"![{run.title}](../docs/orders_{name}.png)"]
    return "\n\n".join(filter(None, parts))


def draw_orders(recorded: Mapping[str, Comparison], folder: pathlib.Path) -> None:
    """Every run of orders against epochs and against seconds."""
    for name, compared in recorded.items():
        run = RUNS[name]
        if compared.records[0]["study"] == "cd_grab":
            kept = [r for r in compared.records if r["epoch"] >= run.shown_from]
            shown = statistics.compare(kept, compared.arms, compared.criterion)
            title = f"{run.title}, from epoch {run.shown_from}" if run.shown_from else run.title
            plots.comparison(shown, plots.ORDER_PANELS, str(folder / f"orders_{name}.png"), title)
