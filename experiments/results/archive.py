"""Runs that are kept: what records are compared by, and records, rounded and compressed.

comparison.json says what a folder's metrics are compared by: the criterion, the arms with their
labels, the baseline first, and their sync plans as [first step, H] wherever H changes. looks.jsonl
says how often the run was looked at, with how many seeds each time, and by what they were made.
"""

import datetime
import gzip
import itertools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

import local_opt
from experiments.cluster import files
from experiments.results import records
from experiments.results.statistics import Comparison, Criterion, compare

FOLDER = pathlib.Path(__file__).parents[1] / "runs"
METRICS, COMMAND, COMPARISON = "metrics.jsonl.gz", "command.txt", "comparison.json"
LOOKS, VERSIONS = "looks.jsonl", "versions.json"
COPIED = ("settings.json", VERSIONS, COMPARISON)
DIGITS = 6  # significant ones


def record(results: str, target: os.PathLike, command: str) -> None:
    """Keeps a finished output folder; ValueError for one that has not ended, or no command."""
    if not (command or "").strip():
        raise ValueError(f"--command is {command!r}: pass what made the run, DIR for its data.")
    needed = (records.METRICS, "table.md", *COPIED)
    missing = [part for part in needed if not os.path.exists(os.path.join(results, part))]
    if missing:
        raise ValueError(
            f"{results!r} has no {', '.join(missing)}: only runs that have ended are recorded. "
            "Give the run's command again, which goes on where it was stopped."
        )
    target, rows = pathlib.Path(target), records.read(os.path.join(results, records.METRICS))
    versions = files.read_json(os.path.join(results, VERSIONS))
    looked = _and_another(target, rows, versions, commands_of(command))
    target.mkdir(parents=True, exist_ok=True)
    for part in COPIED:
        shutil.copyfile(os.path.join(results, part), target / part)
    (target / COMMAND).write_text(command.strip() + "\n", encoding="utf-8")
    _write(target, rows, looked)


def extend(target: os.PathLike, rows: Iterable[Mapping], commands: list[str]) -> None:
    """Adds the records of further seeds to a recorded run, and the look at all of them."""
    target = pathlib.Path(target)
    rows = [*_rows(target), *rows]
    _write(target, rows, _and_another(target, rows, records.versions(), commands))


def load(name: str, folder: os.PathLike = FOLDER) -> Comparison | None:
    """A recorded run; None if there is none of this name."""
    path = pathlib.Path(folder) / name
    if not (path / METRICS).exists():
        return None
    rows = _rows(path)
    compared = restore(rows, files.read_json(path / COMPARISON))
    return compared._replace(looks=tuple(_looks(path, rows)))


def command_of(name: str, folder: os.PathLike = FOLDER) -> str:
    """The first of those that made a recorded run, in one line."""
    return commands_of((pathlib.Path(folder) / name / COMMAND).read_text(encoding="utf-8"))[0]


def commands_of(text: str) -> list[str]:
    """Each with its own lines joined, where a backslash parts them."""
    return re.sub(r"\s*\\\n\s*", " ", text).strip().splitlines()


def _write(target: pathlib.Path, rows: Iterable[Mapping], looked: Iterable[Mapping]) -> None:
    temporary = target / f"{METRICS}.tmp"
    temporary.write_bytes(pack(rows))
    records.write_lines(str(target / LOOKS), looked)
    os.replace(temporary, target / METRICS)


def pack(rows: Iterable[Mapping]) -> bytes:
    """JSON lines with floats of six digits, compressed; equal rows give equal bytes."""

    def rounded(value):
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    lines = [json.dumps({k: rounded(v) for k, v in row.items()}) + "\n" for row in rows]
    return gzip.compress("".join(lines).encode(), mtime=0)


def _rows(path: pathlib.Path) -> list[dict]:
    lines = gzip.decompress((path / METRICS).read_bytes()).decode().splitlines()
    return [*map(json.loads, lines)]


