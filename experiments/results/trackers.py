"""Programs that people watch runs with, behind one interface: TensorBoard, W&B, MLflow.

A tracker is a function `(folder, kept) -> context manager of write(record)`. Each is an extra of
setup.cfg, imported when it is asked for, and is given the numbers of every record under the name of
its run, by step.
"""

import contextlib
import glob
import importlib
import itertools
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from experiments.results import records

Write = Callable[[Mapping], None]
IDS = "trackers.json"  # of a folder: what trackers know its runs by
EVENTS = "tensorboard"


class Opened(NamedTuple):
    """A run that a tracker is given numbers of."""

    log: Callable[[int, Mapping[str, float]], None]  # (step, numbers by name)
    close: Callable[[], None]


def check(names: Sequence[str]) -> None:
    """Raises ImportError if a tracker's package is not installed, ValueError for another name."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"{name!r} is no tracker: pass some of {', '.join(TRACKERS)}.")
        package = TRACKERS[name].package
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ImportError(
                f"{name} needs {package}, which is not installed: pip install 'syncopate[{name}]', "
                "or leave it out of --track."
            ) from error


def name_of(record: Mapping) -> str:
    """Of the run of a record, for people and files."""
    parts = [f"{k}={record[k]}" for k in records.RUN_FIELDS if record.get(k) is not None]
    return re.sub(r"[^\w=.,+-]", "_", ",".join(parts))


def numbers_of(record: Mapping) -> dict[str, float]:
    """What is drawn over steps."""
    hidden = ("step", *records.RUN_FIELDS)
    return {
        name: value for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in hidden
    }  # fmt: skip


@contextlib.contextmanager
def by_run(start: Callable[[str], Opened], kept: Sequence[Mapping]) -> Iterator[Write]:
    """One run is open at a time: that of the record that came last; first those of `kept`."""
    stack, name, run = contextlib.ExitStack(), None, None

    def write(record: Mapping) -> None:
        nonlocal name, run
        if name_of(record) != name:
            stack.close()
            name = name_of(record)
            run = start(name)
            stack.callback(run.close)
        run.log(record["step"], numbers_of(record))

    with stack:
        for record in sorted(kept, key=name_of):  # stable: a run stays in order
            write(record)
        yield write


def forget_events(path: str) -> None:
    """Removes event files, and the folders that are empty then: no other file is touched."""
    for name in glob.glob(os.path.join(glob.escape(path), "**", "events.out.*"), recursive=True):
        os.remove(name)
    for folder, _, _ in os.walk(path, topdown=False):
        with contextlib.suppress(OSError):  # somebody's file is in it
            os.rmdir(folder)


def tensorboard(folder: str, kept: Sequence[Mapping]):
    """Event files under FOLDER/tensorboard, written anew from what is kept; numbers are float32.

    tensorboardX's SummaryWriter hands events to a queue, from which a killed run loses the last
    ones; so its parts are used without its thread.
    """
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2

    path, files = os.path.join(folder, EVENTS), itertools.count()

    def start(run: str) -> Opened:
        os.makedirs(os.path.join(path, run), exist_ok=True)
        # The number tells files apart that are opened in one second.
        name = os.path.join(path, run, "events")
        file = event_file_writer.EventsWriter(name, f".{next(files):06d}")

        def log(step, numbers):
            for key, value in numbers.items():
                found = summary.scalar(key, value)
                event = event_pb2.Event(wall_time=time.time(), step=step, summary=found)
                file.write_event(event)
            file.flush()

        return Opened(log, file.close)

    return by_run(start, kept)


def wandb(folder: str, kept: Sequence[Mapping]):
    """Runs of the project $WANDB_PROJECT or "syncopate", in a group named as the folder."""
    import wandb as package

    ids = known_ids(folder, "wandb")

    def start(run: str) -> Opened:
        number = ids.setdefault(run, uuid.uuid4().hex)
        save_ids(folder, "wandb", ids)
        opened = package.init(
            project=os.environ.get("WANDB_PROJECT", "syncopate"), group=group_of(folder), name=run,
            id=number, resume="allow", dir=folder, reinit="finish_previous",
        )  # fmt: skip
        return Opened(lambda step, numbers: opened.log(dict(numbers), step=step), opened.finish)

    return by_run(start, [r for r in kept if name_of(r) not in ids])


def mlflow(folder: str, kept: Sequence[Mapping]):
    """Runs of an experiment named as the folder, at $MLFLOW_TRACKING_URI or FOLDER/mlflow.db."""
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    place = os.environ.get("MLFLOW_TRACKING_URI")
    client = MlflowClient(place or f"sqlite:///{os.path.abspath(folder)}/mlflow.db")
    found = client.get_experiment_by_name(group_of(folder))
    experiment = found.experiment_id if found else client.create_experiment(group_of(folder))
    ids = known_ids(folder, "mlflow")

    def start(run: str) -> Opened:
        if run not in ids:
            ids[run] = client.create_run(experiment, run_name=run).info.run_id
            save_ids(folder, "mlflow", ids)

        def log(step, numbers):
            now = int(time.time() * 1000)
            metrics = [Metric(key, float(value), now, step) for key, value in numbers.items()]
            client.log_batch(ids[run], metrics=metrics)

        return Opened(log, lambda: client.set_terminated(ids[run]))

    return by_run(start, [r for r in kept if name_of(r) not in ids])


def group_of(folder: str) -> str:
    return os.path.basename(os.path.abspath(folder))


def known_ids(folder: str, tracker: str) -> dict[str, str]:
    """{run: what the tracker knows it by}; runs without one are written from their beginning."""
    return (records.read_json(os.path.join(folder, IDS)) or {}).get(tracker, {})


def save_ids(folder: str, tracker: str, ids: Mapping[str, str]) -> None:
    path = os.path.join(folder, IDS)
    known = records.read_json(path) or {}
    records.write_whole(path, json.dumps(known | {tracker: dict(ids)}, indent=1) + "\n")


class Tracker(NamedTuple):
    """Fields: package: that it imports; open: the tracker."""

    package: str
    open: Callable


TRACKERS = {
    "tensorboard": Tracker("tensorboardX", tensorboard),
    "wandb": Tracker("wandb", wandb),
    "mlflow": Tracker("mlflow", mlflow),
}
