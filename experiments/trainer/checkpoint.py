"""Checkpoints of whole runs, which orbax writes asynchronously and atomically on all processes.

A checkpoint is a folder STEP with the state, facts about its run, and a digest of every file.
Process 0 writes the digest when all processes are done, before the folder is renamed to STEP.
Every checkpoint therefore has a digest.
"""

import contextlib
import functools
import hashlib
import inspect
import os
import pathlib
import queue
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments import entry, files, fingerprints, lock
from experiments.distributed import deadlines, processes
from experiments.trainer import loop, pipeline
from experiments.trainer.config import Plans
from experiments.trainer.loop import Progress
from experiments.trainer.program import Program
from experiments.trainer.step import TrainState
from syncopate.refusals import UserError
from syncopate.unstable import coordination_client

KEPT = 2
CLOSED = "Event loop is closed"  # what asyncio says
# Orbax waits by the clock of the wall, which may be set forward by months: `deadlines` ends waits.
ORBAX_SECONDS = 10**8
STATE, METADATA, DIGEST = "state", "run", "digest.txt"  # in the folder of a checkpoint
WHAT_TO_DO = "give the command that made it, choose another --output_dir, or pass --overwrite."


class Evaluation(NamedTuple):
    """Values carried from evaluation to evaluation, in addition to the state."""

    step: int = 0
    rounds: int = 0
    seconds: float = 0.0  # of training, without evaluations, checkpoints and compilation
    batch_loss: float | None = None
    records: int = 0  # written so far
    more_sent: float = 0.0  # in all-reduces, than the present number of workers would have sent


class Begun(NamedTuple):
    """Where a run goes on; arrays of its state may still be on the host."""

    at: Progress
    state: TrainState
    seen: Evaluation


@contextlib.contextmanager
def opened(folder: str) -> Iterator:
    """Opens orbax's manager of a folder; on exit, waits until all checkpoints are written.

    After an error of one of several processes it does not wait: the others wait for this one.
    """
    import orbax.checkpoint as ocp

    folder = os.path.abspath(folder)
    written = ocp.AsyncOptions(
        timeout_secs=ORBAX_SECONDS,
        create_directories_asynchronously=False,
        post_finalization_callback=lambda: _write_digest(folder),
        barrier_sync_fn=functools.partial(_barrier, folder) if deadlines.several() else None,
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, async_options=written)
    with deadlines.for_disk("the folder of checkpoints", folder):
        manager = ocp.CheckpointManager(folder, options=options)
    failed = False
    try:
        with _reports_taken():
            yield manager
            with deadlines.for_disk("the last checkpoint to be written", folder):
                manager.wait_until_finished()
    except BaseException:
        failed = True
        raise
    finally:
        if not (failed and deadlines.several()):
            # What closing finds after an error is its consequence.
            quiet = contextlib.suppress(Exception) if failed else contextlib.nullcontext()
            with deadlines.for_disk("the last checkpoint to be written", folder), quiet:
                manager.close()


@contextlib.contextmanager
def _reports_taken() -> Iterator[None]:
    """Has `_take_reports` called while orbax works, and on where that ends in an error."""
    reports, before = queue.SimpleQueue(), sys.unraisablehook
    threading.Thread(target=_take_reports, args=(reports, before), daemon=True).start()
    sys.unraisablehook = reports.put
    yield
    sys.unraisablehook = before
    reports.put(None)


def _take_reports(reports: queue.SimpleQueue, tell: Callable) -> None:
    """Takes what TensorStore reports where it cannot wake who waits for an array, and others do.

    A thread of its own does, with memory of its own: in those of TensorStore none may be left for a
    line of Python. Where memory ran out the process ends, as that one would wait for ever. Where
    the loop that waited is closed, or what waited is thrown away, an array before has failed, and
    its error is told.
    """
    while (report := reports.get()) is not None:
        if issubclass(report.exc_type, MemoryError):
            entry.end_without_memory()
        of_loop = report.object is None and str(report.exc_value) == CLOSED
        if not of_loop and not inspect.iscoroutine(report.object):
            tell(report)
        del report