# Looks: how often a run was looked at decides the level of its intervals, as of `rule.level`.
def _and_another(target: pathlib.Path, rows, versions, commands) -> list[dict]:
    """The looks at a run, and the one that records it with these rows, today.

    With as many seeds as before it is the same look, taken again.
    """
    seeds, before = _seeds_of(rows), []
    if (target / METRICS).exists():
        before = _looks(target, _rows(target))
    if before and seeds < before[-1]["seeds"]:
        raise ValueError(
            f"{target.name} is recorded with {before[-1]['seeds']} seeds, and these are {seeds}: "
            f"pass --seeds={before[-1]['seeds']} or more, so that no look at it is forgotten."
        )
    now = {"seeds": seeds, "date": datetime.date.today().isoformat(), "commit": versions["commit"]}
    kept = [look for look in before if look["seeds"] < seeds]
    return [*kept, now | {"versions": versions, "commands": commands}]


def _looks(path: pathlib.Path, rows: Iterable[Mapping]) -> list[dict]:
    """Oldest first: seeds, which are the first ones of the records, date, commit, commands."""
    seeds = _seeds_of(rows)
    found = [json.loads(s) for s in (path / LOOKS).read_text(encoding="utf-8").splitlines()]
    counts = [look["seeds"] for look in found]
    taken = [count for count in counts if count <= seeds]  # a crash may leave a look without seeds
    if not taken or counts != sorted(set(counts)) or taken[-1] != seeds:
        raise ValueError(
            f"{path / LOOKS} has looks with {counts} seeds, and the records {seeds}: they must "
            "rise to those of the records. Record the run by python -m experiments.verdicts."
        )
    return found[: len(taken)]


def _seeds_of(rows: Iterable[Mapping]) -> int:
    return len({row["seed"] for row in rows})


def seeds_at_looks(comparisons: Sequence[Comparison]) -> list[tuple[int, ...]]:
    """How many seeds each of these runs had at every look at any of them.

    Looks at several runs on one day are one.
    """
    now, found = {}, []
    looks = [c.looks or [{"seeds": _seeds_of(c.records), "date": ""}] for c in comparisons]
    for date in sorted({look["date"] for run in looks for look in run}):
        today = [[look["seeds"] for look in run if look["date"] == date] for run in looks]
        for each in itertools.zip_longest(*today):
            now |= {run: seeds for run, seeds in enumerate(each) if seeds is not None}
            if len(now) == len(looks):
                found.append(tuple(now[run] for run in range(len(looks))))
    return found or [()]


def first_seeds(comparison: Comparison, seeds: int) -> Comparison:
    """What was known with these seeds."""
    known = sorted({r["seed"] for r in comparison.records})
    if seeds >= len(known):
        return comparison
    kept = [r for r in comparison.records if r["seed"] in known[:seeds]]
    return compare(kept, comparison.arms, comparison.criterion, comparison.plans)


def seconds_per_seed(comparison: Comparison, runs: Collection[tuple]) -> float | None:
    """Of all these runs (arm, speed, learning rate), in all phases, on the mean; None: unknown."""
    ends: dict[tuple, dict] = {}
    for r in comparison.records:
        own = r["arm"], r["speed"], r["learning_rate"]
        if own in runs:
            last = ends.setdefault((*own, r["phase"]), {})
            last[r["seed"]] = max(r["seconds"], last.get(r["seed"], 0.0))
    total = sum(float(np.mean([*of.values()])) for of in ends.values())
    return total if ends and math.isfinite(total) else None


# What records are compared by.
def describe(comparison: Comparison) -> dict:
    """What is in comparison.json."""
    plans = {}
    for arm, plan in comparison.plans.items():
        changes = np.transpose(corners(plan))[:-1].tolist()
        plans[arm] = {"total_steps": plan.total_steps, "rule": plan.rule, "changes": changes}
    criterion, arms = comparison.criterion._asdict(), dict(comparison.arms)
    return {"criterion": criterion, "arms": arms, "plans": plans}


def restore(rows: Iterable[dict], described: Mapping) -> Comparison:
    """The comparison of records by what `describe` gave."""
    plans = {}
    for arm, of in described["plans"].items():
        first, periods = np.array(of["changes"]).T
        ends = np.append(first[1:], of["total_steps"])
        starts = np.concatenate([*map(np.arange, first, ends, periods)])
        plans[arm] = local_opt.SyncPlan(starts, of["total_steps"], of["rule"])
    return compare(rows, described["arms"], Criterion(**described["criterion"]), plans)


def corners(plan: local_opt.SyncPlan) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which H changes, with the end of the run, and H from there on."""
    kept = np.flatnonzero(np.diff(plan.periods, prepend=-1))
    steps = np.append(plan.starts[kept], plan.total_steps)
    return steps, np.append(plan.periods[kept], plan.periods[-1])
