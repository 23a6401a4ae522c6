"""Checkpoints of whole runs: orbax writes them asynchronously, atomically, from all processes.

A checkpoint is a folder STEP with the state and its digest: of which run it is, where that stands,
and what every file must hold. Process 0 writes the digest once all processes are done, before the
folder gets its name, so that there is no checkpoint without one.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.cluster import agree, digest, files, processes
from experiments.training import loop
from experiments.training.config import Plans
from experiments.training.loop import Progress
from experiments.training.step import TrainState

KEPT = 2
STATE, UNITS, DIGEST = "state", "units.npy", "digest.json"  # in the folder of a checkpoint
WHAT_TO_DO = "give the command that made it, choose another --output_dir, or pass --overwrite."


class Evaluation(NamedTuple):
    """What is carried from evaluation to evaluation, besides the state."""

    step: int = 0
    rounds: int = 0
    seconds: float = 0.0  # of training, without evaluations, checkpoints and compilation
    batch_loss: float = float("nan")
    records: int = 0  # that the run has written


class Opened(NamedTuple):
    """The checkpoints of a folder: orbax's manager, and what is known of that being written."""

    manager: Any
    writing: dict


@contextlib.contextmanager
def opened(folder: str) -> Iterator[Opened]:
    """The checkpoints of a folder; at the end, those being written are waited for."""
    import orbax.checkpoint as ocp

    _ask_for_no_metrics()
    folder, writing = os.path.abspath(folder), {}
    written = ocp.AsyncOptions(post_finalization_callback=lambda: _write_digest(folder, writing))
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, async_options=written)
    with agree.for_others("the folder of checkpoints"):
        manager = ocp.CheckpointManager(folder, options=options)
    try:
        yield Opened(manager, writing)
    finally:
        with agree.for_others("the last checkpoint to be written"):
            manager.close()


@functools.cache
def _ask_for_no_metrics() -> None:
    """Leaves out of orbax's log how many bytes TensorStore has written.

    TensorStore (0.1.86) never frees what it answers, and orbax asks at every save.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    if hasattr(tensorstore_utils, "get_tensorstore_raw_bytes"):  # of orbax 0.12; others never ask
        tensorstore_utils.get_tensorstore_raw_bytes = lambda *args, **options: 0


def save(
    opened: Opened, plans: Plans, at: Progress, state: TrainState, seen: Evaluation, *,
    about: Mapping | None = None, units: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Starts to write the state and where it stands; returns when it has been copied.

    A checkpoint that is there already is left as it is.

    Args:
      about: what the run depends on besides its plans, JSON values.
      units: int[W, M] that the workers own; None where these need not be told.
    """
    import orbax.checkpoint as ocp

    manager, writing = opened
    if manager.latest_step() == at.step:
        return
    with agree.for_others("their parts of a checkpoint"):
        manager.wait_until_finished()  # of another step: what is known of it has been written
        writing |= {
            "about": dict(about or {}),
            "code": digest.code_hash(),
            "decided": np.flatnonzero(at.decided).tolist(),
            "evaluation": seen._asdict(),
            "plans": plans.digests(),
            "step": at.step,
            UNITS: units,
        }
        args = ocp.args.Composite(**{STATE: ocp.args.StandardSave(state)})
        manager.save(at.step, args=args)


def _write_digest(folder: str, known: Mapping) -> None:
    """Called by process 0, where all files are written and the folder has not got its name."""
    (path,) = pathlib.Path(folder).glob(f"{known['step']}.orbax-checkpoint-tmp*")
    content = dict(known)
    if (units := content.pop(UNITS)) is not None:
        np.save(path / UNITS, units)
    content["files"] = _hashes(path)
    text = json.dumps({"content": content, "sha256": _text_hash(content)})
    (path / DIGEST).write_text(text)


def _hashes(path: pathlib.Path) -> dict[str, str]:
    """{file: SHA-256}, of all that is read again but the digest."""
    found = {}
    for file in [*sorted((path / STATE).rglob("*")), path / UNITS]:
        if file.is_file():
            with open(file, "rb") as content:
                found[str(file.relative_to(path))] = hashlib.file_digest(
                    content, "sha256"
                ).hexdigest()
    return found


