"""Where the records of a run are looked at: JSON lines, CSV, TensorBoard and the console.

A record is a flat mapping: name -> number, str, bool, None, or a mapping of these. JSON lines are
what a run is resumed from; the others are made from the same records and hold the same ones.
"""

import contextlib
import csv
import glob
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from absl import flags

from experiments import processes, records
from experiments.flag_values import definer

METRICS, TABLE, EVENTS = "metrics.jsonl", "metrics.csv", "tensorboard"
Write = Callable[[Mapping], None]


def define_flags(values: flags.FlagValues) -> None:
    """Defines --tensorboard, for the caller of `open_writers`."""
    text = "write event files for TensorBoard too (extra: tensorboard)"
    definer(values)(flags.DEFINE_bool, "tensorboard", False, text)


@contextlib.contextmanager
def open_writers(
    folder: str, *, tensorboard: bool, keep: Iterable[Mapping] = (), run_fields: Sequence[str] = ()
) -> Iterator[Write]:
    """Opens the files of a run or comparison and yields `write(record)`.

    Every record is in metrics.jsonl, in metrics.csv and, if asked for, in TensorBoard's event files
    before `write` returns; of several processes, the first alone writes. All files are written anew
    from `keep` first, so that they agree after a crash between two of them, and event files that
    are not asked for go: they would no longer agree.

    Args:
      folder: created if absent.
      tensorboard: write event files under FOLDER/tensorboard, one folder per run; the x axis is
        record["step"], or record["epoch"] where there is none. Numbers are float32 there.
      keep: records of an earlier call, all that the files shall still hold of it.
      run_fields: names of what tells runs apart, as ("order", "learning_rate", "seed"); their
        curves would lie on each other in one event folder.

    Yields:
      A function of one record.

    Raises:
      ImportError: if TensorBoard is asked for and tensorboardX is not installed.
      ValueError: from `write`, for a record without step and epoch when TensorBoard is asked for.

    Example:
      >>> import pathlib, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> with open_writers(folder, tensorboard=False) as write:
      ...     write({"step": 1, "train_loss": 0.5, "reached": {"test": None}})
      >>> print(pathlib.Path(folder, "metrics.csv").read_text().strip())
      step,train_loss,reached.test
      1,0.5,
    """
    if tensorboard:
        _import_tensorboardx()  # fails before a file is touched
    if not processes.is_first():
        yield lambda record: None
        return
    kept = [_plain(record) for record in keep]
    os.makedirs(folder, exist_ok=True)
    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(_json_lines(os.path.join(folder, METRICS), kept)),
            _csv(os.path.join(folder, TABLE), kept),
        ]
        events = os.path.join(folder, EVENTS)
        _forget_events(events)
        if tensorboard:
            opened.append(stack.enter_context(_event_files(events, kept, run_fields)))

        def write(record: Mapping) -> None:
            plain = _plain(record)
            for each in opened:
                each(plain)

        yield write


def flatten(record: Mapping) -> dict:
    """One level, with dots: {"a": {"b": 1}} -> {"a.b": 1}; a list becomes its JSON text.

    Args:
      record: name -> number, str, None, list, or a mapping of these, however deep.

    Returns:
      name -> number, str or None, in the record's order.

    Example:
      >>> flatten({"step": 3, "reached": {"test": {"step": 2}, "valid": None}})
      {'step': 3, 'reached.test.step': 2, 'reached.valid': None}
    """
    flat = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": v for inner, v in flatten(value).items()}
        else:
            flat[name] = json.dumps(value) if isinstance(value, list | tuple) else value
    return flat


def console_line(record: Mapping) -> str:
    """The record in one readable line; what is None is left out.

    Args:
      record: as for `open_writers`.

    Returns:
      Names and values, numbers with four digits.

    Example:
      >>> console_line({"order": "rr", "step": 12000, "train_loss": 0.912345, "diverged": None})
      'order rr  step 12,000  train_loss 0.9123'
    """
    shown = {name: value for name, value in flatten(_plain(record)).items() if value is not None}
    return "  ".join(f"{name} {_short(value)}" for name, value in shown.items())


def _short(value) -> str:
    if isinstance(value, bool | str):
        return " ".join(str(value).split())  # an error message may have several lines
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _plain(value):
    """The value without NumPy's and JAX's scalars, which JSON does not know."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    return value.item() if hasattr(value, "item") else value


@contextlib.contextmanager
def _json_lines(path: str, kept: Sequence[Mapping]) -> Iterator[Write]:
    records.write_lines(path, kept)
    with records.appending(path) as append:
        yield append


def _csv(path: str, kept: Sequence[Mapping]) -> Write:
    """Columns stand in the order in which they were first seen; the file grows by whole rows."""
    rows = [flatten(record) for record in kept]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    records.write_whole(path, _csv_lines(columns, rows, header=bool(columns)))

    def write(record: Mapping) -> None:
        row = flatten(record)
        new = [name for name in row if name not in columns]
        if new:
            with open(path, encoding="utf-8", newline="") as file:
                before = list(csv.DictReader(file))
            columns.extend(new)
            records.write_whole(path, _csv_lines(columns, [*before, row], header=True))
        else:
            with open(path, "a", encoding="utf-8", newline="") as file:
                file.write(_csv_lines(columns, [row], header=False))

    return write


def _csv_lines(columns: Sequence[str], rows: Iterable[Mapping], *, header: bool) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _import_tensorboardx():
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
def _event_files(path: str, kept: Sequence[Mapping], run_fields: Sequence[str]) -> Iterator[Write]:
    events_writer, event, scalar = _import_tensorboardx()
    opened, count, file = None, 0, None

    def write(record: Mapping) -> None:
        nonlocal opened, count, file
        run, x = _run_name(record, run_fields), _x_of(record)
        if run != opened:
            if file is not None:
                file.close()
            os.makedirs(os.path.join(path, run), exist_ok=True)
            # The number tells files apart that are opened in one second.
            file = events_writer(os.path.join(path, run, "events"), f".{count:06d}")
            opened, count = run, count + 1
        for name, value in flatten(record).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and name != "step" and name not in run_fields:
                file.write_event(event(wall_time=time.time(), step=x, summary=scalar(name, value)))
        file.flush()

    by_run = {}
    for record in kept:
        by_run.setdefault(_run_name(record, run_fields), []).append(record)
    try:
        for own in by_run.values():
            for record in own:
                write(record)
        yield write
    finally:
        if file is not None:
            file.close()


def _run_name(record: Mapping, run_fields: Sequence[str]) -> str:
    parts = [f"{name}={record[name]}" for name in run_fields if name in record]
    return re.sub(r"[^\w=.,+-]", "_", ",".join(parts))


def _x_of(record: Mapping) -> int:
    x = record.get("step", record.get("epoch"))
    if x is None:
        raise ValueError(
            f"a record has {', '.join(record) or 'nothing'}: TensorBoard needs step or epoch for "
            "its x axis; add one of them, or leave TensorBoard out."
        )
    return int(x)
