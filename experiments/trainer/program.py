"""The compiled parts of a run. They do not depend on its plans, seed or learning rate."""

import concurrent.futures
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import local_opt
import ordering
from experiments.data.base import Recipe, Task
from experiments.distributed import processes
from experiments.distributed.devices import replicated_sharding, worker_sharding
from experiments.trainer import config, pipeline, step, timeline
from experiments.trainer.config import Plans, Sizes, seed_of
from experiments.trainer.step import TrainState, Worker
from ordering.gradients.examples import check_separable
from syncopate.mesh import platform
from syncopate.refusals import UserError


class Program(NamedTuple):
    """The part of a run that does not depend on its plans, seed or learning rate."""

    worker: Worker
    sharding: Any  # of arrays with a worker axis
    init: Callable  # seed -> TrainState
    shapes: TrainState  # which say where a state lies
    # (fresh, units) -> (state, batch, start, stop, first unit, rates) -> state: steps without an
    # event on the host between them; compiled when first called.
    steps: Callable
    sync: Callable  # (state, rate, at) -> state, as of `optimizers.inner`
    epoch_end: Callable  # state -> state
    reset: Callable  # stats -> those of a start
    data: Any  # on the devices, instead of batches; None if batches are read
    source: pipeline.Source | None  # what is read; None if the data stay on the devices

    @property
    def sizes(self) -> Sizes:
        return self.worker.sizes

    @property
    def sync_in_step(self) -> bool:
        """Whether workers synchronise within every step."""
        return self.worker.rounds.in_step