def _text_hash(content) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_digest(path: str) -> dict:
    """What the digest of a checkpoint says.

    Raises:
      ValueError: where it is missing, or not what was written.
    """
    try:
        found = json.loads(pathlib.Path(path, DIGEST).read_bytes())
        content, known = found["content"], found["sha256"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{DIGEST} is missing or broken: {error}") from error
    if _text_hash(content) != known:
        raise ValueError(f"{DIGEST} is not what was saved")
    return content


def damage(path: str) -> str | None:
    """What is wrong with a checkpoint, in words; None if it is whole. Reads all of its files."""
    try:
        known, found = read_digest(path), _hashes(pathlib.Path(path))
    except (ValueError, OSError) as error:
        return str(error)
    if str(known["step"]) != os.path.basename(path):
        return f"{DIGEST} is that of step {known['step']}"
    for name, saved in known["files"].items():
        if found.get(name) != saved:
            return f"{name} is {'not what was saved' if name in found else 'missing'}"
    return None


def steps_of(folder: str) -> list[int]:
    """The steps of the checkpoints of a folder, the newest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def latest(folder: str) -> int:
    """The step of the newest checkpoint of a folder; 0 where there is none."""
    return next(iter(steps_of(folder)), 0)


def settled(folder: str) -> int:
    """The step of the newest whole checkpoint of a folder; 0 where there is none.

    Damaged ones that are newer are set aside, as STEP.damaged. Process 0 alone reads them. A
    collective.

    Raises:
      ValueError: where none of them is whole.
    """
    first, damaged = processes.is_first(), {}
    for step in processes.of_first(steps_of(folder)):
        wrong = processes.of_first(damage(os.path.join(folder, str(step))) if first else None)
        if wrong is not None:
            damaged[step] = wrong
            continue
        for passed, why in damaged.items():
            processes.say(f"The checkpoint of step {passed} is damaged ({why}) and passed over.")
            if first:
                aside = os.path.join(folder, f"{passed}.damaged")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(os.path.join(folder, str(passed)), aside)
        processes.wait(f"settled {folder}")
        return step
    if damaged:
        told = "; ".join(f"step {step}: {why}" for step, why in damaged.items())
        raise ValueError(
            f"no checkpoint in {folder!r} is whole ({told}): restore that folder from a copy, "
            "choose another --output_dir, or pass --overwrite to begin again."
        )
    return 0


def restore(
    folder: str, plans: Plans, start: TrainState, *, about: Mapping | None = None
) -> tuple[Progress, TrainState, Evaluation]:
    """The last checkpoint of a folder, which is whole (see `settled`); else the start.

    Args:
      plans: of this run, which must be those of the checkpoint; about: so too, None for anything.
      start: the state of a run that begins: its shapes, and where its arrays live.

    Raises:
      ValueError: for a checkpoint of a run with other plans, settings or data.
    """
    if not (step := latest(folder)):
        return Progress(), start, Evaluation()
    path = os.path.join(folder, str(step))
    known = read_digest(path)
    if changed := [] if about is None else files.differences(known["about"], about):
        raise ValueError(
            f"the checkpoint of step {step} belongs to a run with other settings "
            f"({', '.join(changed)}): {WHAT_TO_DO}"
        )
    check_plans(known, plans)
    if known["code"] != digest.code_hash():
        processes.say(f"The checkpoint of step {step} was written by other code than this.")
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), start
    )
    return progress_of(known, plans), read_state(path, like), Evaluation(**known["evaluation"])


def read_state(path: str, like: TrainState) -> TrainState:
    """The state of a checkpoint; `like`: its shapes, and where its arrays shall live."""
    import orbax.checkpoint as ocp

    with agree.for_others("their parts of a checkpoint"), ocp.StandardCheckpointer() as reader:
        return reader.restore(os.path.join(os.path.abspath(path), STATE), like)


def read_units(path: str, known: Mapping) -> np.ndarray | None:
    """As given to `save`, of a checkpoint of this digest."""
    return np.load(os.path.join(path, UNITS)) if UNITS in known["files"] else None


def check_plans(known: Mapping, plans: Plans) -> None:
    """Raises ValueError unless a digest is of these plans."""
    for name, own in plans.digests().items():
        if known["plans"].get(name) != own:
            raise ValueError(
                f"the checkpoint of step {known['step']} belongs to another {name} plan: "
                f"{WHAT_TO_DO}"
            )


def progress_of(known: Mapping, plans: Plans) -> Progress:
    """Where the run of a digest stands."""
    decided = np.isin(np.arange(known["step"] if plans.echo.online else 0), known["decided"])
    return loop.resumed(plans, known["step"], tuple(decided.tolist()))


def export(folder: str, model) -> None:
    """Writes a model as FOLDER/model: a tree that orbax restores by itself.

    orbax.checkpoint.StandardCheckpointer().restore(os.path.abspath("FOLDER/model"))
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(os.path.join(folder, "model")), model, force=True)
