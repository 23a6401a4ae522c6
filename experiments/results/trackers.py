"""Programs that people watch runs with: TensorBoard, W&B, MLflow, a row of TRACKERS each.

A tracker is `(folder, run, known, step) -> (id, log, close)`: it opens a run, from this step on,
known by the id of an earlier call or None, and `log(step, numbers)` takes what is drawn over steps.
"""

import contextlib
import importlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence

from experiments.cluster import files
from experiments.results import records

IDS = "trackers.json"  # of a folder: {tracker: {run: id}}


def tensorboard(folder, run, known, step):
    """Event files under FOLDER/tensorboard; what an earlier call wrote of later steps is purged.

    tensorboardX's SummaryWriter hands events to a queue, from which a killed run loses the last
    ones; so its parts are used without its thread.
    """
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2

    place = os.path.join(folder, "tensorboard", run)
    os.makedirs(place, exist_ok=True)
    # The number tells files apart that are opened in one second.
    file = event_file_writer.EventsWriter(os.path.join(place, "events"), f".{time.time_ns()}")

    def add(step, **what):
        file.write_event(event_pb2.Event(wall_time=time.time(), step=step, **what))

    def log(step, numbers):
        for name, value in numbers.items():
            add(step, summary=summary.scalar(name, value))
        file.flush()

    if known:
        add(step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
    return run, log, file.close


def wandb(folder, run, known, step):
    """Runs of the project $WANDB_PROJECT or "syncopate", in a group named as the folder."""
    import wandb as package

    number = known or uuid.uuid4().hex
    opened = package.init(
        project=os.environ.get("WANDB_PROJECT", "syncopate"), group=group_of(folder), name=run,
        id=number, resume="allow", dir=folder, reinit="finish_previous",
    )  # fmt: skip
    return number, lambda step, numbers: opened.log(numbers, step=step), opened.finish


def mlflow(folder, run, known, step):
    """Runs of an experiment named as the folder, at $MLFLOW_TRACKING_URI or FOLDER/mlflow.db."""
    import mlflow as package

    place = os.environ.get("MLFLOW_TRACKING_URI")
    package.set_tracking_uri(place or f"sqlite:///{os.path.abspath(folder)}/mlflow.db")
    package.set_experiment(group_of(folder))
    opened = package.start_run(run_id=known, run_name=None if known else run)
    return (
        opened.info.run_id,
        lambda step, numbers: package.log_metrics(numbers, step=step),
        package.end_run,
    )


TRACKERS = {  # (the package, an extra of setup.cfg, and what opens a run)
    "tensorboard": ("tensorboardX", tensorboard),
    "wandb": ("wandb", wandb),
    "mlflow": ("mlflow", mlflow),
}


def check(names: Sequence[str]) -> None:
    """Raises ImportError if a tracker's package is not installed, ValueError for another name."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"{name!r} is no tracker: pass some of {', '.join(TRACKERS)}.")
        try:
            importlib.import_module(TRACKERS[name][0])
        except ImportError as error:
            raise ImportError(
                f"{name} needs {TRACKERS[name][0]}, which is not installed: "
                f"pip install 'syncopate[{name}]', or leave it out of --track."
            ) from error


@contextlib.contextmanager
def hook(name: str, folder: str, kept: Sequence[Mapping]) -> Iterator[Callable[[Mapping], None]]:
    """`write(record)` to a tracker: one run is open at a time, that of the record that came last.

    Args:
      kept: records of an earlier call; those of runs that the tracker does not know come first.
    """
    path, stack, current, log = os.path.join(folder, IDS), contextlib.ExitStack(), None, None
    ids = files.read_json(path, {}).get(name, {})

    def write(record: Mapping) -> None:
        nonlocal current, log
        if (run := name_of(record)) != current:
            stack.close()
            current, (_, opens) = run, TRACKERS[name]
            ids[run], log, close = opens(folder, run, ids.get(run), record["step"])
            stack.callback(close)
            files.write_json(path, files.read_json(path, {}) | {name: ids})
        log(record["step"], numbers_of(record))

    with stack:
        for record in [r for r in kept if name_of(r) not in ids]:
            write(record)
        yield write


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


def group_of(folder: str) -> str:
    return os.path.basename(os.path.abspath(folder))
