"""Where records go while they are made: JSON lines, CSV, trackers and the console.

JSON lines are what a run is resumed from; the others hold the same records.
"""

import contextlib
import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from experiments.processes import distributed
from experiments.results import records
from experiments.results import trackers as tracking

TABLE = "metrics.csv"
Write = Callable[[Mapping], None]


@contextlib.contextmanager
def open_writers(
    folder: str,
    *,
    trackers: Sequence[str] = (),
    keep: Iterable[Mapping] = (),
    console: Callable[[str], None] | None = None,
) -> Iterator[Write]:
    """Opens the files of a run or study and yields `write(record)`.

    Every record is in all files before `write` returns; of several processes, the first alone
    writes. All are written anew from `keep` first, so that they agree after a crash between two of
    them; event files that are not asked for go, and other trackers go on with their runs.

    Args:
      folder: created if absent.
      trackers: names of TRACKERS, which are given the numbers of every record by step.
      keep: records of an earlier call.
      console: takes every new record as one readable line, such as `print`.

    Raises:
      ImportError: if a tracker is asked for that is not installed.

    Example:
      >>> import pathlib, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> with open_writers(folder) as write:
      ...     write({"step": 1, "train/loss": 0.5, "diverged": None})
      >>> print(pathlib.Path(folder, "metrics.csv").read_text().strip())
      step,train/loss,diverged
      1,0.5,
    """
    tracking.check(trackers)  # fails before a file is touched
    if not distributed.is_first():
        yield lambda record: None
        return
    kept = [_plain(record) for record in keep]
    os.makedirs(folder, exist_ok=True)
    lines = os.path.join(folder, records.METRICS)
    tracking.forget_events(os.path.join(folder, tracking.EVENTS))
    records.write_lines(lines, kept)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(lines, "a", encoding="utf-8", buffering=1))
        opened = [
            lambda record: file.write(json.dumps(record) + "\n"),  # a line is flushed
            _csv(os.path.join(folder, TABLE), kept),
        ]
        for name in trackers:
            opened.append(stack.enter_context(tracking.TRACKERS[name].open(folder, kept)))
        if console:
            opened.append(lambda record: console(console_line(record)))

        def write(record: Mapping) -> None:
            plain = _plain(record)
            for each in opened:
                each(plain)

        yield write


def console_line(record: Mapping) -> str:
    """What a record has found, in one readable line; which run it is of stands elsewhere.

    Example:
      >>> console_line({"arm": "rr", "step": 12000, "train/loss": 0.912345, "diverged": None})
      'step 12,000  train/loss 0.9123'
    """
    hidden = {*records.IDENTITY, "ended"}
    return "  ".join(
        f"{name} {_short(value)}"
        for name, value in _plain(record).items()
        if value is not None and name not in hidden and not isinstance(value, list)
    )


def _short(value) -> str:
    if isinstance(value, bool | str):
        return " ".join(str(value).split())  # an error message may have several lines
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _plain(record: Mapping) -> dict:
    """The record without NumPy's and JAX's scalars and arrays, which JSON does not know."""
    return {name: v.tolist() if hasattr(v, "tolist") else v for name, v in record.items()}


def _csv(path: str, kept: Sequence[Mapping]) -> Write:
    """Columns stand in the order in which they were first seen; the file grows by whole rows."""
    rows, columns = list(kept), list(dict.fromkeys(name for row in kept for name in row))

    def text(some, *, head):
        file = io.StringIO()
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if head:
            writer.writeheader()
        writer.writerows(some)
        return file.getvalue()

    def write(record: Mapping) -> None:
        rows.append(record)
        if new := [name for name in record if name not in columns]:
            columns.extend(new)
            records.write_whole(path, text(rows, head=True))
        else:
            with open(path, "a", encoding="utf-8", newline="") as file:
                file.write(text([record], head=False))

    records.write_whole(path, text(rows, head=bool(columns)))
    return write