def build(
    task: Task,
    recipe: Recipe,
    row,
    rounds: Callable,
    *,
    reads: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Program:
    """Places the data and prepares the segments.

    Args:
      row: of ORDERS; rounds: `(inner optimizer, axis_name=) -> local_opt.Rounds`.
      reads: None keeps arrays on the devices; "thread" or "tfdata" reads batches in the background.
        Sources are always read, by a thread unless "tfdata" is given.
      mesh: one device per worker, in one or several processes; None runs all on one device.
    """
    sizes = config.sizes_of(task, recipe, deals=row.deals)
    if sizes.unit_size == 1 and row.deals != config.EXAMPLES:
        check_units(task, observed=row.observes and sizes.units_per_step > 1)
    if reads is None and not isinstance(task.train, dict):
        reads = "thread"
    turns = mesh is None and recipe.run == "turns"
    if turns and row.coordinated:
        raise UserError(
            f"{row.label} coordinates workers in every step, and workers in turn cannot: pass "
            "--run=vmap or --run=mesh."
        )
    train = task.train
    if row.recut:
        train, reads = _recut(task, row), reads or "thread"
    worker = step.worker_of(task, recipe, row, rounds, sizes, in_turn=turns)
    over = mesh or sizes.workers
    data, source = None, None
    if reads is None:
        if row.deals:
            data, where = pipeline.pool(task.train, sizes), replicated_sharding(mesh)
        else:
            data, where = pipeline.partition(task.train, sizes), worker_sharding(mesh)
        data = pipeline.place(data, where)
    else:
        numbers = pipeline.workers_here(mesh, sizes.workers)
        place, examples = worker_sharding(mesh), pipeline.examples_of_workers(task.train, sizes)
        source = pipeline.Source(train, sizes, numbers, place, reads, examples)
    same = 2 * ("replicated",)  # the rate, and the place
    of_all = functools.partial(local_opt.map_workers, in_specs="worker", out_specs="worker")
    return Program(
        worker=worker,
        sharding=worker_sharding(mesh),
        init=_initial(worker, mesh),
        shapes=state_shapes(worker, over, places=_places(mesh)),
        steps=steps_of(worker, over, reads=bool(reads), in_turn=turns),
        sync=mapped(worker, over, step.sync_of(worker), *same),
        epoch_end=mapped(worker, over, step.epoch_end_of(worker)),
        # It lies where the stats lay: otherwise the steps compile again.
        reset=jax.jit(of_all(lambda stats: step.zero_stats(worker), over), keep_unused=True),
        data=data,
        source=source,
    )


def _recut(task: Task, row):
    if task.recut is None:
        raise UserError(
            f"{row.label} cuts a text anew in every epoch, and {task.name} has none in memory with "
            f"known documents: pass --task=wikitext2, or leave +{row.recut} out."
        )
    return task.recut.by(row.recut)


def mapped(worker: Worker, over, function: Callable, *more: str, in_turn=False) -> Callable:
    """Compiles `(state, ...) -> state` of all workers from that of one worker.

    Args:
      over: a number of workers, or their mesh; more: words of `local_opt.map_workers` for the
        arguments after the state.
    """
    sides = worker.sides
    specs = {"in_specs": (sides, *more), "out_specs": sides}
    of_all = local_opt.map_workers(function, over, **specs, in_turn=in_turn)
    return jax.jit(of_all, donate_argnums=0)


def steps_of(worker: Worker, over, *, reads: bool, in_turn=False) -> Callable:
    """(fresh, units) -> the compiled steps of a segment, all in one loop."""
    take = (lambda batch, units: batch) if reads else pipeline.take_units
    of_batch = "replicated" if worker.row.deals and not reads else "worker"

    def compiled(fresh: bool, size: int):
        steps = step.segment(worker, take, fresh=fresh, size=size)
        words = (of_batch, *["replicated"] * 4)  # the batch, start, stop, first unit, rates
        return mapped(worker, over, steps, *words, in_turn=in_turn)

    return functools.cache(compiled)


def start_of(worker: Worker, over) -> Callable:
    """`(params, seed) -> TrainState` of all workers."""

    def start(params, order_key, key):
        like = params if worker.sketch is None else jnp.zeros(worker.sketch)
        orders, opt_state = worker.order.init(order_key, like), worker.rounds.init(params)
        means = worker.averages.init(params)
        scale = worker.scale(opt_state, params) if worker.scale else ()
        stats = step.zero_stats(worker)
        return TrainState(params, opt_state, orders, key, stats, means, scale)

    words = (worker.sides.params, "worker", "worker")
    started = local_opt.map_workers(start, over, in_specs=words, out_specs=worker.sides)
    # Called once in a run: on a CPU its optimisation takes half of its compilation.
    options = {"xla_backend_optimization_level": 0} if platform() == "cpu" else None

    def of_seed(params, seed):
        return started(params, *keys_of(seed, worker.sizes.workers)[1:])

    return jax.jit(of_seed, compiler_options=options)


@functools.lru_cache(8)
def params_of(model) -> Callable:
    """`seed -> params`, compiled once for a model."""
    return jax.jit(lambda seed: model.init(keys_of(seed, 1)[0]))


def state_shapes(worker: Worker, over, *, places=None) -> TrainState:
    """The shapes of a state of all workers, with the shardings of its fields if these are given."""
    workers, places = worker.sizes.workers, places or dict.fromkeys(("worker", "replicated"))
    params = jax.eval_shape(lambda: worker.model.init(jax.random.key(0)))
    if worker.sides.params == "worker":
        wide = lambda p: jax.ShapeDtypeStruct((workers, *p.shape), p.dtype)  # noqa: E731
        params = jax.tree.map(wide, params)

    def placed(tree, side):
        struct = functools.partial(jax.ShapeDtypeStruct, sharding=places[side])
        return jax.tree.map(lambda x: struct(x.shape, x.dtype), tree)

    shapes = jax.eval_shape(start_of(worker, over), params, seed_of(0))
    return TrainState(*map(placed, shapes, worker.sides))


def _places(mesh) -> dict[str, jax.sharding.Sharding]:
    """Where a state lies: on the mesh, or on the first device, as that of `_initial`."""
    if mesh is None:
        return dict.fromkeys(("worker", "replicated"), SingleDeviceSharding(jax.devices()[0]))
    return {"worker": worker_sharding(mesh), "replicated": replicated_sharding(mesh)}


def check_units(task: Task, observed: bool) -> None:
    """Raises ValueError if units are single examples and the loss mixes examples."""
    if task.model.statistics is not None:
        raise UserError(
            f"the model of {task.name} normalises over batches, so one example is no unit: pass "
            "--unit_size=2 or more, or choose another --model."
        )
    if observed:
        few = ordering.data.as_source(task.train)[:3]
        params = params_of(task.model)(seed_of(0))
        # The key is made where the loss is compiled: alone it would be compiled, too.
        loss = lambda params, batch: task.model.loss(params, batch, jax.random.key(0))  # noqa: E731
        check_separable(loss, params, few)


def keys_of(seed, workers: int):
    """(of the parameters, of the workers' orders, of the workers' steps)."""
    key = jax.random.key(seed)
    orders, steps = (jax.random.split(jax.random.fold_in(key, part), workers) for part in (1, 2))
    return jax.random.fold_in(key, 0), orders, steps


def _initial(worker: Worker, mesh) -> Callable:
    workers, per_worker = worker.sizes.workers, worker.sides.params == "worker"
    started = start_of(worker, mesh or workers)

    def init(seed: int) -> TrainState:
        """A seed determines the parameters and first permutations, the same for all orders."""
        seed = seed_of(seed)
        params = jax.device_get(params_of(worker.model)(seed))
        if per_worker:
            params = jax.tree.map(lambda p: np.broadcast_to(p, (workers, *np.shape(p))), params)
        params = pipeline.place(
            params, worker_sharding(mesh) if per_worker else replicated_sharding(mesh)
        )
        state = started(params, seed)
        # Committed to the device, as a restored state is: otherwise the steps compile twice.
        return jax.device_put(state, jax.devices()[0]) if mesh is None else state

    return init


def warm_up(
    program: Program,
    plans: Plans,
    start: Callable[[], TrainState],
    further: Sequence[Callable] = (),
) -> TrainState:
    """`start()`, when all that the run needs is compiled, two programs at once.

    No step is run: the first call of a program finds it compiled for the same shapes.

    Args:
      start: makes or places the state, beside the compilation; further: what else is done beside
        it, as the compilation of evaluations.
    """
    with concurrent.futures.ThreadPoolExecutor(1 if processes.several() else 2) as pool:
        state = pool.submit(start)
        jobs = itertools.chain((low.compile for low in _lowered(program, plans)), further)
        list(pool.map(lambda job: job(), jobs))
        return state.result()


def _lowered(program: Program, plans: Plans) -> Iterator[jax.stages.Lowered]:
    """The programs of a run, the longest to compile first."""
    state, zero, rates = program.shapes, np.int32(0), placed_rates(program, plans)
    given = {"streams": program.source is not None, "sync_in_step": program.sync_in_step}
    kinds = timeline.kinds(plans, program.sizes, **given)
    for fresh, size in {(kind.fresh, kind.size) for kind in kinds}:
        batch = program.data
        if batch is None:
            batch = pipeline.example_batch(program.source, size)
        yield program.steps(fresh, size).lower(state, batch, zero, zero, zero, rates)
    yield program.reset.lower(state.stats)
    if any(kind.sync for kind in kinds):
        yield program.sync.lower(state, np.float32(0), np.float32(0))
    if any(kind.epoch_end for kind in kinds):
        yield program.epoch_end.lower(state)


def placed_rates(program: Program, plans: Plans) -> jax.Array:
    """float32[T] on the devices, the learning rates."""
    sharding = program.sharding and replicated_sharding(program.sharding.mesh)
    return pipeline.place(np.asarray(plans.rates, np.float32), sharding)