def _barrier(folder: str, *, key: str, timeout_ms: int) -> None:
    """Orbax's barrier of all processes, in the thread that writes.

    A process whose writing failed comes to another one than the others, which would wait for it:
    it tells its error and ends, which ends them. If the main thread ends already, with an error
    that it has told, writing fails for that.
    """
    if (error := sys.exception()) is None:
        coordination_client().wait_at_barrier(key, timeout_ms)
        return
    if processes.leaving.is_set():
        os._exit(1)
    try:
        with files.advised(folder):
            raise error
    except BaseException as raised:
        try:
            sys.excepthook(type(raised), raised, raised.__traceback__)
            sys.stderr.flush()
        finally:
            os._exit(1)


def save(
    manager,
    program: Program,
    plans: Plans,
    at: Progress,
    state: TrainState,
    seen: Evaluation,
    about: Mapping,
) -> None:
    """Starts to write the state and its step, and returns once the state has been copied.

    An existing checkpoint of the same step is kept.
    """
    import orbax.checkpoint as ocp

    lock.check()
    if manager.latest_step() == at.step:
        return
    metadata = {
        "about": dict(about),
        "conditions": fingerprints.conditions(),
        "decided": np.flatnonzero(at.decided).tolist(),
        "evaluation": seen._asdict(),
        "plans": plans.digests(),
        "sizes": program.sizes,
        "step": at.step,
        "units": None if program.units is None else program.units.tolist(),
    }
    metadata = files.plain(metadata)
    state = ocp.args.StandardSave(pipeline.key_data(state))
    items = {STATE: state, METADATA: ocp.args.JsonSave(metadata)}
    with deadlines.for_disk("their parts of a checkpoint", str(manager.directory)):
        manager.save(at.step, args=ocp.args.Composite(**items))


def _write_digest(folder: str) -> None:
    """Called on process 0 when all files are written and the folder is not yet renamed."""
    for path in pathlib.Path(folder).glob("*.orbax-checkpoint-tmp*"):
        if not path.is_symlink():
            with files.created(str(path / DIGEST)) as file:
                file.write(_digest_of(path).encode())


def _digest_of(path: pathlib.Path) -> str:
    """One line per file that `restore` reads, in the format of sha256sum."""
    lines = []
    for file in sorted([*path.glob(f"{STATE}/**/*"), *path.glob(f"{METADATA}/**/*")]):
        if not file.is_dir():
            with open(file, "rb", opener=files.regular) as content:
                digest = hashlib.file_digest(content, "sha256").hexdigest()
            lines.append(f"{digest}  {file.relative_to(path)}\n")
    return "".join(lines)


def damage(path: str) -> str | None:
    """Describes what is wrong with a checkpoint, or None if it is whole. Reads all of its files."""
    try:
        recorded = files.content(os.path.join(path, DIGEST)).decode(errors="replace")
        actual = _digest_of(pathlib.Path(path))
    except OSError as error:
        return str(error)
    if recorded != actual:
        differ = {line.split("  ")[-1] for line in {*recorded.split("\n")} ^ {*actual.split("\n")}}
        return f"{', '.join(sorted(differ))} not as {DIGEST} says"
    if (step := read_metadata(path).get("step")) != int(os.path.basename(path)):
        return f"it is that of step {step}"
    return None


def read_metadata(path: str) -> dict:
    """The facts about its run that `save` wrote into a whole checkpoint."""
    return files.read_json(os.path.join(path, METADATA, "metadata"), {})


def steps_of(folder: str) -> list[int]:
    """The steps of a folder's checkpoints, newest first."""
    names = os.listdir(folder) if os.path.exists(folder) else []
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def newest(folder: str) -> int:
    """The step of a folder's newest checkpoint, 0 if there is none, as process 0 sees it."""
    return processes.of_first(max(steps_of(folder), default=0))


