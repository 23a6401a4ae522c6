"""The records of a run, the folder they are written to, and the trackers that receive them.

A record is one evaluation, as flat JSON. It has study, arm, order, sync, echo, speed (R, or null if
input is not slow), learning_rate, seed, phase ("run", or "tune" and then "report"), step, epoch,
loads, rounds, allreduces and seconds. Its scalars are named PART/NAME: "train/loss",
"train/above_optimum", "train/batch_loss", "valid/accuracy", "test/loss", "bound/linf", "drift". The
last record of a run also has "ended": true, "diverged": null or the message, and "load_steps" if
echoing was measured.

"allreduces" is what a worker has sent, in all-reduces of the parameters; an order or a compressed
sync sends parts of one. With --average there is also PART/NAME/averaged, of the "average" with the
least training loss. If "train/loss" is computed on the first training examples alone,
"train_examples" is their number. If loads were not waited for, or another run shared the device,
seconds are not meaningful, and there is "timed": false. A scalar that is null was measured and is
not finite: NaN or infinite.

Of several processes all read, and process 0 alone writes.
"""

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import syncopate
from experiments import entry, files, lock
from experiments.distributed import processes
from experiments.report import trackers as tracking
from experiments.report.tables import text_of
from syncopate.refusals import UserError

WORD = re.compile(r"[\w=.,+-]+")
METRICS, COMMAND = "metrics.jsonl", "command.txt"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "scikit-learn", "tensorflow-cpu")


class Run(NamedTuple):
    """The identity of a run, in all its records."""

    arm: str
    speed: float | None  # R of slow input
    learning_rate: float
    seed: int
    phase: str  # "run"; where input is slow "tune" and then "report"

    @property
    def name(self) -> str:
        """Its name, also that of its folder."""
        parts = [f"{key}={value}" for key, value in self._asdict().items() if value is not None]
        return re.sub(r"[^\w=.,+-]", "_", ",".join(parts))


def run_of(record: Mapping) -> Run:
    return Run(*map(record.get, Run._fields))


def whole_runs(records: Sequence[Mapping]) -> list[dict]:
    """The records of runs that have ended."""
    ended = {run_of(r) for r in records if r.get("ended")}
    return [r for r in records if run_of(r) in ended]


def read_folder(folder: str) -> list[dict]:
    """The records in an output folder."""
    path = os.path.join(folder, METRICS)
    kept = read(path) if os.path.exists(path) else []
    processes.wait(f"read {folder}")  # before the first of them writes
    first = processes.of_first(len(kept))
    if first != len(kept):
        raise UserError(
            f"{folder!r} holds {len(kept)} records here and {first} for process 0: pass an "
            "--output_dir that all processes share."
        )
    last = {}
    for number, record in enumerate(kept, 1):
        if type(record.get("step")) is not int:
            raise UserError(f"line {number} of {path!r} has no step: {files.WHAT_TO_DO}")
        for name, value in run_of(record)._asdict().items():
            if type(value) is str and not WORD.fullmatch(value):  # it becomes a name of a folder
                raise UserError(
                    f"line {number} of {path!r} has {value!r} as its {name}, which is no name of "
                    f"one: {files.WHAT_TO_DO}"
                )
        step, before = record["step"], last.get(run_of(record), -1)
        if step <= before:
            raise UserError(
                f"line {number} of {path!r} has step {step} after step {before} of its run: "
                f"{files.WHAT_TO_DO}"
            )
        last[run_of(record)] = step
    return kept


