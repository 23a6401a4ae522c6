"""Recorded runs: their records, rounded and compressed, and how these are compared.

comparison.json holds the criterion, the arms with their labels, the baseline first, and their sync
plans as [first step, H] wherever H changes.
"""

import gzip
import os
import pathlib
import re
import shlex
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

import local_opt
from experiments import files
from experiments.report import records
from experiments.report.records import COMMAND
from experiments.report.statistics import Comparison, Criterion, compare, data_of
from syncopate.refusals import UserError

FOLDER = pathlib.Path(__file__).parents[1] / "runs"
METRICS, COMPARISON = "metrics.jsonl.gz", "comparison.json"
LOOKS = "looks.jsonl"
COPIED = ("settings.json", "versions.json", COMPARISON)
DIGITS = 6  # significant ones


def record(results: os.PathLike, target: os.PathLike) -> None:
    """Stores a finished output folder as a recorded run, with at least the seeds that it has."""
    results, target = pathlib.Path(results), pathlib.Path(target)
    needed = (records.METRICS, COMMAND, *COPIED)
    if missing := [part for part in needed if not (results / part).exists()]:
        raise UserError(
            f"{str(results)!r} has no {', '.join(missing)}: only runs that have ended are recorded."
            " Give the run's command again, which goes on where it was stopped."
        )
    rows = records.whole_runs(records.read(str(results / records.METRICS)))
    lines = [_anywhere(line) for line in commands(results)]
    if target.exists():
        lines = dict.fromkeys([*commands(target), *lines])
        seeds, before = (
            len({row["seed"] for row in of_rows}) for of_rows in (rows, rows_of(target))
        )
        if seeds < before:
            raise UserError(
                f"{target.name} is recorded with {before} seeds, and these are {seeds}: pass "
                f"--seeds={before} or more."
            )
    for part in COPIED:
        files.write_whole(str(target / part), files.content(results / part))
    settings = files.read_json(str(target / "settings.json"))
    if settings.get("data_dir"):  # no path of one machine
        files.write_json(str(target / "settings.json"), settings | {"data_dir": "DIR"})
    files.write_whole(str(target / COMMAND), "".join(f"{line}\n" for line in lines))
    files.write_whole(str(target / METRICS), pack(rows))


def _anywhere(command: str) -> str:
    """The command with DIR instead of the folder of the data."""
    words = [word for word in shlex.split(command) if not word.startswith("--output_dir=")]
    at = (re.sub("^--data_dir=.*", "--data_dir=DIR", word) for word in words)
    return shlex.join(at)


def load(name: str, folder: os.PathLike = FOLDER) -> Comparison | None:
    """A recorded run; None if there is none of this name."""
    path = pathlib.Path(folder) / name
    if not (path / METRICS).exists():
        return None
    return restore(rows_of(path), files.read_json(path / COMPARISON))


def looks(name: str, folder: os.PathLike = FOLDER) -> int:
    """How often a recorded run was looked at, each time before seeds were added; at least once."""
    path = pathlib.Path(folder) / name / LOOKS
    return max(1, len(files.content(path).splitlines())) if path.exists() else 1


def commands(path: pathlib.Path) -> list[str]:
    """The commands that made a run, in their sequence, each in one line."""
    text = files.content(path / COMMAND).decode()
    return re.sub(r"\s*\\\n\s*", " ", text).strip().splitlines()


def pack(rows: Iterable[Mapping]) -> bytes:
    """JSON lines with floats of six digits, compressed; equal rows give equal bytes."""

    def rounded(value):
        return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value

    lines = [files.dumps({k: rounded(v) for k, v in row.items()}) + "\n" for row in rows]
    return gzip.compress("".join(lines).encode(), mtime=0)


def rows_of(folder: pathlib.Path) -> list[dict]:
    """The records of a recorded run."""
    path = folder / METRICS
    try:
        lines = gzip.decompress(files.content(path)).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{str(path)!r} is broken ({error}): {files.WHAT_TO_DO}") from error
    return files.load_lines(lines, path)


# comparison.json.
def describe(comparison: Comparison) -> dict:
    """The content of comparison.json."""
    plans = {}
    for arm, plan in comparison.plans.items():
        changes = np.transpose(corners(plan))[:-1].tolist()
        plans[arm] = {"total_steps": plan.total_steps, "rule": plan.rule, "changes": changes}
    criterion, arms = comparison.criterion._asdict(), dict(comparison.arms)
    return {"criterion": criterion, "arms": arms, "plans": plans}


def restore(rows: Sequence[dict], described: Mapping) -> Comparison:
    """The `Comparison` of records, from the content of their comparison.json."""
    plans = {}
    for arm, of in described["plans"].items():
        first, periods = np.array(of["changes"]).T
        ends = np.append(first[1:], of["total_steps"])
        starts = np.concatenate([*map(np.arange, first, ends, periods)])
        plans[arm] = local_opt.SyncPlan(starts, of["total_steps"], of["rule"])
    return compare(data_of(rows), described["arms"], Criterion(**described["criterion"]), plans)


def corners(plan: local_opt.SyncPlan) -> tuple[np.ndarray, np.ndarray]:
    """Steps at which H changes, with the end of the run, and H from there on."""
    kept = np.flatnonzero(np.diff(plan.periods, prepend=-1))
    steps = np.append(plan.starts[kept], plan.total_steps)
    return steps, np.append(plan.periods[kept], plan.periods[-1])
