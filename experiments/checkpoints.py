"""Checkpoints of whole runs: orbax writes them asynchronously, atomically, from all processes."""

import contextlib
import hashlib
import os
from collections.abc import Iterator

import jax
import numpy as np

import local_opt
from experiments.loop import At, Look, Plans, resumed
from experiments.processes import on_host
from experiments.whole import State

KEPT = 2


@contextlib.contextmanager
def opened(folder: str) -> Iterator:
    """The checkpoints of an output folder; at the end, those being written are waited for."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=True)
    path = os.path.abspath(os.path.join(folder, "checkpoints"))
    with ocp.CheckpointManager(path, options=options) as manager:
        yield manager


def save(manager, plans: Plans, at: At, state: State, seen: Look) -> None:
    """Starts to write the state and where it stands; returns when it has been copied.

    A checkpoint that is there already is left as it is.
    """
    import orbax.checkpoint as ocp

    if manager.latest_step() == at.step:
        return
    position = {
        "decided": np.flatnonzero(at.decided).tolist(),
        "look": seen._asdict(),
        "plans": _digests(plans),
    }
    args = ocp.args.Composite(
        state=ocp.args.StandardSave(state), position=ocp.args.JsonSave(position)
    )
    manager.save(at.step, args=args)


def restore(manager, plans: Plans, start: State) -> tuple[At, State, Look]:
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
        return At(), start, Look()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), start
    )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(like), position=ocp.args.JsonRestore())
    found = manager.restore(step, args=args)
    position = found["position"]
    for name, digest in _digests(plans).items():
        if position["plans"].get(name) != digest:
            raise ValueError(
                f"the checkpoint of step {step} belongs to another {name} plan: give the command "
                "that made it, choose another --output_dir, or pass --overwrite."
            )
    decided = np.isin(np.arange(step if plans.timed else 0), position["decided"])
    return resumed(plans, step, tuple(decided)), found["state"], Look(**position["look"])


def export(folder: str, params) -> None:
    """Writes the mean over the workers as FOLDER/model: a tree that orbax restores by itself.

    orbax.checkpoint.StandardCheckpointer().restore(os.path.abspath("FOLDER/model"))
    """
    import orbax.checkpoint as ocp

    model = on_host(jax.jit(local_opt.consolidate)(params))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(os.path.abspath(os.path.join(folder, "model")), model, force=True)


def _digests(plans: Plans) -> dict:
    """Hashes of what is decided before the run."""
    echo = plans.echo.digest() if not plans.echo.online else "measured"
    rates = hashlib.sha256(np.asarray(plans.rates, "<f4").tobytes()).hexdigest()
    return {"sync": plans.sync.digest(), "echo": echo, "learning rate": rates}
