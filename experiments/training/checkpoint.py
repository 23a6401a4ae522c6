"""Checkpoints of whole runs: orbax writes them asynchronously, atomically, from all processes."""

import contextlib
import functools
import inspect
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from experiments.processes import distributed, waits
from experiments.results import manifest, records
from experiments.tasks import digest
from experiments.training import loop
from experiments.training.config import Plans
from experiments.training.loop import Progress
from experiments.training.step import TrainState

KEPT = 2
WHAT_TO_DO = "give the command that made it, choose another --output_dir, or pass --overwrite."
BEFORE = ".before"  # of one that is being replaced


class Evaluation(NamedTuple):
    """What is carried from evaluation to evaluation, besides the state."""

    step: int = 0
    rounds: int = 0
    seconds: float = 0.0  # of training, without evaluations, checkpoints and compilation
    batch_loss: float = float("nan")
    records: int = 0  # that the run has written


@contextlib.contextmanager
def opened(folder: str) -> Iterator:
    """The checkpoints of a folder; at the end, those being written are waited for."""
    import orbax.checkpoint as ocp

    _ask_for_no_metrics()
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=True)
    with waits.for_others("the folder of checkpoints"):
        manager = ocp.CheckpointManager(os.path.abspath(folder), options=options)
    try:
        yield manager
    finally:
        with waits.for_others("the last checkpoint to be written"):
            manager.close()


@functools.cache
def _ask_for_no_metrics() -> None:
    """Leaves out of orbax's log how many bytes TensorStore has written.

    TensorStore (0.1.86) never frees what it answers, and orbax asks at every save.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    if hasattr(tensorstore_utils, "get_tensorstore_raw_bytes"):  # of orbax 0.12; others never ask
        tensorstore_utils.get_tensorstore_raw_bytes = lambda *args, **options: 0


def steps_of(folder: str) -> list[int]:
    """The steps of the checkpoints of a folder, the newest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def latest(folder: str) -> int:
    """The step of the newest checkpoint of a folder; 0 where there is none."""
    return next(iter(steps_of(folder)), 0)


