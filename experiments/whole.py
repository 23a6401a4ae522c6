"""What is compiled of a run with an order, a SyncPlan and an echo policy, and its state.

A fresh step takes the next units of the orders, looks at their gradients and lets the order
observe them; an echoed step uses the batch again, at the price of a plain gradient; after a
round's last step the workers meet. All there is, of all workers, is one tree: `State`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
import ordering
from experiments import evaluate, loads, training
from experiments.methods import Method, Setting
from experiments.optimizers import OPTIMIZERS, scale_by_rate
from experiments.partition import partition
from experiments.processes import on_host, own_workers, place
from experiments.steps import bad_unit, unit_gradients
from experiments.tasks import Task
from experiments.volume import order_sent
from local_opt import runners


class Setup(NamedTuple):
    """How a task is trained, whatever the three decisions."""

    workers: int
    units_per_step: int
    unit_size: int
    optimizer: str  # a name of `experiments.optimizers.OPTIMIZERS`
    weight_decay: float
    momentum: float


class Seen(NamedTuple):
    """What a worker has seen since the last look."""

    loss: jax.Array  # float32[], summed over steps
    bad_step: jax.Array  # int32[], the first step whose loss or gradient is not finite; -1: none
    bad_unit: jax.Array  # int32[], which unit it was; -2: one of them


class State(NamedTuple):
    """All there is of a run, with a leading worker axis: a checkpoint is this tree."""

    params: Any
    rounds: Any  # optimizer state, anchor and outer state of `local_opt.Rounds`
    orders: Any  # current and next order, running sum, pending half pair
    key: jax.Array  # of the steps' randomness
    seen: Seen


class Program(NamedTuple):
    """Everything that depends on neither plans, seed nor learning rate: compiled once."""

    sizes: loads.Sizes
    init: Callable  # seed -> State
    input: loads.Input
    fresh: Callable  # (state, batch, rate, first unit, step) -> state
    echoed: Callable  # the same
    meet: Callable  # (state, rate) -> state
    forget: Callable  # state -> state with nothing seen
    next_epoch: Callable  # state -> state
    evaluate: Callable  # params [W, ...] -> {"train_loss": float, "test_METRIC": float}
    order_sent: Callable  # loads -> what the order has sent, in all-reduces


def check_setup(task: Task, setup: Setup) -> loads.Sizes:
    """The sizes of a run; ValueError where the data are too few for the workers."""
    per_unit = setup.workers * setup.unit_size
    size = evaluate.size_of(task.train)
    for name in ("workers", "unit_size"):
        if getattr(setup, name) < 1:
            raise ValueError(f"--{name} is {getattr(setup, name)}: pass a whole number >= 1.")
    if per_unit > size:
        raise ValueError(
            f"{setup.workers} workers with units of {setup.unit_size} examples need at least "
            f"{per_unit} examples; the training set has {size}. Lower --workers or --unit_size."
        )
    ordering.base.check_units_per_step(size // per_unit, setup.units_per_step)
    return loads.Sizes(setup.workers, size // per_unit, setup.units_per_step, setup.unit_size)


def build(
    task: Task,
    method: Method,
    rounds_of: Callable,
    setup: Setup,
    *,
    epochs: int,
    streamed: bool = False,
    mesh: jax.sharding.Mesh | None = None,
) -> Program:
    """Places the data and jits the parts of a step.

    Args:
      task, method: what to train, in which order.
      rounds_of: `(inner optimizer, axis_name=) -> local_opt.Rounds`, as a `Rule` has it.
      setup: how; epochs: that the loads of the run take, which some orders need to know.
      streamed: read batches while the workers work, as sources that fit nowhere always are;
        otherwise the data stay on the devices.
      mesh: one device per worker, of one or several processes; None simulates the workers.

    Raises:
      ValueError: if the data are too few, or the loss mixes examples that are to be units.
    """
    sizes = check_setup(task, setup)
    if setup.unit_size == 1:
        training.check_units(task, observed=method.observes and setup.units_per_step > 1)
    run = runners.simulate if mesh is None else runners.over_mesh(mesh)
    block_size = None if mesh else training.simulated_block_size(task.model, setup.workers)
    order = method.make(
        Setting(sizes.num_units, setup.units_per_step, setup.workers, epochs, block_size)
    )
    inner = OPTIMIZERS[setup.optimizer](setup.weight_decay, setup.momentum)
    rounds = rounds_of(optax.chain(*inner, scale_by_rate()), axis_name=runners.AXIS)

    def jitted(function, *owned):
        mapped = run(function, owned_in=(True, *owned), owned_out=(True,))
        return jax.jit(lambda *args: mapped(*args)[0], donate_argnums=0)

    fresh, echoed = (
        jitted(worker_step(task.model, method, order, rounds, fresh), True, False, False, False)
        for fresh in (True, False)
    )

    def meet(state, rate):
        params, own = rounds.sync(state.params, state.rounds, rate=rate)
        return (state._replace(params=params, rounds=own),)

    def next_epoch(state):
        return (state._replace(orders=order.next_epoch(state.orders)),)

    return Program(
        sizes,
        _initial(task.model, order, rounds, setup.workers, run, mesh),
        _input(task, sizes, run, streamed, mesh),
        fresh,
        echoed,
        jitted(meet, False),
        jitted(lambda state: (state._replace(seen=nothing_seen()),)),
        jitted(next_epoch),
        evaluator(task, setup),
        order_sent(method, sizes, num_params(task.model)),
    )


def worker_step(model, method: Method, order, rounds: local_opt.Rounds, fresh: bool) -> Callable:
    """`(state, batch, rate, first unit, step) -> (state,)`, a step of one worker."""
    observes = fresh and method.observes

    def step(state, batch, rate, first, t):
        size = jax.tree.leaves(batch)[0].shape[0]
        gradients = unit_gradients(
            model.loss,
            units_per_step=size,
            observes=observes,
            mixes=model.statistics is not None,
        )
        losses, mean, rows = gradients(state.params, batch, jax.random.fold_in(state.key, t))
        bad = bad_unit(jnp.isfinite(losses), ordering.rows.finite_units(rows))
        updates, own = rounds.update(mean, state.rounds, state.params, rate=rate)
        units = jax.lax.dynamic_slice_in_dim(state.orders.current, first, size)
        state = state._replace(
            params=optax.apply_updates(state.params, updates),
            rounds=own,
            seen=_see(state.seen, jnp.mean(losses), bad, units, t),
        )
        if observes:
            state = state._replace(orders=order.observe(state.orders, rows))
        return (state,)

    return step


def _see(seen, loss, bad, units, t):
    first = (bad != -1) & (seen.bad_step < 0)
    unit = jnp.where(bad < 0, bad, units[bad])
    return Seen(
        seen.loss + loss,
        jnp.where(first, t, seen.bad_step),
        jnp.where(first, unit, seen.bad_unit),
    )


def nothing_seen() -> Seen:
    """A worker's `Seen` at the start and after every look."""
    none = jnp.full((), -1, jnp.int32)
    return Seen(jnp.zeros(()), none, none)


