"""Checkpoints of runs, which orbax writes in the background, whole or not at all.

A checkpoint is a folder STEP with the state and a JSON of the run's progress. The settings of a run
are not in it: `settings.json` beside the checkpoints has them.
"""

import contextlib
import functools
import hashlib
import os
import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np

from experiments import files, fingerprints, lock
from experiments.distributed import deadlines, processes
from experiments.trainer.config import Plans
from experiments.trainer.step import TrainState
from experiments.trainer.timeline import Progress
from syncopate.refusals import UserError
from syncopate.unstable import coordination_client

KEPT = 2
# Orbax waits by the clock of the wall, which may be set forward by months: `deadlines` ends waits.
ORBAX_SECONDS = 10**8


@contextlib.contextmanager
def writing(folder: str | None, plans: Plans) -> Iterator[Callable[[Progress, TrainState], None]]:
    """Yields `save(progress, state)`, which returns once the state has been copied.

    Orbax is opened for the first checkpoint. On exit it waits until the last one is written; after
    an error of one of several processes it does not, as the others wait for that one. Without a
    folder nothing is saved.
    """
    manager = None

    def save(at: Progress, state: TrainState) -> None:
        nonlocal manager
        if folder is None:
            return
        lock.check()
        manager = manager or _opened(folder)
        _save(manager, plans, at, state)

    failed = False
    try:
        yield save
    except BaseException:
        failed = True
        raise
    finally:
        if manager is not None and not (failed and deadlines.several()):
            # What closing finds after an error is its consequence.
            quiet = contextlib.suppress(Exception) if failed else contextlib.nullcontext()
            with deadlines.for_disk("the last checkpoint to be written", folder), quiet:
                manager.wait_until_finished()
                manager.close()


def _opened(folder: str):
    """Orbax's manager of a folder."""
    import orbax.checkpoint as ocp

    waits = ocp.AsyncOptions(
        timeout_secs=ORBAX_SECONDS,
        create_directories_asynchronously=False,
        barrier_sync_fn=functools.partial(_barrier, folder) if deadlines.several() else None,
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, async_options=waits)
    with deadlines.for_disk("the folder of checkpoints", folder):
        return ocp.CheckpointManager(os.path.abspath(folder), options=options)


def _barrier(folder: str, *, key: str, timeout_ms: int) -> None:
    """Orbax's barrier of all processes, in the thread that writes.

    A process whose writing has failed ends here with its error, as the others wait for it.
    """
    if (error := sys.exception()) is None:
        return coordination_client().wait_at_barrier(key, timeout_ms)
    if not processes.leaving.is_set():
        try:
            with files.advised(folder):
                raise error
        except BaseException as raised:
            sys.excepthook(type(raised), raised, raised.__traceback__)
    os._exit(1)


def _save(manager, plans: Plans, at: Progress, state: TrainState) -> None:
    """Starts to write a checkpoint. One of the same step is kept."""
    import orbax.checkpoint as ocp

    if manager.latest_step() == at.step:
        return
    run = {
        "conditions": fingerprints.conditions(),
        "plans": _digests(plans),
        "progress": at._asdict() | {"decided": np.flatnonzero(at.decided).tolist()},
    }
    items = {"state": ocp.args.StandardSave(state), "run": ocp.args.JsonSave(files.plain(run))}
    with deadlines.for_disk("their parts of a checkpoint", str(manager.directory)):
        manager.save(at.step, args=ocp.args.Composite(**items))


def steps_of(folder: str) -> list[int]:
    """The steps of a folder's checkpoints, newest first."""
    names = os.listdir(folder) if os.path.exists(folder) else []
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def newest(folder: str) -> int:
    """The step of a folder's newest checkpoint, 0 if there is none, as process 0 sees it."""
    return processes.of_first(max(steps_of(folder), default=0))


def restore(
    folder: str, plans: Plans, shapes: TrainState, *, records: int | None = None
) -> tuple[Progress, TrainState] | None:
    """Reads the newest checkpoint of a folder; None if there is none. A collective.

    Args:
      plans: of the run, as they were; shapes: with the shardings of the state.
      records: how many the run has, up to the checkpoint; None: as many as it needs.

    Raises:
      ValueError: for a checkpoint that cannot be read, or is of a run with other plans or records.
    """
    if not (step := newest(folder)):
        return None
    run, state = _read(os.path.join(os.path.abspath(folder), str(step)), shapes)
    if changed := files.differences(run["conditions"], fingerprints.conditions()):
        processes.say(
            f"The checkpoint of step {step} was written under other conditions "
            f"({', '.join(changed)}): the run may not end with the same bits."
        )
    for name, digest in _digests(plans).items():
        if run["plans"].get(name) != digest:
            raise UserError(
                f"the checkpoint of step {step} belongs to another {name} plan: give the command "
                "that made it, choose another --output_dir, or pass --overwrite."
            )
    at = Progress(**run["progress"])
    if records not in (None, at.records):
        raise UserError(
            f"the checkpoint of step {step} needs {at.records} records, and metrics.jsonl holds "
            f"{records} up to there: bring its lines back, or delete "
            f"{os.path.join(folder, str(step))!r} to go on from the checkpoint before."
        )
    decided = np.isin(np.arange(step if plans.echo.online else 0), at.decided)
    processes.say(f"Continues from the checkpoint of step {step}.")
    return at._replace(decided=tuple(decided.tolist())), state


def _read(path: str, shapes: TrainState) -> tuple[dict, TrainState]:
    """(facts about the run, the state) of a checkpoint."""
    import orbax.checkpoint as ocp

    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), shapes
    )
    items = {"state": ocp.args.StandardRestore(like), "run": ocp.args.JsonRestore()}
    with (
        deadlines.for_others("their parts of a checkpoint"),
        ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader,
    ):
        try:
            kept = reader.restore(path, ocp.args.Composite(**items))
        except Exception as error:  # of orbax also Exception itself
            unread = ValueError | KeyError | FileNotFoundError
            if not isinstance(error, unread) and type(error) is not Exception:
                raise
            reason = f"{str(error).splitlines()[0]:.200}"
            raise UserError(
                f"the checkpoint {path!r} cannot be read ({reason}): restore it from a copy, or "
                "delete it to go on from the checkpoint before."
            ) from error
    return kept.run, kept.state


def _digests(plans: Plans) -> dict[str, str]:
    """Hashes of all that is decided before the run."""
    rates = hashlib.sha256(np.asarray(plans.rates, "<f4").tobytes()).hexdigest()
    sync = "by loads" if plans.sync is None else plans.sync.digest()
    echo = "online" if plans.echo.online else plans.echo.digest()
    return {"sync": sync, "echo": echo, "learning rate": rates}


def check_export(folder: str) -> None:
    """Raises ValueError, before a run, for a FOLDER/model that `export` could not replace."""
    path = os.path.join(folder, "model")
    if os.path.islink(path) or (os.path.exists(path) and not os.path.isdir(path)):
        raise UserError(
            f"{path!r} is {'a link' if os.path.islink(path) else 'no folder'}, and the run would "
            "write its model there: move it away, or choose another --output_dir."
        )


def export(folder: str, model) -> None:
    """Writes a model to FOLDER/model, from which orbax alone restores it:

    orbax.checkpoint.StandardCheckpointer().restore(os.path.abspath("FOLDER/model"))
    """
    import orbax.checkpoint as ocp

    if not processes.is_first():
        return
    lock.check()
    alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})  # no barriers
    with ocp.StandardCheckpointer(multiprocessing_options=alone) as checkpointer:
        checkpointer.save(os.path.abspath(os.path.join(folder, "model")), model, force=True)
