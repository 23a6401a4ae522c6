"""The one training loop: workers, an order, an optimizer, and what is recorded on the way."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ordering
from experiments import evaluate, finite, metrics, optimizers, processes, steps, streaming
from experiments.methods import Method, Setting
from experiments.partition import partition, partition_shapes
from experiments.tasks import Recipe, Task
from local_opt import runners


def optimizer(recipe: Recipe, rate: float, steps_per_epoch: int) -> optax.GradientTransformation:
    """The recipe's optimizer and schedule, its peak learning rate part of its state."""
    shape = optimizers.shape(
        recipe.schedule,
        total_steps=recipe.epochs * steps_per_epoch,
        decay_steps=recipe.decay_every * steps_per_epoch,
        decay_factor=recipe.decay_factor,
    )
    return optimizers.with_shape(
        recipe.optimizer, recipe.weight_decay, recipe.momentum, rate=rate, shape=shape
    )


class Program(NamedTuple):
    """Everything of a run that does not depend on the seed: compiled once, used for all seeds."""

    data: Any  # units of the workers, leaves [W, M, unit_size, ...]; on the host if streamed
    init: Callable  # (seed, learning rate) -> (train, orders)
    epoch: Callable  # (train, orders, key, front) -> (train, orders, metrics, next front)
    bounds: Callable  # (params, orders, data) -> float32[2]
    evaluate: Callable  # params -> {"train_loss": float, "test_METRIC": float}


class Parts(NamedTuple):
    """What a step and an epoch are made of, before any data are there."""

    order: ordering.Ordering
    chunk: Callable
    init: Callable  # (seed, learning rate) -> (train, orders)
    num_units: int  # M
    shown: int  # units an order looks at at once


