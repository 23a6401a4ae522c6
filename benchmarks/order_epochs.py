"""Epochs by the public functions, and rows that compare them with those of a peer.

Every way starts from the same parameters and trains for the same number of epochs, in turns.
Evaluation comes after all of them: the target is the training loss that a random order has here
after the last epoch.
"""

import ctypes
import functools
import gc
import multiprocessing
import pathlib
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp

import local_opt
import ordering
from benchmarks import timing, torch_tasks
from benchmarks.torch_tasks import MOMENTUM, Problem
from experiments.timing import carry_on
from ordering.signs import SignRule

SKETCH = 1024


class Strict(SignRule):
    """The rule of grab-sampler: a product of zero is a minus."""

    def sign(self, state, dot, norm2, coin):
        return state, jnp.where(dot < 0, 1.0, -1.0)


def _mean_alone(loss: Callable) -> Callable:
    """Like `ordering.per_example_grads`, without rows."""
    mean = jax.value_and_grad(lambda *given: jnp.mean(loss(*given)))
    return lambda params, batch, *, key: (*mean(params, batch, key), None)


def _sketched(loss: Callable) -> Callable:
    return ordering.sketched_grads(loss, jax.random.key(1), size=SKETCH)


ORDERS = {  # (order of M units with B in a step, gradients of a loss)
    "random order": (lambda units, **_: ordering.random_reshuffling(units), _mean_alone),
    "grab": (functools.partial(ordering.grab, rule=Strict()), ordering.per_example_grads),
    "pair_balance": (
        functools.partial(ordering.pair_balance, rule=Strict()),
        ordering.per_example_grads,
    ),
    "cd_grab": (ordering.cd_grab, ordering.per_example_grads),
    "cd_grab on sketches": (functools.partial(ordering.cd_grab, gathers="step"), _sketched),
}


def ours(problem: Problem, name: str) -> Callable:
    """An epoch by the public functions: () -> (params, the next orders)."""
    workers, units = problem.y.shape
    make, differentiate = ORDERS[name]
    order, gradients = make(units, units_per_step=problem.step), differentiate(problem.model.loss)
    params = problem.start

    def begin(key):
        state = order.init(key, jnp.zeros(SKETCH) if differentiate is _sketched else params)
        if differentiate is _mean_alone:
            return state
        return state._replace(current=jnp.arange(units, dtype=state.current.dtype))

    def train(params, velocity, orders, x, y):
        def step(carry, place):
            params, velocity, orders = carry
            visited = jax.lax.dynamic_slice(orders.current, (place,), (problem.step,))
            batch = {"x": x[visited], "y": y[visited]}
            _, mean, rows = gradients(params, batch, key=jax.random.key(0))
            mean = jax.lax.pmean(mean, "worker")
            velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, mean)
            params = jax.tree.map(lambda p, v: p - problem.rate * v, params, velocity)
            return (params, velocity, order.observe(orders, rows) if rows else orders), None

        places = jnp.arange(0, units, problem.step)
        (params, velocity, orders), _ = jax.lax.scan(step, (params, velocity, orders), places)
        return params, velocity, order.next_epoch(orders)

    mapped = functools.partial(local_opt.map_workers, workers=workers)
    orders = mapped(begin, in_specs="key", out_specs="worker")(jax.random.key(0))
    specs = {
        "in_specs": ("replicated", "replicated", "worker", "worker", "worker"),
        "out_specs": ("replicated", "replicated", "worker"),
    }
    run = jax.jit(mapped(train, **specs), donate_argnums=(1, 2))
    state = (params, jax.tree.map(jnp.zeros_like, params), orders)
    call = carry_on(lambda state, x, y: run(*state, x, y), state)
    data = jnp.asarray(problem.x), jnp.asarray(problem.y)

    def epoch():
        params, _, orders = call(*data)
        return params, orders.current

    return epoch


class Way(NamedTuple):
    make: Callable  # Problem -> an epoch: () -> (params, orders)
    plain: str  # the way of the same framework in a random order
    ours: str  # what does the same here


def way_of_ours(name: str) -> dict[str, Way]:
    label = f"syncopate, {name}"
    return {label: Way(functools.partial(ours, name=name), "syncopate, random order", label)}


def random_ways() -> dict[str, Way]:
    label = "PyTorch, random order"
    there = Way(torch_tasks.random_in_torch, label, "syncopate, random order")
    return {label: there} | way_of_ours("random order")


def _resident(field: str) -> int:
    """Kilobytes of memory of this process, on Linux."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field)))


def _growth(make: Callable, problem: Problem) -> float:
    epoch = make(problem)
    jax.block_until_ready(epoch())  # compiles, and loads what is loaded late
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    jax.block_until_ready(epoch())
    return (_resident("VmHWM") - before) / 1e3


def megabytes(make: Callable, problem: Problem) -> float:
    """The peak of resident memory in an epoch, over what is held between epochs.

    It is measured in a new process, in the second epoch. Libraries, compiled code, data, parameters
    and the order's state are held; gradients, activations and copies are not.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(_growth, make, problem).result()


def rows_of(problem: Problem, ways: dict[str, Way]) -> Iterator[dict]:
    """Rows of the ways; if the data are not random, with the target and the memory."""
    history, epochs = {name: [] for name in ways}, torch_tasks.EPOCHS[problem.name]

    def kept(name):
        epoch = ways[name].make(problem)

        def call():
            history[name].append(epoch()[0])
            return history[name][-1]

        return call

    compared = list(timing.compared({name: kept(name) for name in ways}, epochs - 1))
    loss_of = torch_tasks.loss_of(problem)
    losses = {name: [loss_of(params) for params in kept] for name, kept in history.items()}
    target = losses["syncopate, random order"][-1]
    workers, units = problem.y.shape
    for name, seconds, times in compared:
        _, plain, rival = ways[name]
        row = {
            "problem": problem.name,
            "workers x units": f"{workers} x {units:,}",
            "parameters": f"{problem.parameters:,}",
            "way": name,
            "ms of an epoch": f"{seconds * 1e3:.2f}",
            "times plain": f"{times[plain][0]:.2f}",
            "times ours": f"{times[rival][0]:.2f}",
            "interval": "{1:.2f} to {2:.2f}".format(*times[rival]),
        }
        if problem.name != "softmax":
            reached = next((n for n, loss in enumerate(losses[name], 1) if loss <= target), None)
            row |= {
                "last loss": f"{losses[name][-1]:.6f}",
                "epochs to target": reached or f"over {epochs}",
                "seconds to target": f"{reached * seconds:.3g}" if reached else "-",
                "megabytes": f"{megabytes(ways[name].make, problem):.0f}",
            }
        yield row
