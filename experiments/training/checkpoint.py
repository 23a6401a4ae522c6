"""Checkpoints of whole runs: orbax writes them asynchronously, atomically, from all processes."""

import contextlib
import os
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from experiments.training import loop
from experiments.training.config import Plans
from experiments.training.loop import Progress
from experiments.training.step import TrainState

KEPT = 2


class Evaluation(NamedTuple):
    """What is carried from evaluation to evaluation, besides the state."""

    step: int = 0
    rounds: int = 0
    seconds: float = 0.0  # of training, without evaluations, checkpoints and compilation
    batch_loss: float = float("nan")


@contextlib.contextmanager
def opened(folder: str) -> Iterator:
    """The checkpoints of a folder; at the end, those being written are waited for."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=True)
    with ocp.CheckpointManager(os.path.abspath(folder), options=options) as manager:
        yield manager


def latest(folder: str) -> int:
    """The step of the newest checkpoint of a folder; 0 where there is none."""
    if not os.path.isdir(folder):
        return 0
    whole = [int(name) for name in os.listdir(folder) if name.isdigit()]
    return max(whole, default=0)


def save(manager, plans: Plans, at: Progress, state: TrainState, seen: Evaluation) -> None:
    """Starts to write the state and where it stands; returns when it has been copied.

    A checkpoint that is there already is left as it is.
    """
    import orbax.checkpoint as ocp

    if manager.latest_step() == at.step:
        return
    position = {
        "decided": np.flatnonzero(at.decided).tolist(),
        "evaluation": seen._asdict(),
        "plans": plans.digests(),
    }
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position)
    )
    manager.save(at.step, args=args)


def restore(manager, plans: Plans, start: TrainState) -> tuple[Progress, TrainState, Evaluation]:
    """The last whole checkpoint; the start where there is none.

    Args:
      plans: of this run, which must be those of the checkpoint.
      start: the state of a run that begins: its shapes, and where its arrays live.

    Raises:
      ValueError: for a checkpoint of a run with other plans.
    """
    import orbax.checkpoint as ocp

    step = manager.latest_step()
    if step is None:
        return Progress(), start, Evaluation()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), start
    )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(like), position=ocp.args.JsonRestore())
    found = manager.restore(step, args=args)
    position = found["position"]
    for name, digest in plans.digests().items():
        if position["plans"].get(name) != digest:
            raise ValueError(
                f"the checkpoint of step {step} belongs to another {name} plan: give the command "
                "that made it, choose another --output_dir, or pass --overwrite."
            )
    decided = np.isin(np.arange(step if plans.echo.online else 0), position["decided"])
    at = loop.resumed(plans, step, tuple(decided.tolist()))
    return at, found["state"], Evaluation(**position["evaluation"])


def export(folder: str, model) -> None:
    """Writes a model as FOLDER/model: a tree that orbax restores by itself.

    orbax.checkpoint.StandardCheckpointer().restore(os.path.abspath("FOLDER/model"))
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(os.path.join(folder, "model")), model, force=True)
