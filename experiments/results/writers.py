"""Where records go while they are made: JSON lines, trackers and the console, and a CSV at the end.

JSON lines are what a run is resumed from; the others hold the same records.
"""

import contextlib
import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from experiments.cluster import files, processes
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

    Every record is in metrics.jsonl, and with the trackers, before `write` returns; metrics.csv is
    written in the end. Of several processes, the first alone writes. The file is written anew from
    `keep` first, without what came after in an earlier call; trackers go on with their runs.

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
    if not processes.is_first():
        yield lambda record: None
        return
    known = [_plain(record) for record in keep]
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, records.METRICS)
    records.write_lines(path, known)
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: files.write_whole(os.path.join(folder, TABLE), _csv(known)))
        file = stack.enter_context(open(path, "a", encoding="utf-8", buffering=1))
        hooks = [stack.enter_context(tracking.hook(t, folder, tuple(known))) for t in trackers]

        def write(record: Mapping) -> None:
            known.append(_plain(record))
            file.write(json.dumps(known[-1]) + "\n")  # a line is flushed
            for hook in hooks:
                hook(known[-1])
            if console:
                console(console_line(known[-1]))

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


def _csv(rows: Sequence[Mapping]) -> str:
    """Columns stand in the order in which they were first seen."""
    file, columns = io.StringIO(), dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    if rows:
        writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
