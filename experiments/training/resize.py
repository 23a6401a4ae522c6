"""A run goes on with other workers than its newest checkpoint has: `train --elastic`.

The state changes in memory, and is saved when the run would save anyway. A kill before that leaves
the old checkpoint, of which the same command makes the same again. All changes so far stand in the
settings, as "elastic", and so in every checkpoint, which is what counts.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np

import local_opt.resize
import ordering.resize
from experiments.cluster import files, processes
from experiments.tasks.base import Recipe, Task
from experiments.training import checkpoint, config, program, timeline
from experiments.training.config import Plans, Sizes
from experiments.training.loop import Progress
from experiments.training.step import TrainState, Worker, worker_of

NAME = "elastic"  # of the flag, and of the changes in settings
SPLIT = ("workers", "units_per_step")
MAY_DIFFER = {NAME, *SPLIT}


class Request(NamedTuple):
    """What is asked of a folder, beside what it holds.

    Fields:
      known: the digest of its newest whole checkpoint; None: there is none.
      settings: of this call, with all changes so far.
      splits: (W, B) that the run began with, of the checkpoint, and asked for.
      policy: as of `local_opt.resize`; None: the checkpoint is as it is asked for.
    """

    folder: str
    known: dict | None
    settings: dict
    splits: list[tuple[int, int]]
    policy: str | None = None

    def began(self, recipe: Recipe) -> Recipe:
        """The recipe that the run began with, which says what its units are."""
        return recipe._replace(**dict(zip(SPLIT, self.splits[0], strict=True)))


def asked(folder: str, settings: Mapping, *, policy: str | None, overwrite: bool) -> Request:
    """What a folder's run is asked to be. A collective; settles the checkpoints.

    Raises:
      ValueError: where the newest checkpoint has other workers, and no policy says that it may.
    """
    settings = json.loads(json.dumps(dict(settings)))
    now, checkpoints = _split_of(settings), os.path.join(folder, "checkpoints")
    step = 0 if overwrite else checkpoint.settled(checkpoints)
    if not step:
        return Request(folder, None, settings, [now, now, now])
    known = checkpoint.read_digest(os.path.join(checkpoints, str(step)))
    held, changes = known["about"], known["about"].get(NAME, [])
    settings |= {NAME: changes} if changes else {}
    differs = _differing(held, settings)
    if not differs or not differs <= MAY_DIFFER:
        policy, before = None, now  # whoever opens the folder says what else differs
    elif policy is None:
        raise ValueError(
            f"{folder!r} holds a run with other settings "
            f"({', '.join(files.differences(held, settings))}): choose another --output_dir, or "
            "pass --overwrite to forget that run; to go on with other workers pass "
            f"--{NAME}={' or '.join(local_opt.resize.POLICIES)}."
        )
    else:
        before = _split_of(held)
    first = tuple(changes[0][name][0] for name in SPLIT) if changes else before
    return Request(folder, known, settings, [first, before, now], policy)


def _split_of(settings: Mapping) -> tuple[int, int]:
    return tuple(settings[name] for name in SPLIT)


def _differing(before: Mapping, now: Mapping) -> set[str]:
    """Names of settings."""
    return {k for k in before | now if before.get(k) != now.get(k)}


def sizes_of(task: Task, recipe: Recipe, request: Request, *, deals: str | None) -> list[Sizes]:
    """Of the run where it was saved, and as it goes on: of the units that it began with.

    Raises:
      ValueError: where these do not fit the workers, or steps would have other units.
    """
    sizes = config.sizes_of(task, request.began(recipe), deals=deals)
    first, *splits = request.splits
    return [divided(sizes, first, split) for split in splits]


def divided(sizes: Sizes, first: tuple[int, int], split: tuple[int, int]) -> Sizes:
    """The same units for (W', B') that were those of (W, B)."""
    if first == split:
        return sizes
    (workers, each), (units, step) = split, (sizes.workers * sizes.num_units, math.prod(first))
    fit = [w for w in range(1, step + 1) if not step % w and not units % w]
    if workers not in fit or workers * each != step:
        choices = [workers] if workers in fit else fit
        told = ", ".join(f"--workers={w} --units_per_step={step // w}" for w in choices)
        raise ValueError(
            f"{workers} workers with {each} units per step cannot go on with the {units} units of "
            f"this run, {step} of them in every step of all workers: pass {told}."
        )
    each = sizes.workers * sizes.units_per_step // workers  # of dealt examples, examples
    return sizes._replace(workers=workers, num_units=units // workers, units_per_step=each)


class Resumed(NamedTuple):
    """Where a run goes on.

    Fields:
      step: of its newest whole checkpoint; 0: there is none.
      settings: with all changes.
      units: int32[W, M] that every worker owns; None where these are neighbours, or dealt anew.
      begun: what that checkpoint becomes, as of `checkpoint.restore`, on the host; None: as it is.
    """

    step: int
    settings: dict
    units: np.ndarray | None = None
    begun: tuple | None = None


def resumed(
    request: Request, sizes: list[Sizes], task: Task, recipe: Recipe, row,
    rounds: Callable, plans: Plans, *, seed: int,
) -> Resumed:  # fmt: skip
    """Where the run goes on, if its newest checkpoint has other workers. A collective.

    Args:
      sizes: before and now; the others: as of `training.program.build`, and the plans of the run.

    Raises:
      ValueError: for plans that are not the run's, or a state that cannot be changed.
    """
    folder, known, settings, splits, policy = request
    if known is None:
        return Resumed(0, settings)
    path, begun = os.path.join(folder, "checkpoints", str(known["step"])), None
    units = checkpoint.read_units(path, known)
    if policy is not None:
        checkpoint.check_plans(known, plans)
        at = checkpoint.progress_of(known, plans)
        epochs = -(-plans.total_steps // sizes[0].loads_per_epoch)
        of = dict(in_turn=recipe.run == "turns", epochs=epochs)
        before, now = (worker_of(task, recipe, row, rounds, s, **of) for s in sizes)
        here = jax.sharding.SingleDeviceSharding(_host())
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            program.state_shapes(before, task.model, sizes[0].workers),
        )
        visited = visited_units(plans, sizes[1], at)
        state = checkpoint.read_state(path, like)
        state, units = _changed(state, now, sizes[0], visited, policy, units, seed)
        change = {"step": at.step, "rounds": at.rounds, "loads": at.loads, "policy": policy}
        change |= {k: [*v] for k, v in zip(SPLIT, zip(*splits[1:], strict=True), strict=True)}
        settings = settings | {NAME: [*settings.get(NAME, []), change]}
        begun = at, state, checkpoint.Evaluation(**known["evaluation"])
        processes.say(
            f"Goes on from step {at.step} with {sizes[1].workers} workers instead of "
            f"{sizes[0].workers}: {sizes[1].num_units - visited} of {sizes[1].num_units} units of "
            f"each are left of this epoch; their optimizers' state: {policy}."
        )
    path = os.path.join(folder, "settings.json")
    if _differing(files.read_json(path, {}), settings) <= MAY_DIFFER:
        files.write_json(path, settings)
    processes.wait(f"settings of {folder}")
    return Resumed(known["step"], settings, units, begun)


def _changed(state: TrainState, worker: Worker, before: Sizes, visited: int, policy, units, seed):
    """(the state of the workers that go on, on the host, and what each owns).

    Keys of the steps' randomness are those of a run that began with as many workers.

    Args:
      worker: of those that go on; before: sizes of those that were; units: that these owned.
      visited: units of this epoch, of every worker that goes on.
    """
    sizes, own = worker.sizes, worker.sides.params == "owned"
    _, order_keys, keys = program.keys_of(seed, sizes.workers)
    if units is None and not worker.row.deals:
        units = np.arange(before.workers * before.num_units).reshape(before.workers, -1)
    params, opt_state = state.params, state.opt_state
    with jax.default_device(_host()):
        if own:
            params = local_opt.resize.mean_of(params, sizes.workers)
        fresh = program.start_of(worker, sizes.workers)(params, order_keys, keys)
        if own:
            opt_state = local_opt.resize.resize(opt_state, fresh.opt_state, sizes.workers, policy)
        orders, units = ordering.resize.resize(
            state.orders, fresh.orders, worker.order, units,
            units_per_step=before.units_per_step, visited=visited,
        )  # fmt: skip
    if units is not None and (units.reshape(-1) == np.arange(units.size)).all():
        units = None
    means = {"loss": state.stats.loss, "drift": state.stats.drift}
    stats = fresh.stats._replace(**local_opt.resize.mean_of(means, sizes.workers))
    return TrainState(params, opt_state, orders, fresh.key, stats), units


def visited_units(plans: Plans, sizes: Sizes, at: Progress) -> int:
    """Of this epoch, by every worker; 0 between two epochs."""
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


def traffic_of(changes: list[dict], sizes: Sizes, of: Callable) -> Callable[[int, int], float]:
    """`(rounds, loads) -> what a worker has sent`, where there have been other numbers of them.

    Args:
      sizes: now; of: `Sizes -> the same of a run without changes`.
    """
    first, before = (sizes.workers, sizes.units_per_step), 0.0
    for change in changes:
        splits = zip(*(change[name] for name in SPLIT), strict=True)
        one, other = (of(divided(sizes, first, split)) for split in splits)
        at = change["rounds"], change["loads"]
        before += one(*at) - other(*at)
    now = of(sizes)
    return lambda rounds, loads: before + now(rounds, loads)
