"""Timings of calls that take turns in one process, so that a disturbance affects all of them."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ordering.data
from experiments import progress
from experiments.compare.arms import row_of
from experiments.compare.cost import Machine
from experiments.data import Recipe, Task
from experiments.trainer.config import config_of
from experiments.trainer.program import build
from experiments.trainer.timeline import Progress
from experiments.trainer.train import Hooks, train
from models import Model


def in_turns(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call, `repeats` of each, measured in turns after one warm-up each."""
    times = {name: [] for name in calls}
    turns = [(turn, name) for turn in range(repeats + 1) for name in calls]
    for turn, name in progress.bar(turns, unit="call", leave=False):
        start = time.perf_counter()
        jax.block_until_ready(calls[name]())
        if turn:
            times[name].append(time.perf_counter() - start)
    return times


def medians(calls: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Median seconds of every call."""
    return {name: statistics.median(s) for name, s in in_turns(calls, repeats).items()}


def carry_on(step: Callable, state) -> Callable:
    """`(*inputs) -> state`, which keeps the state between calls: for steps that donate it."""
    held = [state]

    def call(*inputs):
        held[0] = step(held[0], *inputs)
        return held[0]

    return call


def training_calls(
    task: Task, recipe: Recipe, arms: dict[str, tuple[str, str]]
) -> tuple[dict[str, Callable], int]:
    """Calls that train for the length of the recipe, without evaluation, and their steps.

    Arms are {name: (order, sync rule)}. All use the recipe's first learning rate.
    """
    calls, steps = {}, 0
    for name, (order, sync) in arms.items():
        row, rule = row_of("order", order), row_of("sync", sync)
        program = build(task, recipe, row, rule.rounds)
        config, rate = config_of(recipe, program.sizes, seed=0), recipe.learning_rates[0]
        plans = config.plans(rule, row_of("echo", "none"), rate=rate)

        def whole(state, program=program, plans=plans):
            return train(program, plans, state, Progress(), Hooks()).state

        calls[name], steps = carry_on(whole, program.init(0)), plans.total_steps
    return calls, steps


def gradient_step(model: Model, update: Callable) -> Callable:
    """`(params, state, batch) -> (params, state)`, by an optimizer's update."""

    def step(params, state, batch):
        def mean_loss(params):
            return jnp.mean(model.loss(params, batch, jax.random.key(0)))

        updates, state = update(jax.grad(mean_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def momentum_step(model: Model, times: int = 1, **options) -> Callable:
    """`batch -> state`: `times` updates of SGD with momentum on one batch, in one program."""
    optimizer = optax.sgd(1e-3, momentum=0.9)
    one = gradient_step(model, optimizer.update)

    def step(state, batch):
        return jax.lax.fori_loop(0, times, lambda _, state: one(*state, batch), state)

    params = jax.jit(model.init)(jax.random.key(0))
    return carry_on(jax.jit(step, donate_argnums=0, **options), (params, optimizer.init(params)))


def measure(task: Task, recipe: Recipe, *, rounds: int = 7, per_round: int = 20) -> Machine:
    """Times loads and steps of one worker's batches on this machine, one after the other.

    t_step: a step of SGD with momentum, waited for, its batch on the device. t_load: reading a
    batch in a random order, of arrays or of a source, by `ordering.data.tf_dataset`, or one by one
    without TensorFlow, and moving it to the device. Each is the median of `rounds` means over
    `per_round`, because batches read in parallel arrive in bursts; a first round warms up. In a
    run, loads and steps share the cores, which is not measured here.
    """
    train = ordering.data.as_source(task.train)
    size = recipe.units_per_step * recipe.unit_size
    generator, wanted = np.random.default_rng(0), size * per_round * (rounds + 1)
    epochs = range(-(-wanted // len(train)))
    order = np.concatenate([generator.permutation(len(train)) for _ in epochs])
    indices = order[:wanted]
    try:
        examples, source = ordering.data.tf_dataset(task.train, indices), "tf.data"
        read = examples.batch(size).prefetch(2).as_numpy_iterator()
    except ImportError:
        read, source = map(train.__getitem__, indices.reshape(-1, size)), "one by one"
    batch = jax.device_put(train[np.arange(size)])
    take = momentum_step(task.model)

    def seconds(call):
        calls = {"": lambda: [jax.block_until_ready(call()) for _ in range(per_round)][-1]}
        return medians(calls, rounds)[""] / per_round

    load, step = seconds(lambda: jax.device_put(next(read))), seconds(lambda: take(batch))
    return Machine(step, load, label=f"{task.name}, batch {size}, measured here, {source}")
