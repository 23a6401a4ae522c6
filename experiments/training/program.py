"""What is compiled of a run: it depends on neither plans, seed nor learning rate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import local_opt
import ordering
from experiments.processes import distributed
from experiments.tasks.base import Recipe, Task
from experiments.training import config, input, step
from experiments.training.config import Order, Sizes
from experiments.training.parts import Parts, ends_of, jitted, parts_of, start_of, steps_of
from experiments.training.step import TrainState
from local_opt import runners
from ordering.gradients import check_separable

AVERAGES = (local_opt.parallel_rounds, local_opt.accumulated_rounds)  # of gradients


class Program(NamedTuple):
    """Everything of a run that depends on neither plans, seed nor learning rate.

    Fields:
      sizes: of the run; sharding: of arrays with a worker axis.
      init: seed -> TrainState.
      steps: (fresh, units) -> `(state, batch, start, stop, first unit, rates) -> state`, steps
        without an event of the host between them; compiled when first called.
      ends: (sync, epoch_end) -> `(state, rate) -> state`, what follows them.
      data: what stays on the devices, in place of batches; None if batches are read.
      rest: what fills no unit of all workers, with its weights, on the devices; None without it.
      source: what is read; None if the data stay on the devices.
      orders_of: seed -> (epoch -> int32[W, M]) of orders drawn on the host; else None.
      dealt: how many units, or examples, orders are dealt from in every epoch; None: own units.
      sync_in_step: workers meet in every step, within it.
      reset: state -> state with zero stats.
      mean_params: state -> the model, on the host of every process.
    """

    sizes: Sizes
    sharding: Any
    init: Callable
    steps: Callable
    ends: Callable
    data: Any
    rest: Any
    source: input.Source | None
    orders_of: Callable | None
    dealt: int | None
    sync_in_step: bool
    reset: Callable
    mean_params: Callable


def build(
    task: Task,
    recipe: Recipe,
    row: Order,
    rounds: Callable,
    *,
    proximal: float = 0.0,
    reads: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    epochs: int | None = None,
    sizes: Sizes | None = None,
    units: np.ndarray | None = None,
) -> Program:
    """Places the data and prepares the segments.

    Args:
      task, recipe: what to train, in which setting; `recipe.run` says how workers run.
      row: of ORDERS; rounds: `(inner optimizer, axis_name=) -> local_opt.Rounds`.
      proximal: strength of the pull back to the parameters at the last load; 0 for none.
      reads: None keeps the data on the devices; "thread" or "tfdata" reads batches while the
        workers work, as sources that fit nowhere always are (by a thread).
      mesh: one device per worker, of one or several processes; None runs all on one device.
      epochs: that the run takes, which some orders need to know; the recipe's if unset.
      sizes: of a run that began with other workers; None: the recipe's.
      units: int32[W, M], the units that each worker owns; None: neighbours, or all are dealt.

    Raises:
      ValueError: if the data are too few, the loss mixes examples that are to be units, or workers
        in turn would need each other in a step.
    """
    sizes = sizes or config.sizes_of(task, recipe, deals=row.deals)
    if sizes.unit_size == 1 and row.deals != config.EXAMPLES:
        check_units(task, observed=row.observes and sizes.units_per_step > 1)
    if reads is None and not isinstance(task.train, dict):
        reads = "thread"
    turns = mesh is None and recipe.run == "turns"
    if turns and row.coordinated:
        raise ValueError(
            f"{row.label} coordinates workers in every step, and workers in turn cannot: pass "
            "--run=vmap or --run=mesh."
        )
    rounds = rounds_of(recipe, rounds)
    parts = parts_of(task, recipe, row, rounds, sizes, proximal=proximal, mesh=mesh, epochs=epochs)
    run = runners.simulate if mesh is None else runners.over_mesh(mesh)
    total = config.size_of(task.train) // sizes.unit_size if row.deals else None
    data, source = None, None
    if reads is None:
        data = _place_data(task.train, sizes, units, row, mesh)
    else:
        owned = distributed.own_workers(mesh, sizes.workers)
        sharding = runners.owned_sharding(mesh)
        source = input.Source(task.train, sizes, total, owned, sharding, reads, units)
    orders_of = _orders_of(parts, config.size_of(task.train)) if row.on_host else None
    reset = jitted(
        lambda state: state._replace(stats=step.zero_stats(skips=parts.skips)),
        run, parts.owned, parts.owned,
    )  # fmt: skip
    return Program(
        sizes=sizes,
        sharding=runners.owned_sharding(mesh),
        init=_initial(task.model, parts, orders_of, run, mesh),
        steps=steps_of(parts, runners.in_turn if turns else run, bool(reads)),
        ends=ends_of(parts, run),
        data=data,
        rest=_place_rest(task, parts, mesh, averages=rounds in AVERAGES),
        source=source,
        orders_of=orders_of,
        dealt=sizes.workers * sizes.num_units if row.deals == config.UNITS else total,
        sync_in_step=not parts.owned[0],
        reset=reset,
        mean_params=_mean_params(parts),
    )


def rounds_of(recipe: Recipe, rounds: Callable) -> Callable:
    """What workers in turn can do: the same, with the mean at a sync."""
    if recipe.run == "turns" and rounds is local_opt.parallel_rounds:
        return local_opt.accumulated_rounds
    return rounds


def check_units(task: Task, observed: bool) -> None:
    """Units of one example need losses of single examples."""
    if task.model.statistics is not None:
        raise ValueError(
            f"the model of {task.name} normalises over batches, so one example is no unit: pass "
            "--unit_size=2 or more, or choose another --model."
        )
    if observed:
        few = jax.tree.map(jnp.asarray, ordering.input.reader(task.train)[1](np.arange(3)))
        params = task.model.init(jax.random.key(0))
        check_separable(task.model.loss, params, few, jax.random.key(0))


def _place_data(train, sizes, units, row, mesh):
    if row.deals:
        shared = runners.shared_sharding(mesh) if mesh else None
        return distributed.place(input.pool(train, sizes), shared)
    return distributed.place(input.partition(train, sizes, units), runners.owned_sharding(mesh))


def _place_rest(task, parts: Parts, mesh, *, averages: bool):
    sizes = parts.sizes
    if not sizes.rest:
        return None
    if task.model.statistics is not None:
        raise ValueError(
            f"the model of {task.name} normalises over batches, and --rest=keep makes one that is "
            "padded: pass --rest=drop, or choose another --model."
        )
    rest = input.rest_of(task.train, sizes, shared=averages)
    return distributed.place(rest, runners.owned_sharding(mesh))


def keys_of(seed: int, workers: int):
    """(of the parameters, of the workers' orders, of the workers' steps)."""
    key = jax.random.key(seed)
    orders, steps = (jax.random.split(jax.random.fold_in(key, part), workers) for part in (1, 2))
    return jax.random.fold_in(key, 0), orders, steps


def _initial(model, parts: Parts, orders_of, run, mesh) -> Callable:
    workers, (own, *_) = parts.sizes.workers, parts.owned
    model_init = jax.jit(model.init)
    started = jax.jit(start_of(parts, run))
    owned_sharding = runners.owned_sharding(mesh)

    def init(seed: int) -> TrainState:
        """One seed gives all orders the same parameters and first orders."""
        params_key, order_keys, keys = keys_of(seed, workers)
        params = jax.device_get(model_init(params_key))
        if own:
            params = jax.tree.map(lambda p: np.broadcast_to(p, (workers, *np.shape(p))), params)
        shared = runners.shared_sharding(mesh) if mesh else None
        params = distributed.place(params, owned_sharding if own else shared)
        given = orders_of(seed)(0) if orders_of else None
        own_rows = distributed.place((order_keys, given, keys), owned_sharding)
        state = TrainState(*started(params, *own_rows))
        # Committed, as a restored state is: what the steps are compiled for depends on it.
        return jax.device_put(state, jax.devices()[0]) if mesh is None else state

    return init


def _orders_of(parts: Parts, num_examples: int) -> Callable:
    """seed -> (epoch -> int32[W, M]), for an order that is drawn on the host."""
    sizes = parts.sizes

    def orders_of(seed: int) -> Callable:
        _, order_keys, _ = keys_of(seed, sizes.workers)
        first = jax.vmap(lambda key: ordering.base.first_order(key, sizes.num_units))(order_keys)
        return parts.row.on_host(seed, np.asarray(first), sizes, num_examples)

    return orders_of


def _mean_params(parts: Parts) -> Callable:
    if not parts.owned[0]:
        return lambda state: distributed.on_host(state.params)
    average = jax.jit(local_opt.consolidate)
    return lambda state: distributed.on_host(average(state.params))
