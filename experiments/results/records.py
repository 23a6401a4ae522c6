"""The records of a run, the folder they are written to, and the trackers that receive them.

A record is one evaluation, flat JSON: study, arm, order, sync, echo, speed (R, null where input is
not slow), learning_rate, seed, phase ("run", or "tune" and then "report"), step, epoch, loads,
rounds, allreduces, seconds, scalars named PART/NAME ("train/loss", "train/above_optimum",
"train/batch_loss", "valid/accuracy", "test/loss", "bound/linf", "drift"), and in the
last record of a run "ended": true, "diverged": null or the message, and "load_steps" where echoing
was measured.
Where seconds say nothing, for loads were not waited for or another run shared the device, there is
"timed": false.

Of several processes all read, and process 0 alone writes.
"""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from experiments.cluster import files, processes
from experiments.results import trackers as tracking

RUN_FIELDS = ("arm", "speed", "learning_rate", "seed", "phase")
METRICS = "metrics.jsonl"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "scikit-learn", "tensorflow-cpu")


def run_of(record: Mapping) -> tuple:
    """The identity of a record's run: its `RUN_FIELDS`."""
    return tuple(record.get(name) for name in RUN_FIELDS)


def whole_runs(records: Sequence[Mapping]) -> list[dict]:
    """The records of runs that have ended."""
    ended = {run_of(r) for r in records if r.get("ended")}
    return [r for r in records if run_of(r) in ended]


def open_folder(folder: str, settings: Mapping, *, overwrite: bool = False) -> list[dict]:
    """Prepares an output folder and returns the records of an earlier, equal run in it.

    Args:
      folder: created if absent; gets settings.json (the flags) and versions.json.
      settings: of the run, JSON values.
      overwrite: delete the records and checkpoints of an earlier run.

    Raises:
      ValueError: if the folder holds a run with other settings or without settings, if processes
        see different records, or for a broken file.
    """
    settings = json.loads(json.dumps(dict(settings), sort_keys=True))
    path, metrics = os.path.join(folder, "settings.json"), os.path.join(folder, METRICS)
    before = None if overwrite else files.read_json(path)
    left = [n for n in (METRICS, "checkpoints") if os.path.exists(os.path.join(folder, n))]
    if before is None and left and not overwrite:
        raise ValueError(
            f"{folder!r} holds {' and '.join(left)} and no settings.json that says of which run: "
            "bring it back, choose another --output_dir, or pass --overwrite to begin again."
        )
    if before not in (None, settings):
        changed = files.differences(before, settings)
        raise ValueError(
            f"{folder!r} holds a run with other settings ({', '.join(changed)}): choose "
            "another --output_dir, or pass --overwrite to forget that run."
        )
    kept = read(metrics) if before is not None and os.path.exists(metrics) else []
    processes.wait(f"read {folder}")  # before the first of them writes
    first = processes.of_first(len(kept))
    if first != len(kept):
        raise ValueError(
            f"{folder!r} holds {len(kept)} records here and {first} for process 0: pass an "
            "--output_dir that all processes share."
        )
    os.makedirs(folder, exist_ok=True)
    if overwrite and processes.is_first():  # before the new settings are there
        shutil.rmtree(os.path.join(folder, "checkpoints"), ignore_errors=True)
        if os.path.exists(metrics):
            os.remove(metrics)
    files.write_json(path, settings)
    files.write_json(os.path.join(folder, "versions.json"), versions())
    return kept


def commit() -> str | None:
    """The commit of the sources, with a + if files differ from it; None without a repository."""
    root = pathlib.Path(__file__).parents[2]
    ask = ["git", "-C", str(root), "describe", "--always", "--abbrev=12", "--dirty=+", "--match="]
    try:
        found = subprocess.run(ask, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or an installed copy
        return None
    return found.stdout.strip() if (root / ".git").exists() else None


def versions() -> dict:
    """Versions of the code, packages and Python, and the device, to reproduce a run."""
    import jax

    packages = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[package] = importlib.metadata.version(package)
    return packages | {
        "commit": commit(),
        "python": platform.python_version(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cores": os.cpu_count(),
    }


def read(path: str) -> list[dict]:
    """The records of a JSON-lines file. A last line that was cut off is reported and left out.

    Raises:
      ValueError: for any other line that is not a record.
    """
    found = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                processes.say(f"Line {number} of {str(path)!r} was cut off, and is left out.")
                break
            try:
                found.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"line {number} of {str(path)!r} is no record ({error}): restore the file from "
                    "a copy, choose another --output_dir, or pass --overwrite to begin again."
                ) from error
    return found


def write_lines(path: str, records: Iterable[Mapping]) -> None:
    files.write_whole(path, "".join(json.dumps(r) + "\n" for r in records))


@contextlib.contextmanager
def writing(
    folder: str,
    *,
    trackers: Sequence[str] = (),
    keep: Iterable[Mapping] = (),
    console: Callable[[str], None] | None = None,
) -> Iterator[Callable[[Mapping], None]]:
    """Yields `write(record)`, after which a record is in metrics.jsonl and with the trackers.

    The file is first rewritten from `keep`, without later records of an earlier call. Trackers
    continue their runs. Only process 0 writes.

    Args:
      folder: created if absent.
      trackers: names of TRACKERS, which receive the numbers of every new record by step.
      keep: records of an earlier call.
      console: receives every new record as one readable line, such as `print`.

    Example:
      >>> import tempfile
      >>> with writing(tempfile.mkdtemp(), console=print) as write:
      ...     write({"arm": "rr", "step": 12000, "train/loss": 0.912345, "diverged": None})
      step 12,000  train/loss 0.9123
    """
    if not processes.is_first():
        yield lambda record: None
        return
    os.makedirs(folder, exist_ok=True)
    path, keep = os.path.join(folder, METRICS), [*map(_plain, keep)]
    with tracking.hook(trackers, folder, anew=not keep) as track:
        write_lines(path, keep)
        with open(path, "a", encoding="utf-8", buffering=1) as file:

            def write(record: Mapping) -> None:
                record = _plain(record)
                file.write(json.dumps(record) + "\n")  # a line is flushed
                track(name_of(record), record["step"], numbers_of(record))
                if console:
                    console(console_line(record))

            yield write


def _plain(record: Mapping) -> dict:
    """The record with NumPy's and JAX's scalars and arrays as Python values, for JSON."""
    return {name: v.tolist() if hasattr(v, "tolist") else v for name, v in record.items()}


def name_of(record: Mapping) -> str:
    """The name of a record's run, also used for files."""
    parts = [f"{k}={record[k]}" for k in RUN_FIELDS if record.get(k) is not None]
    return re.sub(r"[^\w=.,+-]", "_", ",".join(parts))


def numbers_of(record: Mapping) -> dict[str, float]:
    """The numbers that trackers plot over steps."""
    known = {name: v for name, v in record.items() if name not in ("step", *RUN_FIELDS)}
    return {name: v for name, v in known.items() if type(v) in (int, float)}


def console_line(record: Mapping) -> str:
    """The numbers of a record in one line."""
    numbers = {"step": record["step"]} | numbers_of(record)
    return "  ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.4g}"
        for name, value in numbers.items()
    )
