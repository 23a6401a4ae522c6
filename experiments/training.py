"""The one training loop: workers, an order, an optimizer, and what is recorded on the way."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ordering
from experiments import evaluate, finite, steps, streaming
from experiments.methods import Method, Setting
from experiments.tasks import Recipe, Task
from local_opt import runners

# The shape of the learning rate over T steps, a factor of the peak.
SCHEDULES = {
    "constant": lambda steps: optax.constant_schedule(1.0),
    "cosine": lambda steps: optax.cosine_decay_schedule(1.0, steps),
}


def optimizer(rate: float, momentum: float, shape: Callable) -> optax.GradientTransformation:
    """SGD whose peak learning rate is part of its state: one compiled epoch serves all rates."""
    sgd = optax.inject_hyperparams(optax.sgd, static_args="momentum")(
        learning_rate=jnp.float32(rate), momentum=momentum or None
    )
    return optax.chain(sgd, optax.scale_by_schedule(shape))


class Program(NamedTuple):
    """Everything of a run that does not depend on the seed: compiled once, used for all seeds."""

    data: Any  # units of the workers, leaves [W, M, unit_size, ...]; on the host if streamed
    init: Callable  # (seed, learning rate) -> (train, orders)
    epoch: Callable  # (train, orders, key, front) -> (train, orders, metrics, next front)
    bounds: Callable  # (params, orders, data) -> float32[2]
    train_loss: Callable
    test_metric: Callable


def build(
    task: Task,
    method: Method,
    recipe: Recipe,
    *,
    schedule: str = "constant",
    streamed: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Program:
    """Places the data and compiles the epoch.

    Args:
      task, method, recipe: what to train, by which order, in which setting.
      schedule: a name of `SCHEDULES`, the shape of the learning rate over the run.
      streamed: read the training batches through tf.data instead of from the devices;
        evaluation between epochs still uses whole sets.
      mesh: a mesh with the axis "worker" and one device per worker; None simulates all workers on
        one device.

    Raises:
      ValueError: if the data is too small for the workers, the loss mixes examples that are to be
        units of their own, or the model needs moments of its training data to predict.
    """
    if task.model.statistics is not None:
        raise ValueError(
            f"the model of {task.name} normalises over batches: this loop does not measure its "
            "moments before an evaluation. Use another --model, or experiments.qsr, which does."
        )
    run = runners.simulate if mesh is None else runners.over_mesh(mesh)
    data = partition(task.train, recipe.workers, recipe.unit_size)
    num_units = jax.tree.leaves(data)[0].shape[1]
    ordering.check_units_per_step(num_units, recipe.units_per_step)
    shown = min(steps.units_per_observe(recipe.units_per_step), num_units)
    block_size = _simulated_block_size(task.model, recipe.workers) if mesh is None else None
    order = method.make(Setting(num_units, shown, recipe.workers, recipe.epochs, block_size))
    if method.observes and recipe.units_per_step > 1 and recipe.unit_size == 1:
        few = jax.tree.map(lambda x: jnp.asarray(x[:3]), task.train)
        params = task.model.init(jax.random.key(0))
        ordering.check_separable(task.model.loss, params, few, jax.random.key(0))
    steps_per_epoch = -(-num_units // recipe.units_per_step)
    shape = SCHEDULES[schedule](recipe.epochs * steps_per_epoch)
    step = steps.worker_step(
        task.model.loss,
        optimizer(0.0, recipe.momentum, shape),
        observes=method.observes,
        exchanges=method.coordinated and recipe.units_per_step == 1,
    )
    chunk = steps.worker_chunk(
        step, order, units_per_step=recipe.units_per_step, observes=method.observes
    )
    sharding = runners.owned_sharding(mesh)
    init = _initial(task.model, order, recipe, shape, run)
    if streamed:
        examples = jax.tree.map(lambda x: x.reshape((-1, *x.shape[3:])), data)
        sizes = (recipe.workers, num_units, recipe.unit_size)
        example = init(0, recipe.learning_rates[0])
        epoch = streaming.epoch(
            run,
            chunk,
            order,
            examples,
            sizes=sizes,
            shown=shown,
            example=example,
            sharding=sharding,
        )
    else:
        data = jax.device_put(data, sharding)
        example = (*init(0, recipe.learning_rates[0]), data, jax.random.key(0))
        epoch = _resident_epoch(run, chunk, order, example, num_units=num_units, shown=shown)
    return Program(
        data=data,
        init=init,
        epoch=epoch,
        bounds=evaluate.order_bounds(
            task.model, run, num_units=num_units, units_per_step=recipe.units_per_step
        ),
        train_loss=evaluate.mean_loss(task.model),
        test_metric=evaluate.accuracy(task.model),
    )


def _simulated_block_size(model, num_workers):
    """Reductions over simulated workers cost nothing: take what is fastest for one slice of r."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    return ordering.default_block_size(-(-size // num_workers))


def _initial(model, order, recipe, shape, run):
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
        state = steps.init_train_state(params, optimizer(rate, recipe.momentum, shape))
        return state, init_orders(keys, params)[0]

    return init


def _resident_epoch(run, chunk, order, example, *, num_units, shown):
    """The epoch over data that stay on the devices: one call, compiled here."""
    epoch = steps.worker_epoch(chunk, order, num_units=num_units, shown=shown)
    mapped = run(epoch, owned_in=(False, True, True, False), owned_out=(False, True, True))
    compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*example).compile()
    data = example[2]

    def resident(train, orders, key, front=None):
        return *compiled(train, orders, data, key), None

    return resident


def partition(train: dict, num_workers: int, unit_size: int):
    """Cuts the training set into fixed units of fixed workers.

    Args:
      train: arrays [N, ...]; num_workers: W; unit_size: examples per unit.

    Returns:
      Arrays [W, M, unit_size, ...] with M = N // (W unit_size). Worker w owns the w-th run of
      M * unit_size examples, for the whole training; fewer than W * unit_size are left out.

    Raises:
      ValueError: if there is not one unit for every worker.
    """
    size = len(jax.tree.leaves(train)[0])
    if min(num_workers, unit_size) < 1 or num_workers * unit_size > size:
        raise ValueError(
            f"{num_workers} workers with units of {unit_size} examples need at least "
            f"{num_workers * unit_size} examples (both at least 1); the training set has {size}. "
            "Lower --workers or --unit_size."
        )
    num_units = size // (num_workers * unit_size)
    used = num_workers * num_units * unit_size
    shape = (num_workers, num_units, unit_size)
    return jax.tree.map(lambda x: x[:used].reshape(shape + x.shape[1:]), train)


def train(
    task: Task,
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
    full = jax.device_put(task.train)
    test = jax.device_put(task.test)
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
            finite.stop_if_not_finite(jax.device_get(metrics), first_step)
        loss = float(program.train_loss(state.params, full))
        record = {
            "seed": seed,
            "epoch": done,
            "step": int(state.step),
            "seconds": seconds,
            "train_loss": loss,
            "test_accuracy": float(program.test_metric(state.params, test)),
        }
        if optimum is not None:
            record["suboptimality"] = loss - optimum
        due = recipe.bound_every and done % recipe.bound_every == 0
        if due or (recipe.bound_every and done == recipe.epochs):
            bound = program.bounds(state.params, orders.current, program.data)
            record["bound_linf"], record["bound_l2"] = (float(b) for b in bound)
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
    if recipe.bound_every < 0:
        raise ValueError(
            f"bound_every is {recipe.bound_every}: 0 for never, or a number of epochs."
        )
