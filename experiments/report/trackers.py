"""Experiment trackers: a row of TRACKERS each, and one hook that sends records to them.

A row is `(folder, run, run_id, step) -> (id, log, close)`. It opens a run from this step on;
`run_id` is its id from an earlier call, or None. `log(step, numbers)` sends numbers.
"""

import contextlib
import importlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import syncopate
from experiments import files
from syncopate.refusals import UserError

IDS = "trackers.json"  # of a folder: {tracker: {run: id}}


def tensorboard(folder, run, run_id, step):
    """Event files in FOLDER/tensorboard; later steps of an earlier call are purged."""
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.summary import scalar

    place = os.path.join(folder, "tensorboard", run)
    os.makedirs(place, exist_ok=True)
    # SummaryWriter has a queue, whose last events are lost when a run is killed. The number makes
    # names of files unique that are opened within one second.
    file = EventsWriter(os.path.join(place, "events"), f".{time.time_ns()}")
    file.write_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)))

    def log(step, numbers):
        for name, value in numbers.items():
            file.write_event(Event(wall_time=time.time(), step=step, summary=scalar(name, value)))
        file.flush()

    return run, log, file.close


def wandb(folder, run, run_id, step):
    """Runs of the project $WANDB_PROJECT or "syncopate", in a group named as the folder."""
    import wandb as package

    number = run_id or uuid.uuid4().hex
    opened = package.init(
        project=os.environ.get("WANDB_PROJECT", "syncopate"),
        group=_name(folder),
        name=run,
        id=number,
        resume="allow",
        dir=folder,
        reinit="finish_previous",
    )
    return number, lambda step, numbers: opened.log(numbers, step=step), opened.finish


def mlflow(folder, run, run_id, step):
    """Runs of an experiment named as the folder, at $MLFLOW_TRACKING_URI or FOLDER/mlflow.db."""
    import mlflow as package

    place = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{os.path.abspath(folder)}/mlflow.db")
    package.set_tracking_uri(place)
    package.set_experiment(_name(folder))
    number = package.start_run(run_id=run_id, run_name=None if run_id else run).info.run_id
    return number, lambda step, numbers: package.log_metrics(numbers, step), package.end_run


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


@contextlib.contextmanager
def hook(names: Sequence[str], folder: str, *, anew: bool) -> Iterator[Callable]:
    """`track(run, step, numbers)` for all of these trackers; one run is open at a time.

    Args:
      anew: start new runs instead of continuing those of an earlier call.
    """
    if others := [name for name in names if name not in TRACKERS]:
        raise UserError(f"--track has {', '.join(others)}: pass some of {', '.join(TRACKERS)}.")
    for name in {*names} & {*PACKAGES}:
        try:
            importlib.import_module(PACKAGES[name])
        except ImportError as error:
            raise UserError(
                f"--track={name} needs a package that is not installed: "
                f"{syncopate.install(name)}, or leave it out."
            ) from error
    names = [*dict.fromkeys(names)]
    path, stack, current, logs = os.path.join(folder, IDS), contextlib.ExitStack(), None, []
    ids = {name: {} for name in names} | ({} if anew else files.read_json(path, {}))

    def track(run: str, step: int, numbers: dict[str, float]) -> None:
        nonlocal current, logs
        if run != current:
            stack.close()
            current, logs = run, []
            for name in names:
                run_id = ids[name].get(run)
                ids[name][run], log, close = TRACKERS[name](folder, run, run_id, step)
                stack.callback(close)
                logs.append(log)
            files.write_json(path, ids)
        for log in logs:
            log(step, numbers)

    with stack:
        yield track


def _name(folder: str) -> str:
    return os.path.basename(os.path.abspath(folder))
