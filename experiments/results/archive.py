"""Runs that are kept: what records are compared by, and records, rounded and compressed.

comparison.json says what a folder's metrics are compared by: the criterion, the arms with their
labels, the baseline first, and their sync plans as [first step, H] wherever H changes.
"""

import gzip
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping

import numpy as np

import local_opt
from experiments.results import records
from experiments.results.statistics import Comparison, Criterion, compare

FOLDER = pathlib.Path(__file__).parents[1] / "runs"
METRICS, COMMAND, COMPARISON = "metrics.jsonl.gz", "command.txt", "comparison.json"
COPIED = ("settings.json", "versions.json", COMPARISON)
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
    target = pathlib.Path(target)
    target.mkdir(parents=True, exist_ok=True)
    for part in COPIED:
        shutil.copyfile(os.path.join(results, part), target / part)
    (target / COMMAND).write_text(command.strip() + "\n", encoding="utf-8")
    (target / METRICS).write_bytes(pack(records.read(os.path.join(results, records.METRICS))))


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
    lines = gzip.decompress((path / METRICS).read_bytes()).decode().splitlines()
    return restore(map(json.loads, lines), records.read_json(path / COMPARISON))


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
