"""A checkpoint of W workers becomes one of W', of the same step, before the run goes on."""

import os
import shutil
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

import local_opt.elastic
import ordering.elastic
from experiments.elastic.request import NAME, Request, keep_units, units_of
from experiments.processes import distributed
from experiments.results import records
from experiments.tasks.base import Recipe, Task
from experiments.training import checkpoint, program, timeline
from experiments.training.config import Order, Plans, Sizes
from experiments.training.loop import Progress
from experiments.training.parts import Parts, num_params, parts_of, start_of, state_shapes
from experiments.training.step import HostOrder, TrainState
from local_opt import runners

ordering.elastic.resized.register(
    HostOrder, lambda state, change: HostOrder(ordering.elastic.dealt_to(state.current, change))
)


class Run(NamedTuple):
    """What a run is, whatever its workers: as of `training.program.build`, and its seed."""

    task: Task
    recipe: Recipe
    row: Order
    rounds: Callable
    plans: Plans
    seed: int


def carried_out(
    run: Run, request: Request, sizes: list[Sizes], folder: str, policy: str | None, mesh
) -> tuple[dict, np.ndarray | None]:
    """Changes the newest checkpoint of a folder where that is asked for. A collective.

    Args:
      sizes: before and now; policy: of `local_opt.elastic`; mesh: of the workers now.

    Returns:
      (settings with all changes, int32[W', M'] of the units that every worker owns; None where
      these are neighbours, or dealt anew).

    Raises:
      ValueError: for plans that are not the run's, or a state that cannot be changed.
    """
    units = units_of(folder, request.changes, sizes[0])
    if not request.changed:
        return request.settings, units
    checkpoints = os.path.join(folder, "checkpoints")
    known, leaves = checkpoint.read_on_host(os.path.join(checkpoints, str(request.step)))
    checkpoint.check_plans(known, run.plans, request.step)
    at = checkpoint.progress_of(known, run.plans, request.step)
    before, now = _parts(run, sizes[0], request.ran), _parts(run, sizes[1], run.recipe.run)
    if before.owned != now.owned:
        raise ValueError(
            f"--run is {run.recipe.run} and was {request.ran}: workers in turn, who meet in every "
            f"step, have another state than others. Pass --run={request.ran}."
        )
    state = _typed(leaves, state_shapes(before, run.task.model))
    settings = request.settings
    if request.splits:
        visited = visited_units(run.plans, sizes[0], at)
        state, units = changed(run, state, (before, now), visited, policy, units)
        settings = settings | {NAME: [*request.changes, {
            "step": request.step,
            "rounds": at.rounds,
            "loads": at.loads,
            "workers": [request.before[0], request.now[0]],
            "units_per_step": [request.before[1], request.now[1]],
            "policy": policy,
            "units": keep_units(folder, units),
        }]}  # fmt: skip
        distributed.say(_told(run, sizes, at, visited, policy, shared=not now.owned[0]))
    placed = TrainState(*(_placed(x, mesh, own) for x, own in zip(state, now.owned, strict=True)))
    seen = checkpoint.Evaluation(**known["evaluation"])
    replace(checkpoints, run.plans, at, placed, seen, dealt=known["dealt"], about=settings)
    records.write_json(os.path.join(folder, "settings.json"), settings)
    distributed.wait(f"changed {folder}")
    return settings, units_of(folder, settings.get(NAME, []), sizes[1])


def changed(run: Run, state: TrainState, parts: tuple[Parts, Parts], visited, policy, units):
    """(the state of the workers that go on, what each owns).

    Keys of the steps' randomness are those of a run that began with as many workers.

    Args:
      state: on the host; parts: of the workers before and now; visited: units of this epoch, of
        every worker before; units: that each owned; None: neighbours.
    """
    before, now = parts
    workers, sizes = now.sizes.workers, (before.sizes, now.sizes)
    own = now.owned[0]
    params = local_opt.elastic.mean_of(state.params, workers) if own else state.params
    with jax.default_device(checkpoint.host()):
        fresh = _fresh(now, params, run.seed)
        orders = state.orders
        if run.row.observes:
            orders = jax.jit(jax.vmap(before.order.sync, axis_name=runners.AXIS))(orders)
        if units is None and not run.row.deals:
            count = sizes[0].workers * sizes[0].num_units
            units = np.arange(count, dtype=np.int32).reshape(sizes[0].workers, -1)
        change = ordering.elastic.Change(
            workers,
            (sizes[0].units_per_step, sizes[1].units_per_step),
            visited,
            now.order,
            fresh.orders,
            run.row.coordinated,
            now.sketch or num_params(run.task.model),
        )
        orders, units = ordering.elastic.resize(orders, change, units, axis_name=runners.AXIS)
    opt_state = state.opt_state
    if own:
        change = local_opt.elastic.Change(workers, policy, fresh.opt_state)
        opt_state = local_opt.elastic.resized(opt_state, change)
    stats = _stats(state.stats, fresh.stats, workers)
    return TrainState(params, opt_state, orders, fresh.key, stats), units


