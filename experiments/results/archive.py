"""Runs that are kept: what records are compared by, and records, rounded and compressed.

comparison.json says what a folder's metrics are compared by: the criterion, the arms with their
labels, the baseline first, and their sync plans as [first step, H] wherever H changes. looks.jsonl
says how often the run was looked at, with how many seeds each time, and by what they were made.
"""

import datetime
import gzip
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Mapping

import numpy as np

import local_opt
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
    versions = records.read_json(os.path.join(results, VERSIONS))
    looked = _and_another(target, seeds_of(rows), versions, commands_of(command))
    target.mkdir(parents=True, exist_ok=True)
    for part in COPIED:
        shutil.copyfile(os.path.join(results, part), target / part)
    (target / COMMAND).write_text(command.strip() + "\n", encoding="utf-8")
    _write(target, rows, looked)


def extend(target: os.PathLike, rows: Iterable[Mapping], commands: list[str]) -> None:
    """Adds the records of further seeds to a recorded run, and the look at all of them."""
    target = pathlib.Path(target)
    rows = [*_rows(target), *rows]
    looked = _and_another(target, seeds_of(rows), records.versions(), commands)
    _write(target, rows, looked)


def _write(target: pathlib.Path, rows: Iterable[Mapping], looked: Iterable[Mapping]) -> None:
    temporary = target / f"{METRICS}.tmp"
    temporary.write_bytes(pack(rows))
    records.write_lines(str(target / LOOKS), looked)
    os.replace(temporary, target / METRICS)


def _and_another(target: pathlib.Path, seeds: int, versions, commands) -> list[dict]:
    """The looks at a run, and the one that records it with so many seeds, today.

    With as many seeds as before it is the same look, taken again.
    """
    before = looks(target.name, target.parent) if (target / METRICS).exists() else []
    if before and seeds < before[-1]["seeds"]:
        raise ValueError(
            f"{target.name} is recorded with {before[-1]['seeds']} seeds, and these are {seeds}: "
            f"pass --seeds={before[-1]['seeds']} or more, so that no look at it is forgotten."
        )
    now = {
        "seeds": seeds,
        "date": datetime.date.today().isoformat(),
        "commit": versions["commit"] if "commit" in versions else records.commit(),
    }
    kept = [look for look in before if look["seeds"] < seeds]
    return [*kept, now | {"versions": versions, "commands": commands}]


def looks(name: str, folder: os.PathLike = FOLDER) -> list[dict]:
    """How often a recorded run was looked at, oldest first.

    Each with its seeds, which are the first ones of the records, date, commit, versions and
    commands. Where nothing was noted it is one look with all seeds, without date.
    """
    path = pathlib.Path(folder) / name
    return _looks(path, _rows(path))


def _looks(path: pathlib.Path, rows: Iterable[Mapping]) -> list[dict]:
    seeds = seeds_of(rows)
    if not (path / LOOKS).exists():
        commands = commands_of((path / COMMAND).read_text(encoding="utf-8"))
        versions = records.read_json(path / VERSIONS)
        bare = {"seeds": seeds, "date": "", "commit": None}
        return [bare | {"versions": versions, "commands": commands}]
    found = [json.loads(s) for s in (path / LOOKS).read_text(encoding="utf-8").splitlines()]
    counts = [look["seeds"] for look in found]
    taken = [count for count in counts if count <= seeds]  # a crash may leave a look without seeds
    if not taken or counts != sorted(set(counts)) or taken[-1] != seeds:
        raise ValueError(
            f"{path / LOOKS} has looks with {counts} seeds, and the records {seeds}: they must "
            "rise to those of the records. Record the run by python -m experiments.verdicts."
        )
    return found[: len(taken)]


def seeds_of(rows: Iterable[Mapping]) -> int:
    return len({row["seed"] for row in rows})


def commands_of(text: str) -> list[str]:
    """Each with its own lines joined, where a backslash parts them."""
    return re.sub(r"\s*\\\n\s*", " ", text).strip().splitlines()


def pack(rows: Iterable[dict]) -> bytes:
    """JSON lines with floats of six digits, compressed; equal rows give equal bytes."""

    def rounded(value):
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    lines = [json.dumps({k: rounded(v) for k, v in row.items()}) + "\n" for row in rows]
    return gzip.compress("".join(lines).encode(), mtime=0)


def load(name: str, folder: os.PathLike = FOLDER) -> Comparison | None:
    """A recorded run; None if there is none of this name."""
    path = pathlib.Path(folder) / name
    if not (path / METRICS).exists():
        return None
    rows = _rows(path)
    compared = restore(rows, records.read_json(path / COMPARISON))
    return compared._replace(looks=tuple(_looks(path, rows)))


def _rows(path: pathlib.Path) -> list[dict]:
    lines = gzip.decompress((path / METRICS).read_bytes()).decode().splitlines()
    return [*map(json.loads, lines)]


def corners(plan: local_opt.SyncPlan) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which H changes, with the end of the run, and H from there on."""
    kept = np.flatnonzero(np.diff(plan.periods, prepend=-1))
    steps = np.append(plan.starts[kept], plan.total_steps)
    return steps, np.append(plan.periods[kept], plan.periods[-1])


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