def reconcile(folder: str, recorded: Sequence[int] | None = None) -> int:
    """The step of the newest checkpoint that a run can continue from, or 0 if there is none.

    It alone brings records and checkpoints together. Newer checkpoints, which are damaged or know
    records that are lost, are renamed to STEP.aside. Only process 0 reads the files. A collective.

    Args:
      recorded: steps of the run's records, as far as they are there; None: all are.

    Raises:
      ValueError: if there are checkpoints, and none to continue from.
    """
    judged = _judged(folder, recorded) if processes.is_first() else None
    step, passed_over = processes.of_first(judged)
    if passed_over and not step:
        reasons = "; ".join(f"step {step}: {wrong}" for step, wrong in passed_over.items())
        raise UserError(
            f"no checkpoint in {folder!r} fits its run ({reasons}): restore the files from a copy, "
            "choose another --output_dir, or pass --overwrite to begin again."
        )
    for passed, wrong in passed_over.items():
        processes.say(f"The checkpoint of step {passed} is passed over: {wrong}.")
        if processes.is_first():
            aside = os.path.join(folder, f"{passed}.aside")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(os.path.join(folder, passed), aside)
    processes.wait(f"reconciled {folder}")
    return step


def _judged(folder, recorded) -> tuple[int, dict[str, str]]:
    """(the newest step that fits or 0, {step: what is wrong} of the newer ones)."""
    passed_over = {}
    for step in steps_of(folder):
        path = os.path.join(folder, str(step))
        wrong = damage(path)
        if wrong is None and recorded is not None:
            needed = read_metadata(path)["evaluation"]["records"]
            if (count := sum(at <= step for at in recorded)) != needed:
                wrong = f"it needs {needed} records, and metrics.jsonl holds {count} up to there"
        if wrong is None:
            return step, passed_over
        passed_over[str(step)] = wrong
    return 0, passed_over


def restore(
    folder: str, step: int, plans: Plans, shapes: TrainState, about: Mapping
) -> Begun | None:
    """Reads a checkpoint, which must be whole; None at step 0.

    Plans and settings of this run must equal those of the checkpoint.
    """
    if not step:
        return None
    path = os.path.join(folder, str(step))
    metadata = read_metadata(path)
    if changed := files.differences(metadata["about"], about):
        raise UserError(
            f"the checkpoint of step {step} belongs to a run with other settings "
            f"({', '.join(changed)}): {WHAT_TO_DO}"
        )
    at = progress_of(metadata, plans)
    return Begun(at, read_state(path, shapes), Evaluation(**metadata["evaluation"]))


def read_state(path: str, shapes: TrainState, sharding=None) -> TrainState:
    """The state of a checkpoint, of these shapes, with their shardings or one for all."""
    import orbax.checkpoint as ocp

    like = jax.tree.map(
        lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or y.sharding),
        jax.eval_shape(pipeline.key_data, shapes),
        shapes,
    )
    place = os.path.join(os.path.abspath(path), STATE)
    with (
        deadlines.for_others("their parts of a checkpoint"),
        ocp.StandardCheckpointer() as reader,
    ):
        try:
            with _reports_taken():
                restored = reader.restore(place, like)
        except Exception as error:  # of orbax also Exception itself
            if not isinstance(error, ValueError | KeyError) and type(error) is not Exception:
                raise
            raise UserError(
                f"{place!r} cannot be read, though it is as {DIGEST} says "
                f"({str(error).splitlines()[0]:.200}): {files.WHAT_TO_DO}"
            ) from error
    return jax.tree.map(pipeline.as_keys, restored, shapes)


def progress_of(metadata: Mapping, plans: Plans) -> Progress:
    """The progress stored in a checkpoint. Prints conditions that have changed since."""
    if changed := files.differences(metadata["conditions"], fingerprints.conditions()):
        processes.say(
            f"The checkpoint of step {metadata['step']} was written under other conditions "
            f"({', '.join(changed)}): the run may not end with the same bits."
        )
    for name, digest in plans.digests().items():
        if metadata["plans"].get(name) != digest:
            raise UserError(
                f"the checkpoint of step {metadata['step']} belongs to another {name} plan: "
                f"{WHAT_TO_DO}"
            )
    processes.say(f"Continues from the checkpoint of step {metadata['step']}.")
    decided = np.isin(np.arange(metadata["step"] if plans.echo.online else 0), metadata["decided"])
    return loop.resumed(plans, metadata["step"], tuple(decided.tolist()))


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
