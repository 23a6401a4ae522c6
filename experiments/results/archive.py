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
    """Keeps a finished output folder of a study.

    Args:
      results: the output folder; target: where it is kept; command: what made it, DIR for the data.

    Raises:
      ValueError: for a run that has not ended, or without a command.
    """
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
    records.write_whole(str(target / COMMAND), command.strip() + "\n")
    packed = pack(records.read(os.path.join(results, records.METRICS)))
    (target / METRICS).write_bytes(packed)


def pack(rows: Iterable[dict]) -> bytes:
    """JSON lines with rounded numbers, compressed; equal rows give equal bytes."""
    text = "".join(json.dumps(rounded(row)) + "\n" for row in rows)
    return gzip.compress(text.encode(), mtime=0)


def unpack(packed: bytes) -> list[dict]:
    return [json.loads(line) for line in gzip.decompress(packed).decode().splitlines()]


def rounded(row: Mapping) -> dict:
    """All floats of a record at six significant digits."""
    return {k: float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for k, v in row.items()}


def load(name: str, folder: os.PathLike = FOLDER) -> Comparison | None:
    """A recorded run; None if there is none of this name."""
    path = pathlib.Path(folder) / name
    if not (path / METRICS).exists():
        return None
    return restore(unpack((path / METRICS).read_bytes()), records.read_json(path / COMPARISON))


def describe(comparison: Comparison) -> dict:
    """What is in comparison.json."""
    plans = {}
    for arm, plan in comparison.plans.items():
        kept = np.flatnonzero(np.diff(plan.periods, prepend=-1))
        changes = np.stack([plan.starts[kept], plan.periods[kept]], axis=1).tolist()
        plans[arm] = {"total_steps": plan.total_steps, "rule": plan.rule, "changes": changes}
    return {
        "criterion": comparison.criterion._asdict(),
        "arms": dict(comparison.arms),
        "plans": plans,
    }


def restore(rows: Iterable[dict], described: Mapping) -> Comparison:
    """The comparison of records by what `describe` gave."""
    plans = {}
    for arm, of in described["plans"].items():
        first, periods = np.array(of["changes"]).T
        ends = np.append(first[1:], of["total_steps"])
        starts = [np.arange(a, b, h) for a, b, h in zip(first, ends, periods, strict=True)]
        plans[arm] = local_opt.SyncPlan(np.concatenate(starts), of["total_steps"], of["rule"])
    criterion = Criterion(**described["criterion"])
    return compare(rows, described["arms"], criterion, plans)