def replace(folder: str, plans: Plans, at: Progress, state: TrainState, seen, **known) -> None:
    """Writes a checkpoint in the place of that of the same step, which stays until it is whole.

    Args:
      as of `checkpoint.save`. A collective.
    """
    aside, path = f"{folder}.new", os.path.join(folder, str(at.step))
    if distributed.is_first():
        shutil.rmtree(aside, ignore_errors=True)
    distributed.wait(f"replace {path}")
    with checkpoint.opened(aside) as manager:
        checkpoint.save(manager, plans, at, state, seen, **known)
    if distributed.is_first():
        os.rename(path, path + checkpoint.BEFORE)
        os.rename(os.path.join(aside, str(at.step)), path)
        checkpoint.end_replacing(folder)
        shutil.rmtree(aside)
    distributed.wait(f"replaced {path}")


def visited_units(plans: Plans, sizes: Sizes, at: Progress) -> int:
    """Of this epoch, by every worker; 0 between two epochs."""
    if not at.loads:
        return 0
    if not plans.echo.online and timeline.timeline(plans, sizes).epoch_end[at.step - 1]:
        return 0
    place = (at.loads - 1) % sizes.loads_per_epoch + 1
    return min(place * sizes.units_per_step, sizes.num_units)


def _parts(run: Run, sizes: Sizes, how: str) -> Parts:
    """What decides on shapes and first states; devices do not."""
    epochs = -(-run.plans.total_steps // sizes.loads_per_epoch)
    rounds = program.rounds_of(run.recipe._replace(run=how), run.rounds)
    return parts_of(run.task, run.recipe, run.row, rounds, sizes, epochs=epochs)


def _typed(leaves, like: TrainState) -> TrainState:
    """What orbax has read, in the tree that it was; in NumPy but for keys."""
    named = jax.tree_util.tree_leaves_with_path(leaves)
    found = {jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in named}

    def leaf(path, shape):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        x = found.get(name)
        if x is None or (x.shape, x.dtype) != (shape.shape, shape.dtype):
            raise ValueError(
                f"{name} is {x.dtype if x is not None else None}"
                f"{list(getattr(x, 'shape', ()))} in the checkpoint and {shape.dtype}"
                f"{[*shape.shape]} in this program: go on by the code that wrote it."
            )
        return x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)

    return jax.tree_util.tree_map_with_path(leaf, like)


def _fresh(parts: Parts, params, seed: int) -> TrainState:
    """A first state at these parameters."""
    sizes = parts.sizes
    _, order_keys, keys = program.keys_of(seed, sizes.workers)
    given = np.zeros((sizes.workers, sizes.num_units), np.int32) if parts.row.on_host else None
    started = jax.jit(start_of(parts, runners.simulate))
    return TrainState(*started(params, order_keys, given, keys))


def _stats(stats, fresh, workers: int):
    """What workers have seen since the last evaluation, as if as many of them had."""
    means = {"loss": stats.loss, "drift": stats.drift}
    new = fresh._replace(**local_opt.elastic.mean_of(means, workers))
    if stats.skipped is None:
        return new
    skipped = np.zeros((workers, 2), np.int32)  # losses are divided by the workers
    skipped[0] = stats.skipped.sum(axis=0) * [1, workers / len(stats.skipped)]
    return new._replace(skipped=skipped)


def _placed(tree, mesh, own: bool):
    if mesh is None:
        return jax.device_put(tree, jax.devices()[0])
    sharding = runners.owned_sharding(mesh) if own else runners.shared_sharding(mesh)
    return distributed.place(tree, sharding)


def _told(run: Run, sizes, at: Progress, visited: int, policy: str, *, shared: bool) -> str:
    before, now = sizes
    total, per_epoch = before.workers * before.num_units, before.loads_per_epoch
    epoch = (at.loads - 1 if visited else at.loads) // per_epoch + 1
    state = "parameters and optimizer state are of all workers, and stay"
    if not shared:
        state = f"parameters are the workers' mean; optimizer state: {policy}"
    return (
        f"Goes on from step {at.step} with {now.workers} workers instead of {before.workers}: "
        f"{total - before.workers * visited} of {total} units of epoch {epoch} are left, dealt "
        f"anew; {state}."
    )
