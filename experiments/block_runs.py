"""The runs of `experiments.blocks`: orders of blocks, windows, and the steps of many runs at once.

Each of W workers reads blocks of its own in windows, which `ordering.blocks.windows` shuffles and
cuts into batches of b records. The data are in memory, so it reads the places of records alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ordering
from experiments.block_tasks import Arm, Setting, Sorted
from experiments.training import optimizers
from ordering import shuffles

EVALUATED = 1024  # records whose losses are computed at once


class Run(NamedTuple):
    schedule: str  # of optimizers.SCHEDULES
    learning_rate: float
    seed: int


class State(NamedTuple):
    params: Any
    moments: Any  # of the optimizer
    mean: Any  # of the weights after the steps of the last epoch
    orders: Any  # of all workers


class Program(NamedTuple):
    """The runs of an arm; all functions are of one run."""

    init: Callable  # seed -> State
    epoch: Callable  # (State, rates [n, T], records and places [n, T, W, b]) -> State
    read: Callable  # (int[W, M], epoch, seed) -> the last two, n windows of T batches
    loss: Callable  # params -> mean loss over all records
    steps: int  # of an epoch


def _in_file_order(num_units: int, window: int) -> ordering.Ordering:
    """Blocks as they lie in the file, dealt to the workers in turn."""

    def first(key):
        workers, mine = jax.lax.axis_size("worker"), jax.lax.axis_index("worker")
        return jnp.arange(num_units, dtype=jnp.int32) * workers + mine

    return shuffles.shuffled(num_units, lambda key, epoch, current: jnp.copy(current), first)


def _shuffled(num_units: int, window: int) -> ordering.Ordering:
    return ordering.dealt_reshuffling(num_units)


def _balanced(num_units: int, window: int) -> ordering.Ordering:
    return ordering.dealt(ordering.cd_grab(num_units, units_per_step=window), num_units)


# (M, K) -> order
ORDERS = {"file": _in_file_order, "shuffled": _shuffled, "balanced": _balanced}


def build(arm: Arm, setting: Setting, data: Sorted) -> Program:
    """The program of an arm of `arms_of`."""
    workers, batch_size = setting.recipe.workers, setting.recipe.units_per_step
    blocks = ordering.blocks.split(np.arange(setting.num_records), unit_size=arm.size)
    num_units = len(blocks) // workers
    order, observes = ORDERS[arm.order](num_units, arm.window), arm.order == "balanced"
    optimizer, train = optimizers.inner(setting.recipe), jax.tree.map(jnp.asarray, data.train)
    gradients = _gradients(data.model, setting.sketch if observes else 0)

    def init(seed):
        params = data.model.init(jax.random.key(seed))
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), workers)
        make = jax.vmap(lambda key: order.init(key, seen(params)), axis_name="worker")
        return State(params, optimizer.init(params), params, make(keys))

    def seen(params):
        """The shapes of what an order sees of a gradient."""
        return params if setting.sketch is None else jnp.zeros(setting.sketch)

    def step(carry, given):
        (params, moments, mean, sums), (rate, records, places) = carry, given
        batch = jax.tree.map(lambda x: x[records.reshape(-1)], train)
        gradient, rows = gradients(params, batch)
        if observes:
            rows = jax.tree.map(lambda g: g.reshape(*places.shape, *g.shape[1:]), rows)
            sums = jax.vmap(_add)(sums, rows, places)
        updates, moments = optimizer.update(gradient, moments, params, rate=rate)
        params = optax.apply_updates(params, updates)
        return (params, moments, jax.tree.map(jnp.add, mean, params), sums), None

    def observe(orders, sums):
        return ordering.blocks.observe(order, orders, sums, units=arm.window)

    def window(carry, given):
        of_steps, orders = carry
        (*others, sums), _ = jax.lax.scan(step, of_steps, given)
        if observes:
            orders, sums = jax.vmap(observe, axis_name="worker")(orders, sums)
        return ((*others, sums), orders), None

    def epoch(state, rates, records, places):
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        none = ordering.blocks.sums(seen(state.params), window=arm.window)
        sums = jax.tree.map(lambda x: jnp.zeros((workers, *x.shape)), none) if observes else ()
        carry = (state.params, state.moments, zeros, sums), state.orders
        carry, _ = jax.lax.scan(window, carry, (rates, records, places))
        (params, moments, mean, _), orders = carry
        mean = jax.tree.map(lambda m: m / rates.size, mean)
        return State(params, moments, mean, jax.vmap(order.next_epoch, axis_name="worker")(orders))

    read = functools.partial(_read, blocks, arm, batch_size)
    loss = functools.partial(_loss, data.model, train)
    return Program(init, epoch, read, loss, num_units * arm.size // batch_size)


def _gradients(model, sketch: int | None) -> Callable:
    """`(params, batch) -> (mean gradient, rows)`; no rows for a sketch of 0 numbers."""
    key = jax.random.key(0)
    if sketch == 0:
        mean = lambda params, batch: jnp.mean(model.loss(params, batch, key))  # noqa: E731
        return lambda params, batch: (jax.grad(mean)(params, batch), ())
    of_each = ordering.per_example(model.loss)
    if sketch is not None:
        of_each = ordering.sketched(model.loss, key, size=sketch)

    def gradients(params, batch):
        _, mean, rows = of_each(params, batch, key)
        return mean, rows.tree

    return gradients


def _add(sums, rows, places):
    return ordering.blocks.add(sums, ordering.Rows.of(rows), places)


def _read(blocks, arm, batch_size, orders, epoch, seed):
    """Places of the records of an epoch, and of their blocks in the window: int32[n, T, W, b]."""
    # Of windows of one batch, or of a file that is read as it lies, nothing is shuffled.
    shuffle = arm.window * arm.size > batch_size and (arm.order, arm.window) != ("file", 1)
    count = orders.shape[1] // arm.window
    found = ordering.blocks.windows(
        blocks, orders, window=arm.window if shuffle else orders.shape[1], batch_size=batch_size,
        epoch=epoch, seed=seed, total=len(blocks), shuffle=shuffle,
    )  # fmt: skip
    parts = zip(*(found[i] for i in range(len(found))), strict=True)
    records, places = (np.concatenate(part).astype(np.int32) for part in parts)
    shape = (count, len(records) // count, *records.shape[1:])
    return records.reshape(shape), (places % arm.window).reshape(shape)


def _loss(model, train, params):
    total = jax.tree.leaves(train)[0].shape[0]
    size = min(EVALUATED, total)
    parts = jax.tree.map(lambda x: x[: total // size * size].reshape(-1, size, *x.shape[1:]), train)
    of_part = lambda part: jnp.mean(model.loss(params, part, jax.random.key(0)))  # noqa: E731
    return jnp.mean(jax.lax.map(of_part, parts))


def trained(
    arm: Arm, setting: Setting, data: Sorted, *, after_epoch: Callable[[int], None]
) -> Callable[[Sequence[Run]], list[tuple[float, float]]]:
    """`runs -> [(loss of the last weights, of their mean over the last epoch)]`, side by side.

    Args:
      after_epoch: called with the number of runs after every epoch of them.
    """
    program = build(arm, setting, data)
    init, epoch, loss = (jax.jit(jax.vmap(f)) for f in (program.init, program.epoch, program.loss))
    epochs = setting.recipe.epochs

    def train(runs):
        states = init(jnp.array([run.seed for run in runs]))
        rates = np.stack([_rates(setting, run, program.steps) for run in runs])
        for number in range(epochs):
            orders, read = np.asarray(states.orders.current), {}
            names = [(run.seed, own.tobytes()) for run, own in zip(runs, orders, strict=True)]
            for name, own in zip(names, orders, strict=True):
                if name not in read:  # the same at all rates, unless the order depends on them
                    read[name] = program.read(own, number, name[0])
            records, places = (np.stack([read[name][i] for name in names]) for i in (0, 1))
            states = epoch(states, rates[:, number].reshape(records.shape[:3]), records, places)
            after_epoch(len(runs))
        return [*zip(*(map(float, loss(p)) for p in (states.params, states.mean)), strict=True)]

    return train


def _rates(setting, run, steps):
    """float32[epochs, steps]"""
    epochs = setting.recipe.epochs
    recipe = setting.recipe._replace(schedule=run.schedule)
    schedule = optimizers.schedule(recipe, epochs * steps, steps)
    factors = jnp.broadcast_to(jax.vmap(schedule)(jnp.arange(epochs * steps)), epochs * steps)
    return run.learning_rate * np.asarray(factors, np.float32).reshape(epochs, steps)