def settled(folder: str) -> int:
    """The step of the newest whole checkpoint of a folder; 0 where there is none.

    Damaged ones that are newer are set aside, as STEP.damaged. Process 0 alone reads them, all of
    the state. A collective.

    Raises:
      ValueError: where none of them is whole.
    """
    if distributed.is_first():
        end_replacing(folder)
    steps, damaged = distributed.of_first(steps_of(folder)), {}
    for step in steps:
        first = distributed.is_first()
        wrong = distributed.of_first(damage(os.path.join(folder, str(step))) if first else None)
        if wrong is not None:
            damaged[step] = wrong
            continue
        for passed, why in damaged.items():
            distributed.say(f"The checkpoint of step {passed} is damaged ({why}) and passed over.")
            if first:
                aside = os.path.join(folder, f"{passed}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(os.path.join(folder, str(passed)), aside)
        distributed.wait(f"settled {folder}")
        return step
    if damaged:
        told = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        raise ValueError(
            f"no checkpoint in {folder!r} is whole ({told}): restore that folder from a copy, "
            "choose another --output_dir, or pass --overwrite to begin again."
        )
    return 0


def damage(path: str) -> str | None:
    """What is wrong with a checkpoint, in words; None if it is whole.

    It is read as a restore reads it, by this process alone.
    """
    before = sys.unraisablehook
    sys.unraisablehook = functools.partial(_unless_closed, before)
    try:
        known, _ = read_on_host(path)
        _check_step(known, path)
    except Exception as error:  # whatever orbax raises over broken files
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    sys.unraisablehook = before
    return None


def read_on_host(path: str) -> tuple[dict, dict]:
    """(the manifest, the state of all workers in dicts); some error where they are not whole."""
    import orbax.checkpoint as ocp
    from etils import epath

    known = manifest.read(path)
    handler, state = ocp.PyTreeCheckpointHandler(), epath.Path(path) / "state"
    here = ocp.ArrayRestoreArgs(sharding=jax.sharding.SingleDeviceSharding(host()))
    args = jax.tree.map(lambda _: here, handler.metadata(state).tree)
    found = handler.restore(state, args=ocp.args.PyTreeRestore(restore_args=args))
    manifest.check_leaves(known, found)
    manifest.check_orders(found, known["dealt"])
    return known, found


def _check_step(known: Mapping, path: str) -> None:
    """Raises ValueError where a whole checkpoint lies under another step's name."""
    step = known.get("step")  # None: of a time before it was written down
    if step is not None and str(step) != os.path.basename(path):
        raise ValueError(f"it is that of step {step}")


def _unless_closed(hook, raised) -> None:
    """After its first error orbax leaves the other reads alone: as they end, each would complain.

    They may end late, so that this stays once there was an error.
    """
    if "event loop" not in str(raised.exc_value).lower() and not inspect.iscoroutine(raised.object):
        hook(raised)


def host():
    """A device with the host's memory, where there is one: the state of all workers must fit."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]


def save(
    manager, plans: Plans, at: Progress, state: TrainState, seen: Evaluation, *,
    dealt: int | None = None, about: Mapping | None = None,
) -> None:  # fmt: skip
    """Starts to write the state and where it stands; returns when it has been copied.

    A checkpoint that is there already is left as it is.

    Args:
      dealt: as of `Program`; about: what the run depends on besides, JSON values.
    """
    import orbax.checkpoint as ocp

    if manager.latest_step() == at.step:
        return
    known = {
        "about": dict(about or {}),
        "code": digest.code_hash(),
        "dealt": dealt,
        "decided": np.flatnonzero(at.decided).tolist(),
        "evaluation": seen._asdict(),
        "plans": plans.digests(),
        "step": at.step,
    }
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        manifest=manifest.save_args()(manifest.text_of(state, known)),
    )
    with waits.for_others("their parts of a checkpoint"):
        manager.save(at.step, args=args)


def end_replacing(folder: str) -> None:
    """Of a checkpoint and that before in its place the new one stays, if it has come there."""
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name.endswith(BEFORE):
            path = os.path.join(folder, name)
            if os.path.exists(path.removesuffix(BEFORE)):
                shutil.rmtree(path)
            else:
                os.rename(path, path.removesuffix(BEFORE))


def restore(
    manager, plans: Plans, start: TrainState, *, about: Mapping | None = None
) -> tuple[Progress, TrainState, Evaluation]:
    """The last checkpoint, which is whole (see `settled`); the start where there is none.

    Args:
      plans: of this run, which must be those of the checkpoint; about: so too, None for anything.
      start: the state of a run that begins: its shapes, and where its arrays live.

    Raises:
      ValueError: for a checkpoint of a run with other plans, settings or data.
    """
    import orbax.checkpoint as ocp

    step = manager.latest_step()
    if step is None:
        return Progress(), start, Evaluation()
    path = os.path.join(manager.directory, str(step))
    known = manifest.read(path)
    _check_same(known, plans, about, step)
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), start
    )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
    with waits.for_others("their parts of a checkpoint"):
        state = manager.restore(step, args=args)["state"]
    try:
        manifest.check_leaves(known, state)
        manifest.check_orders({"orders": distributed.on_host(state.orders)}, known["dealt"])
    except ValueError as error:
        raise ValueError(
            f"the checkpoint {path!r} was not restored as it was saved ({error}): give the command "
            "again, or move that folder away to go on from an older one."
        ) from error
    return progress_of(known, plans, step), state, Evaluation(**known["evaluation"])


def progress_of(known: Mapping, plans: Plans, step: int) -> Progress:
    """Where the run of a manifest stands."""
    decided = np.isin(np.arange(step if plans.echo.online else 0), known["decided"])
    return loop.resumed(plans, step, tuple(decided.tolist()))


def _check_same(known: Mapping, plans: Plans, about: Mapping | None, step: int) -> None:
    if changed := [] if about is None else records.differences(known["about"], about):
        raise ValueError(
            f"the checkpoint of step {step} belongs to a run with other settings "
            f"({', '.join(changed)}): {WHAT_TO_DO}"
        )
    check_plans(known, plans, step)
    if known["code"] != digest.code_hash():
        distributed.say(f"The checkpoint of step {step} was written by other code than this.")


def check_plans(known: Mapping, plans: Plans, step: int) -> None:
    """Raises ValueError unless a manifest is of these plans."""
    for name, own in plans.digests().items():
        if known["plans"].get(name) != own:
            raise ValueError(
                f"the checkpoint of step {step} belongs to another {name} plan: {WHAT_TO_DO}"
            )


def export(folder: str, model) -> None:
    """Writes a model as FOLDER/model: a tree that orbax restores by itself.

    orbax.checkpoint.StandardCheckpointer().restore(os.path.abspath("FOLDER/model"))
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(os.path.join(folder, "model")), model, force=True)