def parts_of(
    task: Task,
    method: Method,
    recipe: Recipe,
    run: Callable,
    simulated: bool,
    mesh: jax.sharding.Mesh | None = None,
) -> Parts:
    """The parts of a training of `task`, whose data may be shapes only.

    Raises:
      ValueError: if the data are too small for the workers.
    """
    shapes = partition_shapes(task.train, recipe.workers, recipe.unit_size)
    num_units = jax.tree.leaves(shapes)[0].shape[1]
    ordering.base.check_units_per_step(num_units, recipe.units_per_step)
    shown = min(steps.units_per_observe(recipe.units_per_step), num_units)
    block_size = simulated_block_size(task.model, recipe.workers) if simulated else None
    order = method.make(Setting(num_units, shown, recipe.workers, recipe.epochs, block_size))
    steps_per_epoch = -(-num_units // recipe.units_per_step)
    step = steps.worker_step(
        task.model.loss,
        optimizer(recipe, 0.0, steps_per_epoch),
        observes=method.observes,
        # Among simulated workers nothing travels: there the exchange is only more work.
        exchanges=method.coordinated and recipe.units_per_step == 1 and not simulated,
        mixes=task.model.statistics is not None,
    )
    chunk = steps.worker_chunk(
        step, order, units_per_step=recipe.units_per_step, observes=method.observes
    )
    init = _initial(task.model, order, recipe, steps_per_epoch, run, mesh)
    return Parts(order, chunk, init, num_units, shown)


def build(
    task: Task,
    method: Method,
    recipe: Recipe,
    *,
    streamed: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Program:
    """Places the data and compiles the epoch.

    Args:
      task, method, recipe: what to train, by which order, in which setting.
      streamed: read the training batches through tf.data instead of from the devices;
        evaluation between epochs still uses whole sets.
      mesh: a mesh with the axis "worker" and one device per worker; None simulates all workers on
        one device.

    Raises:
      ValueError: if the data is too small for the workers, or the loss mixes examples that are to
        be units of their own.
    """
    run = runners.simulate if mesh is None else runners.over_mesh(mesh)
    data = partition(task.train, recipe.workers, recipe.unit_size)
    parts = parts_of(task, method, recipe, run, simulated=mesh is None, mesh=mesh)
    if recipe.unit_size == 1:
        check_units(task, observed=method.observes and recipe.units_per_step > 1)
    sharding = runners.owned_sharding(mesh)
    if streamed:
        workers = processes.own_workers(mesh, recipe.workers)
        examples = jax.tree.map(lambda x: x[workers].reshape((-1, *x.shape[3:])), data)
        epoch = streaming.epoch(
            run,
            parts.chunk,
            parts.order,
            examples,
            sizes=(len(workers), parts.num_units, recipe.unit_size),
            shown=parts.shown,
            example=parts.init(0, recipe.learning_rates[0]),
            sharding=sharding,
            total=recipe.workers,
        )
    else:
        data = processes.place(data, sharding)
        example = (*parts.init(0, recipe.learning_rates[0]), data, jax.random.key(0))
        epoch = _resident_epoch(lowered_epoch(parts, run, example).compile(), data)
    bounds = evaluate.order_bounds(
        task.model, run, num_units=parts.num_units, units_per_step=recipe.units_per_step
    )
    if streamed and processes.several():
        data = processes.place(data, sharding)  # which the bounds look at
    return Program(data, parts.init, epoch, bounds, evaluation(task, recipe))


def check_units(task, observed):
    """Units of one example need losses of single examples."""
    if task.model.statistics is not None:
        raise ValueError(
            f"the model of {task.name} normalises over batches, so one example is no unit: pass "
            "--unit_size=2 or more, or choose another --model."
        )
    if observed:
        few = jax.tree.map(jnp.asarray, ordering.input.reader(task.train)[1](np.arange(3)))
        params = task.model.init(jax.random.key(0))
        ordering.gradients.check_separable(task.model.loss, params, few, jax.random.key(0))


def evaluation(task: Task, recipe: Recipe) -> Callable:
    """`params -> {"train_loss": float, "test_METRIC": float}` over the whole sets.

    The moments of normalisation layers are measured first, on training inputs at these parameters.
    """
    train, test = jax.device_put(task.train), jax.device_put(task.test)
    batch_size = recipe.workers * recipe.units_per_step * recipe.unit_size
    moments = evaluate.moments(task.model, task.train, batch_size)
    loss = evaluate.mean_loss(task.model)
    metric = metrics.measured(task.model, task.metric)

    def run(params):
        params = processes.local(params)
        statistics = moments(params)
        return {
            "train_loss": float(loss(params, statistics, train)),
            f"test_{task.metric}": float(metric(params, statistics, test)),
        }

    return run


def simulated_block_size(model, num_workers):
    """Reductions over simulated workers cost nothing: take what is fastest for one slice of r."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    return ordering.balance.default_block_size(-(-size // num_workers))


def _initial(model, order, recipe, steps_per_epoch, run, mesh):
    """`(seed, learning rate) -> (train, orders)`; one seed gives all methods one first order."""
    init_orders = jax.jit(
        run(
            lambda key, params: (order.init(key, params),),
            owned_in=(True, False),
            owned_out=(True,),
        )
    )

    def init(seed, rate):
        key = jax.random.key(seed)
        params = model.init(jax.random.fold_in(key, 0))
        keys = jax.random.split(jax.random.fold_in(key, 1), recipe.workers)
        keys = processes.place(keys, runners.owned_sharding(mesh))
        state = steps.init_train_state(params, optimizer(recipe, rate, steps_per_epoch))
        return state, init_orders(keys, params)[0]

    return init


def lowered_epoch(parts: Parts, run: Callable, example: tuple) -> jax.stages.Lowered:
    """The epoch over data that stay on the devices; `example` may hold shapes only."""
    epoch = steps.worker_epoch(
        parts.chunk, parts.order, num_units=parts.num_units, shown=parts.shown
    )
    mapped = run(epoch, owned_in=(False, True, True, False), owned_out=(False, True, True))
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(*example)


def _resident_epoch(compiled, data):
    def resident(train, orders, key, front=None):
        return *compiled(train, orders, data, key), None

    return resident


def train(
    recipe: Recipe,
    program: Program,
    *,
    seed: int,
    rate: float,
    optimum: float | None = None,
) -> Iterator[dict]:
    """Trains once and yields a record before the first and after every epoch.

    Seconds count training alone: compilation and evaluation are outside. The epoch is one
    asynchronous call; the host waits for it only to read the clock.

    Raises:
      FloatingPointError: at the first epoch with a loss or gradient that is not finite; names the
        step, the worker and the unit.
    """
    key = jax.random.fold_in(jax.random.key(seed), 2)
    state, orders = program.init(seed, rate)
    seconds, front = 0.0, None
    for done in range(recipe.epochs + 1):
        if done:
            first_step = int(state.step)
            jax.block_until_ready((state, orders))
            start = time.perf_counter()
            state, orders, metrics, front = program.epoch(state, orders, key, front)
            jax.block_until_ready((state, orders))
            seconds += time.perf_counter() - start
            finite.stop_if_not_finite(processes.on_host(metrics), first_step)
        found = program.evaluate(state.params)
        record = {
            "seed": seed,
            "epoch": done,
            "step": int(state.step),
            "seconds": seconds,
        } | found
        if optimum is not None:
            record["suboptimality"] = found["train_loss"] - optimum
        due = recipe.bound_every and done % recipe.bound_every == 0
        if due or (recipe.bound_every and done == recipe.epochs):
            bound = program.bounds(state.params, orders.current, program.data)
            record["bound_linf"], record["bound_l2"] = (float(b) for b in processes.on_host(bound))
        yield record


def check_recipe(recipe: Recipe) -> None:
    """Raises ValueError for a recipe that cannot run, before anything is compiled."""
    if recipe.epochs < 1:
        raise ValueError(f"epochs is {recipe.epochs}: train for at least one.")
    for rate in recipe.learning_rates:
        if not (np.isfinite(rate) and rate > 0):
            raise ValueError(f"a learning rate is {rate}: it must be positive and finite.")
    if not 0 <= recipe.momentum < 1:
        raise ValueError(f"momentum is {recipe.momentum}: it must lie in [0, 1).")
    if not recipe.weight_decay >= 0:
        raise ValueError(f"weight_decay is {recipe.weight_decay}: it must be 0 or positive.")
    if recipe.decay_every < 1 or not 0 < recipe.decay_factor <= 1:
        raise ValueError(
            f"decay_every is {recipe.decay_every} and decay_factor {recipe.decay_factor}: the rate "
            "falls after at least one epoch, by a factor in (0, 1]."
        )
    if recipe.bound_every < 0:
        raise ValueError(
            f"bound_every is {recipe.bound_every}: 0 for never, or a number of epochs."
        )
