"""Fair times: calls take turns in one process, so that what disturbs one disturbs all."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax

from experiments.results import records, tables
from experiments.results.statistics import median_interval as order_statistics
from experiments.studies.tables import ECHO_POLICIES, ORDERS, SYNC_RULES
from experiments.tasks import Recipe, Task
from experiments.training import loop
from experiments.training.config import config_of, plans_of
from experiments.training.program import build
from syncopate.models import Model


def in_turns(calls: dict[str, Callable], repeats: int) -> dict[str, list[float]]:
    """Seconds of every call, `repeats` of each, measured in turns after one warm-up each."""
    times = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                times[name].append(time.perf_counter() - start)
    return times


def medians(calls: dict[str, Callable], repeats: int) -> dict[str, float]:
    """Median seconds of every call."""
    return {name: statistics.median(s) for name, s in in_turns(calls, repeats).items()}


def median_interval(values) -> tuple[float, float, float]:
    """Median and the order statistics that hold it with 95 % confidence; of few, all of them."""
    middle, low, high = order_statistics(values)
    return middle, max(low, float(min(values))), min(high, float(max(values)))


def carry_on(step: Callable, state) -> Callable:
    """`(*inputs) -> state`, from the state that the call before left: for steps that donate it."""
    held = [state]

    def call(*inputs):
        held[0] = step(held[0], *inputs)
        return held[0]

    return call


def training_calls(
    task: Task, recipe: Recipe, arms: dict[str, tuple[str, str]]
) -> tuple[dict[str, Callable], int]:
    """Calls that train on, as long as the recipe says, without evaluation; and their steps.

    Arms are {name: (order, sync rule)}; all have the recipe's first learning rate.
    """
    calls, steps = {}, 0
    for name, (order, sync) in arms.items():
        rule = SYNC_RULES[sync]
        program = build(task, recipe, ORDERS[order], rule.rounds)
        config, rate = config_of(recipe, program.sizes, seed=0), recipe.learning_rates[0]
        plans = plans_of(config, rule, ECHO_POLICIES["none"], rate=rate)

        def train(state, program=program, plans=plans):
            start = loop.Progress()
            return loop.run(program, plans, state, start, lambda at, state: state, seed=0)[1]

        calls[name], steps = carry_on(train, program.init(0)), plans.total_steps
    return calls, steps


def gradient_step(model: Model, update: Callable) -> Callable:
    """`(params, state, batch) -> (params, state)`, by an optimizer's update."""

    def step(params, state, batch):
        def mean_loss(params):
            return jnp.mean(model.loss(params, batch, jax.random.key(0)))

        updates, state = update(jax.grad(mean_loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return step


def momentum_step(model: Model, *, compiler_options=None) -> Callable:
    """`(batch, times=None) -> state`: updates of SGD with momentum on one batch, waited for.

    None is one, without a loop.
    """
    optimizer = optax.sgd(1e-3, momentum=0.9)
    one = gradient_step(model, optimizer.update)

    def step(state, batch, times):
        if times is None:
            return one(*state, batch)
        return jax.lax.fori_loop(0, times, lambda _, state: one(*state, batch), state)

    jitted = jax.jit(step, donate_argnums=0, compiler_options=compiler_options)
    params = jax.jit(model.init)(jax.random.key(0))
    call = carry_on(jitted, (params, optimizer.init(params)))
    return lambda batch, times=None: jax.block_until_ready(call(batch, times))


def publish(rows: Sequence[dict], path: str | None) -> None:
    """Prints a table per part, and the rows as JSON lines: into a file, or below the tables."""
    for part in dict.fromkeys(row["part"] for row in rows):
        print(tables.markdown([row for row in rows if row["part"] == part]) + "\n")
    if path:
        records.write_lines(path, rows)
    else:
        sys.stdout.write("".join(json.dumps(row) + "\n" for row in rows))
