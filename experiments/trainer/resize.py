"""A run goes on with other workers than its newest checkpoint has: `train --elastic`.

The state changes in memory, and is saved when the run would save anyway. A kill before that leaves
the old checkpoint, of which the same command makes the same again. A checkpoint says whose sizes
and settings it has, which is what counts.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

import local_opt.resize
import ordering
from experiments import files
from experiments.data.base import Recipe, Task
from experiments.distributed import processes
from experiments.trainer import checkpoint, config, program, timeline
from experiments.trainer.config import Plans, Sizes
from experiments.trainer.loop import Progress
from experiments.trainer.step import TrainState, Worker
from syncopate.refusals import UserError

SPLIT = {"workers", "units_per_step"}  # settings that may differ


class Saved(NamedTuple):
    """The newest checkpoint of a run that goes on."""

    folder: str  # of the run
    settings: Mapping  # of the call that goes on
    metadata: Mapping  # of the checkpoint's run


def newest(
    folder: str, settings: Mapping, policy: str | None, recorded: Sequence[int] | None = None
) -> Saved | None:
    """A folder's newest checkpoint, or None. A collective; settles them.

    Without a policy, as of `local_opt.resize`, there may be no other number of workers.
    """
    checkpoints = os.path.join(folder, "checkpoints")
    step = checkpoint.reconcile(checkpoints, recorded)
    if not step:
        return None
    metadata = checkpoint.read_metadata(os.path.join(checkpoints, str(step)))
    differ = _differing(metadata["about"], settings)
    if differ and (policy is None or not differ <= SPLIT):
        differences = ", ".join(files.differences(metadata["about"], settings))
        choices = " or ".join(local_opt.resize.POLICIES)
        resize = f"; to go on with other workers pass --elastic={choices}"
        raise UserError(
            f"{folder!r} holds a run with other settings ({differences}): choose another "
            "--output_dir, or pass --overwrite to forget that run"
            f"{resize if differ <= SPLIT else ''}."
        )
    return Saved(folder, settings, metadata)


def _differing(before: Mapping, now: Mapping) -> set[str]:
    """Names of settings."""
    return {text.partition(":")[0] for text in files.differences(before, now)}


def sizes_of(task: Task, recipe: Recipe, saved: Saved | None, *, deals: str | None) -> Sizes:
    """The sizes of a run: the recipe's, or the checkpoint's units for the recipe's workers."""
    if saved is None:
        return config.sizes_of(task, recipe, deals=deals)
    sizes, workers = Sizes(*saved.metadata["sizes"]), recipe.workers
    each = recipe.unit_size // sizes.unit_size  # of dealt examples, examples
    units, together = sizes.workers * sizes.num_units, sizes.workers * sizes.units_per_step
    step = together // each
    fit = [w for w in range(1, step + 1) if not step % w and not units % w]
    if workers not in fit or workers * recipe.units_per_step != step:
        choices = [workers] if workers in fit else fit
        options = ", ".join(f"--workers={w} --units_per_step={step // w}" for w in choices)
        raise UserError(
            f"{workers} workers with {recipe.units_per_step} units per step cannot go on with the "
            f"{units} units of this run, {step} of them in every step of all workers: pass "
            f"{options}."
        )
    changed = {"num_units": units // workers, "units_per_step": together // workers}
    return sizes._replace(workers=workers, **changed)


def begun(
    saved: Saved,
    worker_of: Callable[[Sizes], Worker],
    plans: Plans,
    sizes: Sizes,
    *,
    policy: str,
    seed: int,
    traffic: Callable,
) -> tuple:
    """(where the run goes on, on the host; the units that workers own).

    None for the first, where the checkpoint has as many workers. A collective.

    Args:
      worker_of: a worker of the run at some sizes; plans, sizes: of now.
      traffic: (sizes, whether workers meet in steps) -> `(rounds, loads) -> all-reduces`.
    """
    folder, settings, metadata = saved
    before, begun_at = Sizes(*metadata["sizes"]), None
    units = None if metadata["units"] is None else np.array(metadata["units"], np.int32)
    if before != sizes:
        at = checkpoint.progress_of(metadata, plans)
        old, new = map(worker_of, (before, sizes))
        visited = visited_units(plans, sizes, at)
        shapes = program.state_shapes(old, before.workers)
        here = jax.sharding.SingleDeviceSharding(_host())
        path = os.path.join(folder, "checkpoints", str(at.step))
        state = checkpoint.read_state(path, shapes, here)
        state, units = _changed(state, new, before, visited, policy, units, seed)
        seen = checkpoint.Evaluation(**metadata["evaluation"])
        one, other = (traffic(s, new.rounds.in_step)(at.rounds, at.loads) for s in (before, sizes))
        seen = seen._replace(more_sent=seen.more_sent + one - other)
        begun_at = checkpoint.Begun(at, state, seen)
        processes.say(
            f"Continues from step {at.step} with {sizes.workers} workers instead of "
            f"{before.workers}: {sizes.num_units - visited} of {sizes.num_units} units of each are "
            f"left of this epoch; their optimizers' state: {policy}."
        )
    path = os.path.join(folder, "settings.json")
    if _differing(files.read_json(path, {}), settings) <= SPLIT:
        files.write_json(path, settings)
    processes.wait(f"settings of {folder}")
    return begun_at, units


def _changed(state: TrainState, worker: Worker, before: Sizes, visited: int, policy, units, seed):
    """(the state of the new workers, on the host, and the units of each).

    Keys of the steps' randomness are those of a run that began with as many workers.
    """
    sizes, per_worker = worker.sizes, worker.sides.params == "worker"
    if units is None and not worker.row.deals:
        units = np.arange(before.workers * before.num_units).reshape(before.workers, -1)
    params, opt_state, shared = state.params, state.opt_state, (state.averages, state.scale)
    with jax.default_device(_host()):
        if per_worker:
            params, shared = local_opt.resize.mean_of((params, shared), sizes.workers)
        fresh = program.start_of(worker, sizes.workers)(params, config.seed_of(seed))
        if per_worker:
            opt_state = local_opt.resize.resize(opt_state, fresh.opt_state, sizes.workers, policy)
        orders, units = ordering.resize(
            state.orders,
            fresh.orders,
            worker.order,
            units,
            units_per_step=before.units_per_step,
            visited=visited,
        )
    if units is not None and (units.reshape(-1) == np.arange(units.size)).all():
        units = None
    sums = local_opt.resize.mean_of(state.stats.sums, sizes.workers)
    stats = fresh.stats._replace(sums=sums)
    return TrainState(params, opt_state, orders, fresh.key, stats, *shared), units


def visited_units(plans: Plans, sizes: Sizes, at: Progress) -> int:
    """How many units of this epoch each worker has visited; 0 between two epochs."""
    if not at.loads:
        return 0
    if not plans.echo.online and timeline.timeline(plans, sizes).epoch_end[at.step - 1]:
        return 0
    place = (at.loads - 1) % sizes.loads_per_epoch + 1
    return min(place * sizes.units_per_step, sizes.num_units)


def _host():
    """A device with the host's memory, where there is one: the state of all workers must fit."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return jax.local_devices()[0]