def _initial(model, order, rounds, workers, run, mesh):
    sharding = runners.owned_sharding(mesh)
    model_init = jax.jit(model.init)

    def own(params, key, order_key):
        orders = order.init(order_key, params)
        return (State(params, rounds.init(params), orders, key, nothing_seen()),)

    owned = jax.jit(run(own, owned_in=(True,) * 3, owned_out=(True,)))

    def init(seed: int) -> State:
        key = jax.random.key(seed)
        params = jax.device_get(model_init(jax.random.fold_in(key, 0)))
        params = jax.tree.map(lambda p: np.broadcast_to(p, (workers, *np.shape(p))), params)
        order_keys, keys = (
            jax.random.split(jax.random.fold_in(key, part), workers) for part in (1, 2)
        )
        state = owned(*place((params, keys, order_keys), sharding))[0]
        # Committed, as a restored state is: what the steps are compiled for depends on it.
        return jax.device_put(state, jax.devices()[0]) if mesh is None else state

    return init


def _input(task, sizes, run, streamed, mesh):
    sharding = runners.owned_sharding(mesh)
    if streamed or not isinstance(task.train, dict):
        owned = own_workers(mesh, sizes.workers)
        return loads.streamed(task.train, sizes, owned=owned, sharding=sharding)
    units = partition(task.train, sizes.workers, sizes.unit_size)
    return loads.resident(place(units, sharding), sizes, run)


def num_params(model) -> int:
    """D, without making any."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def evaluator(task: Task, setup: Setup) -> Callable:
    """`params [W, ...] -> measures` of the mean model, equal on all processes.

    The whole sets, or of sources that do not fit in memory as many training examples as there are
    to test.
    """
    average = jax.jit(local_opt.consolidate)
    recipe = task.recipe._replace(
        workers=setup.workers, units_per_step=setup.units_per_step, unit_size=setup.unit_size
    )
    if isinstance(task.train, dict):
        measure = training.evaluation(task, recipe)
    else:
        measure = _of_sources(task, recipe)
    return lambda params: measure(on_host(average(params)))


def _of_sources(task, recipe):
    batch_size = recipe.workers * recipe.units_per_step * recipe.unit_size
    size = evaluate.size_of(task.test)
    test = evaluate.part_of(task.test, 0, size)
    train = evaluate.part_of(task.train, 0, min(size, evaluate.size_of(task.train)))
    moments = evaluate.moments(task.model, task.train, batch_size)
    measures = evaluate.over_parts(evaluate.loss_and_accuracy(task.model))

    def measure(params):
        statistics = moments(params)
        return {
            "train_loss": measures(params, statistics, train)[0],
            "test_accuracy": measures(params, statistics, test)[1],
        }

    return measure
