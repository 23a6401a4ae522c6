"""What one worker does in a step, between two events of the host, and at its sync.

Everything is written for one worker under the named axis "worker"; all there is of a run, of all
workers, is one tree: `TrainState`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import local_opt
import models
import ordering
from experiments.tasks.base import Recipe, Task
from experiments.training import optimizers
from experiments.training.config import EXAMPLES, OrderSetting, Sizes, num_params, size_of
from local_opt.workers import AXIS
from ordering.rows import finite_units

# One map for all workers and runs.
SKETCH_KEY = functools.partial(jax.random.key, 1907)


class StepStats(NamedTuple):
    """What a worker has seen since the last evaluation."""

    loss: jax.Array  # float32[], summed over steps
    bad_step: jax.Array  # int32[], the first step whose loss or gradient is not finite; -1: none
    bad_unit: jax.Array  # int32[], which unit it was; -2: one of them
    drift: jax.Array  # float32[], summed over syncs: how far it was from the workers' mean


class TrainState(NamedTuple):
    """All there is of a run: a checkpoint is this tree.

    Parameters and the optimizer's state are shared by all workers where these meet in every step,
    and have a leading worker axis where rounds are local; the other fields always have one.
    """

    params: Any
    opt_state: Any  # of `local_opt.Rounds`
    orders: Any  # current and next order, running sum, pending half pair
    key: jax.Array  # of the steps' randomness
    stats: StepStats


class Worker(NamedTuple):
    """What a worker of a run is, before any data are there.

    Fields:
      model: what is trained; row: of ORDERS; order: what it made.
      inner: the optimizer of one worker; rounds: made of it.
      exchanges: coordination and the mean gradient share one exchange of rows.
      sketch: k of what the order looks at; None: gradients.
    """

    model: models.Model
    row: Any
    order: ordering.Ordering
    inner: optax.GradientTransformation
    rounds: local_opt.Rounds
    sizes: Sizes
    exchanges: bool
    sketch: int | None

    @property
    def sides(self) -> TrainState:
        """Whose the fields of the state are, in the words of `local_opt.lift`."""
        own = "shared" if self.rounds.in_step else "owned"
        return TrainState(own, own, "owned", "owned", "owned")


def worker_of(
    task: Task, recipe: Recipe, row, rounds_of: Callable, sizes: Sizes, *,
    on_mesh: bool = False, in_turn: bool = False, epochs: int | None = None,
) -> Worker:  # fmt: skip
    """A worker of a training of `task`, whose data may be shapes only.

    Args:
      rounds_of: `(inner optimizer, axis_name=) -> Rounds`. Workers in turn cannot meet in a step:
        where it does, they take the same steps with the mean gradient at a sync.
      on_mesh: workers have devices of their own; epochs: the recipe's if unset.
    """
    inner = optimizers.inner(recipe)
    rounds = rounds_of(inner, axis_name=AXIS)
    if in_turn and rounds.in_step:
        rounds = local_opt.accumulated_rounds(inner, axis_name=AXIS)
    order = row.make(
        OrderSetting(
            sizes.num_units,
            sizes.units_per_step,
            sizes.workers,
            epochs=epochs or recipe.epochs or 1,
            total=size_of(task.train) // sizes.unit_size,
            gathers="step" if rounds.in_step else "sync",  # where the workers meet
        )
    )
    # Among simulated workers nothing travels: there the exchange is only more work.
    exact = row.coordinated and row.sketch is None and sizes.units_per_step == 1
    exchanges = on_mesh and exact and rounds.in_step
    sketch = row.sketch and min(row.sketch, num_params(task.model))
    return Worker(task.model, row, order, inner, rounds, sizes, exchanges, sketch)


def zero_stats() -> StepStats:
    """A worker's stats at the start and after every evaluation."""
    none = jnp.full((), -1, jnp.int32)
    return StepStats(jnp.zeros(()), none, none, jnp.zeros(()))


def unit_gradients(
    loss: Callable, *, units_per_step: int, separate: bool, sketch: int | None = None
) -> Callable:
    """Gradients of B units from batches with leaves [B, unit_size, ...].

    One unit per step costs a plain gradient; more of them cost one gradient each, which is spared
    unless they must be `separate`: the rows are then one, the mean. With `sketch` numbers that
    stand for a gradient, they cost a plain gradient too.
    """
    if separate and units_per_step > 1:
        if sketch:
            return ordering.sketched(ordering.grouped(loss), SKETCH_KEY(), size=sketch)
        return ordering.per_example(ordering.grouped(loss))

    def merged(params, batch, key):
        flat = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), batch)
        losses = loss(params, flat, key)
        unit_losses = jnp.mean(losses.reshape(units_per_step, -1), axis=1)
        return jnp.mean(losses), unit_losses

    def gradients(params, batch, key):
        (_, losses), mean = jax.value_and_grad(merged, has_aux=True)(params, batch, key)
        rows = ordering.Rows.of_gradient(mean)
        if sketch and separate:
            rows = ordering.sketch_rows(rows, ordering.sketch(SKETCH_KEY(), size=sketch))
        return losses, mean, rows

    return gradients


