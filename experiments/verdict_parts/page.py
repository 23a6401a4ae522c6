"""Verdicts as people read them: a row per claim, their table, and the page of results."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.results.statistics import Comparison
from experiments.results.tables import markdown
from experiments.verdict_parts.claims import CLAIMS, Claim, history, seconds_per_seed
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


def table(found: Sequence[Row], recorded: Mapping[str, Comparison]) -> str:
    """All that is known of every claim."""
    lines = []
    for row in found:
        name = row.claim.runs[0] if row.claim.runs else None
        command = f"[{name}](#{name})" if name in recorded else row.claim.command or "-"
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
    verdict, parts = row.verdict, [f"{row.verdict.seeds or '-'}"]
    if verdict.word == UNDECIDED and verdict.needed:
        parts.append(f"needs {verdict.needed:,} seeds{_hours(row.hours)}")
    return "; ".join(filter(None, [*parts, looks(row)]))


def looks(row: Row) -> str:
    """The verdicts of all looks in a line; "" where there was one."""
    if len(row.history) == 1:
        return ""
    return ", ".join(f"{verdict.seeds} seeds {verdict.word}" for verdict in row.history)


def _hours(hours: float | None) -> str:
    return "" if hours is None else f", {hours:.2g} h"
