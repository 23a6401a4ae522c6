"""Where records go while they are made: JSON lines, CSV, TensorBoard and the console.

JSON lines are what a run is resumed from; the others hold the same records.
"""

import contextlib
import csv
import glob
import io
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from experiments.processes import distributed
from experiments.results import records

TABLE, EVENTS = "metrics.csv", "tensorboard"
Write = Callable[[Mapping], None]


@contextlib.contextmanager
def open_writers(
    folder: str,
    *,
    tensorboard: bool = False,
    keep: Iterable[Mapping] = (),
    console: Callable[[str], None] | None = None,
) -> Iterator[Write]:
    """Opens the files of a run or study and yields `write(record)`.

    Every record is in all files before `write` returns; of several processes, the first alone
    writes. All are written anew from `keep` first, so that they agree after a crash between two of
    them; event files that are not asked for go.

    Args:
      folder: created if absent.
      tensorboard: write event files under FOLDER/tensorboard, one folder per run; the x axis is
        record["step"]. Numbers are float32 there.
      keep: records of an earlier call.
      console: takes every new record as one readable line, such as `print`.

    Raises:
      ImportError: if TensorBoard is asked for and tensorboardX is not installed.

    Example:
      >>> import pathlib, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> with open_writers(folder) as write:
      ...     write({"step": 1, "train/loss": 0.5, "diverged": None})
      >>> print(pathlib.Path(folder, "metrics.csv").read_text().strip())
      step,train/loss,diverged
      1,0.5,
    """
    if tensorboard:
        _tensorboardx()  # fails before a file is touched
    if not distributed.is_first():
        yield lambda record: None
        return
    kept = [_plain(record) for record in keep]
    os.makedirs(folder, exist_ok=True)
    events, lines = os.path.join(folder, EVENTS), os.path.join(folder, records.METRICS)
    _forget_events(events)
    records.write_lines(lines, kept)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open(lines, "a", encoding="utf-8", buffering=1))
        opened = [
            lambda record: file.write(json.dumps(record) + "\n"),  # a line is flushed
            _csv(os.path.join(folder, TABLE), kept),
        ]
        if tensorboard:
            opened.append(stack.enter_context(_event_files(events, kept)))
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


def _tensorboardx():
    """What is used of tensorboardX: its file, events and summaries, without its thread.

    Its SummaryWriter hands events to a queue, from which a killed run loses the last ones.
    """
    try:
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2
    except ImportError as error:
        raise ImportError(
            "TensorBoard's event files are written with tensorboardX, which is not installed: "
            "pip install 'syncopate[tensorboard]', or leave TensorBoard out."
        ) from error
    return event_file_writer.EventsWriter, event_pb2.Event, summary.scalar


def _forget_events(path: str) -> None:
    """Removes event files, and the folders that are empty then: no other file is touched."""
    for name in glob.glob(os.path.join(glob.escape(path), "**", "events.out.*"), recursive=True):
        os.remove(name)
    for folder, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):  # somebody's file is in it
            os.rmdir(folder)


@contextlib.contextmanager
def _event_files(path: str, kept: Sequence[Mapping]) -> Iterator[Write]:
    """One file is open at a time: that of the run whose record came last."""
    events_writer, event, scalar = _tensorboardx()
    numbers, open_run = itertools.count(), contextlib.ExitStack()
    opened = file = None

    def name_of(record: Mapping) -> str:
        parts = [f"{k}={record[k]}" for k in records.RUN_FIELDS if record.get(k) is not None]
        return re.sub(r"[^\w=.,+-]", "_", ",".join(parts))

    def write(record: Mapping) -> None:
        nonlocal opened, file
        run = name_of(record)
        if run != opened:
            open_run.close()
            os.makedirs(os.path.join(path, run), exist_ok=True)
            # The number tells files apart that are opened in one second.
            name = os.path.join(path, run, "events")
            opened, file = run, events_writer(name, f".{next(numbers):06d}")
            open_run.callback(file.close)
        for name, value in record.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and name not in ("step", *records.RUN_FIELDS):
                summary = scalar(name, value)
                file.write_event(event(wall_time=time.time(), step=record["step"], summary=summary))
        file.flush()

    with open_run:
        for record in sorted(kept, key=name_of):  # stable: a run stays in order
            write(record)
        yield write