def worker_step(worker: Worker, *, fresh: bool) -> Callable:
    """`(state, batch, units, rate, t) -> state`, a step of one worker; only fresh ones observe."""
    model, row, observes = worker.model, worker.row, fresh and worker.row.observes
    # A loss that mixes its batch has no gradient of single units: the unit is then the same for
    # every order, but for dealt examples, whose batch is the unit.
    separate = observes or (model.statistics is not None and row.deals != EXAMPLES)
    sketch = worker.sketch if fresh else None
    exchanges = fresh and worker.exchanges
    update = (worker.inner if exchanges else worker.rounds).update

    def step(state, batch, units, rate, t):
        gradients = unit_gradients(
            model.loss, units_per_step=units.shape[0], separate=separate, sketch=sketch
        )
        losses, mean, rows = gradients(state.params, batch, jax.random.fold_in(state.key, t))
        bad = bad_unit(jnp.isfinite(losses), finite_units(rows))
        if exchanges:
            mean, rows = ordering.exchange_rows(rows, axis_name=AXIS)
        # The proximal correction asks whether the batch is new.
        updates, opt_state = update(
            mean, state.opt_state, state.params, rate=rate, fresh=jnp.bool_(fresh)
        )
        return state._replace(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            orders=worker.order.observe(state.orders, rows) if observes else state.orders,
            stats=_add(state.stats, jnp.mean(losses), bad, units, t),
        )

    return step


def bad_unit(finite_losses, finite_rows):
    """Place of the first unit that is not finite; -1 if all are, -2 if only their sum shows it."""
    named = finite_rows.size == finite_losses.size
    by_row = jnp.where(jnp.all(finite_rows), -1, jnp.argmin(finite_rows) if named else -2)
    by_loss = jnp.argmin(finite_losses)
    return jnp.where(jnp.all(finite_losses), by_row, by_loss).astype(jnp.int32)


def _add(stats, loss, bad, units, t):
    first = (bad != -1) & (stats.bad_step < 0)
    return stats._replace(
        loss=stats.loss + loss,
        bad_step=jnp.where(first, t, stats.bad_step),
        bad_unit=jnp.where(first, jnp.where(bad < 0, bad, units[bad]), stats.bad_unit),
    )


def segment(worker: Worker, take: Callable, *, fresh: bool, size: int) -> Callable:
    """`(state, batch, start, stop, first, rates) -> state`, the steps of a segment of one worker.

    `take(batch, units)` is the batch of these `size` units, out of what the segment was handed. A
    fresh step takes the next units of the order; echoed ones all take the same.
    """
    step, units_per_step = worker_step(worker, fresh=fresh), worker.sizes.units_per_step

    def steps(state, batch, start, stop, first, rates):
        def units_at(t):
            moved = (t - start) * units_per_step if fresh else 0
            return jax.lax.dynamic_slice_in_dim(state.orders.current, first + moved, size)

        held = None if fresh else take(batch, units_at(start))

        def body(t, state):
            units = units_at(t)
            given = take(batch, units) if fresh else held
            return step(state, given, units, rates[t], t)

        # The number of steps is not compiled in.
        return jax.lax.fori_loop(start, stop, body, state)

    return steps


def end_of(worker: Worker, *, sync: bool, epoch_end: bool) -> Callable:
    """`(state, rate) -> state`: the sync and the epoch's end of one worker."""
    rounds, order = worker.rounds, worker.order

    def end(state, rate):
        if sync:
            params, opt_state = rounds.sync(state.params, state.opt_state, rate=rate)
            stats = state.stats
            if rounds.drift:
                stats = stats._replace(drift=stats.drift + rounds.drift(opt_state))
            orders = order.sync(state.orders) if worker.row.observes else state.orders
            state = state._replace(params=params, opt_state=opt_state, stats=stats, orders=orders)
        if epoch_end:
            state = state._replace(orders=order.next_epoch(state.orders))
        return state

    return end