def open_folder(folder: str, settings: Mapping, *, overwrite: bool = False) -> None:
    """Prepares an output folder: settings.json (JSON values), versions.json and command.txt.

    The last has every command that was given for the folder. With `overwrite` the records,
    checkpoints and commands of an earlier run are deleted.
    """
    settings, path = files.plain(settings), os.path.join(folder, "settings.json")
    before = None if overwrite else files.read_json(path)
    left = [n for n in (METRICS, "checkpoints") if os.path.exists(os.path.join(folder, n))]
    if before is None and left and not overwrite:
        raise UserError(
            f"{folder!r} holds {' and '.join(left)} and no settings.json that says of which run: "
            "bring it back, choose another --output_dir, or pass --overwrite to begin again."
        )
    if before not in (None, settings):
        changed = files.differences(before, settings)
        workers = any(text.startswith("workers: ") for text in changed)
        page = " To go on with other workers in a loop of your own: docs/use/resize.md." * workers
        raise UserError(
            f"{folder!r} holds a run with other settings ({', '.join(changed)}): choose "
            f"another --output_dir, or pass --overwrite to forget that run.{page}"
        )
    processes.wait(f"settings of {folder}")  # before the first of them writes
    if overwrite and processes.is_first():  # before the new settings are there
        _forget(os.path.join(folder, "checkpoints"))
        _remove(folder, METRICS, COMMAND)
    files.write_json(path, settings)
    files.write_json(os.path.join(folder, "versions.json"), versions())
    given = pathlib.Path(folder, COMMAND)
    lines = files.content(given).decode().splitlines() if given.exists() else []
    lines = dict.fromkeys([*lines, entry.command_line()])
    files.write_whole(str(given), "".join(f"{line}\n" for line in lines))


def _forget(path):
    """Deletes a folder. A link is removed without the folder that it names."""
    with files.advised(path):
        if os.path.islink(path):
            os.unlink(path)
        elif os.path.exists(path):
            shutil.rmtree(path)


def _remove(folder, *names):
    with files.advised(folder):
        for name in names:
            pathlib.Path(folder, name).unlink(missing_ok=True)


def commit() -> str | None:
    """The commit of the sources, with a + if files differ from it; None without a repository."""
    root = pathlib.Path(__file__).parents[2]

    def git(*words):  # writes nothing into the repository, as `describe --dirty` does
        call = ["git", "--no-optional-locks", "-C", str(root), *words]
        options = {"capture_output": True, "text": True, "check": True, "timeout": 10}
        return subprocess.run(call, **options).stdout.strip()

    if not (root / ".git").exists():  # an installed copy
        return None
    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.SubprocessError):  # no git
        return None


def versions() -> dict:
    """Versions of the code, packages and Python, and the device, to reproduce a run."""
    import jax

    packages = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[package] = importlib.metadata.version(package)
    return packages | {
        "syncopate": syncopate.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": jax.process_count(),
        "cores": os.cpu_count(),
    }


def read(path: str) -> list[dict]:
    """The records of a JSON-lines file.

    A last line that was cut off is reported and left out.

    Raises:
      ValueError: for any other line that is not a record.
    """
    *lines, cut = files.content(path).split(b"\n")
    if cut:
        processes.say(f"Line {len(lines) + 1} of {str(path)!r} was cut off, and is left out.")
    return files.load_lines(lines, path)


def rewrite(folder: str, records: Iterable[Mapping]) -> None:
    """Writes the records of a folder, in place of those that it has."""
    lines = "".join(files.dumps(r) + "\n" for r in records)
    files.write_whole(os.path.join(folder, METRICS), lines)


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
      trackers: names of TRACKERS, which receive the numbers of every new record by step.
      console: receives every new record as one readable line, such as `print`.
    """
    if not processes.is_first():
        yield lambda record: None
        return
    keep = list(keep)
    with tracking.hook(trackers, folder, anew=not keep) as track:
        rewrite(folder, keep)
        with open(os.path.join(folder, METRICS), "ab", buffering=0) as file:

            def write(record: Mapping) -> None:
                lock.check()
                line = files.dumps(record)
                files.append(file, f"{line}\n")
                if trackers or console:  # they get a record as it is in the file
                    record = files.loads(line, "a record")
                if trackers:
                    track(run_of(record).name, record["step"], numbers_of(record))
                if console:
                    console(console_line(record))

            yield write


def numbers_of(record: Mapping) -> dict[str, float]:
    """The numbers that trackers plot over steps."""
    scalars = {name: v for name, v in record.items() if name not in ("step", *Run._fields)}
    return {name: v for name, v in scalars.items() if type(v) in (int, float)}


def console_line(record: Mapping) -> str:
    """The numbers of a record in one line, and which of its scalars are not finite."""
    shown = {"step": record["step"]} | numbers_of(record)
    shown |= {name: None for name, value in record.items() if value is None and "/" in name}
    return "  ".join(f"{name} {text_of(name, value)}" for name, value in shown.items())
