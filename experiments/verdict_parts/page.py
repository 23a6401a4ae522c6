"""Verdicts as people read them: a row per claim, their table, and the page of results."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.results.statistics import Comparison
from experiments.results.tables import markdown
from experiments.verdict_parts.claim import Claim, history, seconds_per_seed
from experiments.verdict_parts.claims import CLAIMS
from experiments.verdict_parts.rule import MATTERS, UNDECIDED, VERDICTS, Verdict
from experiments.verdict_parts.runs import RUNS

PICTURE = "results.png"
TABLE = "../experiments/README.md#verdicts"
GROUPS = {"cd_grab": "Orders", "qsr": "Synchronisation", "echoing": "Echoing"}  # by study


class Row(NamedTuple):
    """A claim, at all learning rates at which the same was seen.

    Fields:
      text: the claim with its settings; claim: at the first of them.
      history: its verdicts, the latest last; hours: to decide it, None where that is unknown.
    """

    text: str
    claim: Claim
    history: Sequence[Verdict]
    hours: float | None
    group: str

    @property
    def verdict(self) -> Verdict:
        return self.history[-1]


def rows(recorded: Mapping[str, Comparison], claims: Sequence[Claim] = CLAIMS) -> list[Row]:
    """One per claim; of one thing at several learning rates one, where all is equal."""
    found = {}
    for claim in claims:
        past = history(claim, recorded)
        name = claim.runs[0] if claim.runs else None
        hours, verdict = None, past[-1]
        if verdict.needed and (seconds := seconds_per_seed(claim, recorded)) is not None:
            hours = (verdict.needed - verdict.seeds) * seconds / 3600
        group = recorded[name].records[0].get("study", "") if name in recorded else ""
        row = Row(claim.text, claim, past, hours, GROUPS.get(group, group))
        settings = found.setdefault((claim.text, name, *_cells(row).values()), (row, []))[1]
        settings.append(claim.setting)
    joined = []
    for row, settings in found.values():
        text = ", ".join(filter(None, (row.text, " and ".join(filter(None, settings)))))
        joined.append(row._replace(text=text))
    return joined


def count(found: Sequence[Row]) -> str:
    """How many rows have which verdict."""
    words = [row.verdict.word for row in found]
    return ", ".join(f"{words.count(word)} {word}" for word in VERDICTS if word in words)


def results(found: Sequence[Row]) -> str:
    """The page of results: the picture, how many have which verdict, what is undecided."""
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
    again = [f"- {row.text}: {looks(row)}." for row in changed]
    sizes = [{"of": kind.of, "size that matters": kind.words} for kind in MATTERS.values()]
    parts = [
        f"![Effects of the recorded runs in units of those published]({PICTURE})",
        f"All {len(found)} claims: {count(found)}.\n[Every claim, what was published and what was "
        f"seen]({TABLE}).",
        *(["## Verdicts that more seeds changed", "\n".join(again)] if again else []),
        "## Undecided, the cheapest first",
        "With so many seeds the next look would decide, if mean and variance stay, or further "
        "seeds are like these\nwhere some never arrive; the time is that of both arms on the "
        "machine that ran them, and claims of one run\nshare its seeds.",
        markdown(lines) if lines else "None.",
        "## Sizes that are ours",
        markdown(sizes),
    ]
    return "\n\n".join(parts)


def table(found: Sequence[Row], recorded: Mapping[str, Comparison]) -> str:
    """All that is known of every claim."""
    lines = []
    for row in found:
        name = row.claim.runs[0] if row.claim.runs else None
        made = name in RUNS and RUNS[name].command
        command = row.claim.command or (
            f"`verdicts --run=undecided --names={name}`" if made else "-"
        )
        command = f"[{name}](#{name})" if name in recorded else command
        lines.append({"claim": row.text, **_cells(row), "command": command})
    return markdown(lines)


def _cells(row: Row) -> dict[str, str]:
    claim, verdict = row.claim, row.verdict
    return {
        "paper's number": paper(row),
        "ours": verdict.text,
        "scaled down": claim.scaled or (RUNS[claim.runs[0]].scaled if claim.runs else "-"),
        "verdict": verdict.words,
        "seeds": seeds(row),
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


def seeds(row: Row) -> str:
    """Compared, needed, and the verdicts of earlier looks."""
    compared = f"{row.verdict.seeds or '-'}{needs(row)}"
    return "; ".join(filter(None, (compared, looks(row))))


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
