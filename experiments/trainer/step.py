"""The steps and syncs of one worker.

Everything is written for one worker under the named axis "worker". The state of a run, of all its
workers, is one tree: `TrainState`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import local_opt
import models
import ordering
from experiments.data import optimizers
from experiments.data.averages import Averages, averages_of
from experiments.data.base import Recipe, Task, size_of
from experiments.data.scores import scores_of
from experiments.trainer.config import EXAMPLES, OrderSetting, Sizes, num_params
from ordering.gradients import scale as scale_lib
from ordering.trees import finite_units
from syncopate.refusals import UserError
from syncopate.workers import AXIS

# The same projection for all workers and runs.
SKETCH_KEY = functools.partial(jax.random.key, 1907)


class Scalar(NamedTuple):
    """A number of every step or round of a worker; a record has its mean since the last record."""

    per: str  # "step" or "round"
    of: Callable  # (worker, state) -> float32[] after a sync; after a step also of units' losses
    applies: Callable = lambda worker: True  # whether a worker has it


SCALARS = {  # by their names in records, PART/NAME; here alone the trainer knows them
    "train/batch_loss": Scalar("step", lambda worker, state, losses: jnp.mean(losses)),
    "drift": Scalar(  # the distance from the workers' mean
        "round",
        lambda worker, state: worker.rounds.drift(state.opt_state),
        lambda worker: worker.rounds.drift is not None,
    ),
}


class StepStats(NamedTuple):
    """Statistics of a worker since the last evaluation."""

    sums: dict  # {name: float32[]} of SCALARS
    bad_step: jax.Array  # int32[], first step with a loss or gradient not finite; -1: none
    bad_unit: jax.Array  # int32[], the unit of that step; -2: unknown

    def plus(self, per: str, worker, state, *more) -> "StepStats":
        """With the scalars of a step or round added."""
        scalars = {name: SCALARS[name].of for name in self.sums if SCALARS[name].per == per}
        added = {name: self.sums[name] + of(worker, state, *more) for name, of in scalars.items()}
        return self._replace(sums=self.sums | added)

    def means(self, **counts: int) -> dict[str, float]:
        """{name: mean over all workers}, of a number of steps and rounds."""
        return {
            name: float(self.sums[name].mean()) / counts[row.per]
            for name, row in SCALARS.items()
            if name in self.sums and counts[row.per]
        }


class TrainState(NamedTuple):
    """The whole state of a run, which a checkpoint holds.

    Parameters, their averages, the optimizer's state and the scale are shared if workers
    synchronise in every step, and have a leading worker axis if rounds are local. The others always
    have one.
    """

    params: Any
    opt_state: Any  # of `local_opt.Rounds`
    orders: Any  # current and next order, running sum, pending half pair
    key: jax.Array  # of the steps' randomness
    stats: StepStats
    averages: dict  # {name: of the parameters}, as of `Averages`
    scale: Any  # of the gradients that a scaled order observes; () of others


class Worker(NamedTuple):
    """A worker of a run, without data."""

    model: models.Model
    row: Any  # of ORDERS, which has made the order
    order: ordering.Ordering
    rounds: local_opt.Rounds  # of the optimizer of one worker
    sizes: Sizes
    sketch: int | None  # size of what the order observes; None: it observes gradients
    averages: Averages
    scale: Callable | None  # (opt_state, params) -> scale of what it observes; None: as it is

    @property
    def sides(self) -> TrainState:
        """The fields of the state as specs of `local_opt.map_workers`."""
        side = "replicated" if self.rounds.in_step else "worker"
        return TrainState(side, side, "worker", "worker", "worker", side, side)


def worker_of(
    task: Task,
    recipe: Recipe,
    row,
    rounds_of: Callable,
    sizes: Sizes,
    *,
    in_turn: bool = False,
) -> Worker:
    """A worker of a training of `task`, whose data may be shapes only.

    Workers in turn cannot synchronise within steps: they accumulate gradients and take the same
    step at a sync.
    """
    inner = optimizers.inner(recipe)
    rounds = rounds_of(inner, axis_name=AXIS)
    if in_turn and rounds.in_step:
        rounds = local_opt.accumulated_rounds(inner, axis_name=AXIS)
    weigh = functools.partial(weight_here, sizes.weights)
    if sizes.weights:
        rounds = weighted_rounds(rounds, weigh)
    order = row.make(
        OrderSetting(
            sizes.num_units,
            sizes.units_per_step,
            total=size_of(task.train) // sizes.unit_size,
            gathers="step" if rounds.in_step else "sync",
            workers=sizes.workers,
            scores=functools.partial(scores_of, task.train, sizes.unit_size),
        )
    )
    if sizes.weights and row.coordinated:
        order = weighted_order(order, weigh)
    sketch = row.sketch and min(row.sketch, num_params(task.model))
    of_task = functools.partial(scale_of, task, recipe, rounds, sizes, sketch)
    scale = of_task(power=row.scaled) if row.scaled else None
    means = averages_of(recipe, steps=sizes.loads_per_epoch)
    return Worker(task.model, row, order, rounds, sizes, sketch, means, scale)


def weight_here(weights: tuple[float, ...]) -> jax.Array:
    """float32[], the weight of the worker that asks."""
    return jnp.asarray(weights, jnp.float32)[jax.lax.axis_index(AXIS)]


def weighted_rounds(rounds: local_opt.Rounds, weigh: Callable) -> local_opt.Rounds:
    """The rounds with weights of workers where they average: in every step, or at a sync."""
    name = "update" if rounds.in_step else "sync"
    averages = getattr(rounds, name)
    return rounds._replace(**{name: lambda *args, **k: averages(*args, weight=weigh(), **k)})


def weighted_order(order: ordering.Ordering, weigh: Callable) -> ordering.Ordering:
    """The order, which observes what a step adds: gradients times the weight of their worker."""

    class Weighted(type(order)):
        def observe(self, state, gradients):
            weight = weigh()
            weighted = jax.tree.map(lambda g: g * weight.astype(g.dtype), gradients)
            return super().observe(state, weighted)

    fields = dataclasses.fields(order)
    return Weighted(**{field.name: getattr(order, field.name) for field in fields})


def zero_stats(worker: Worker) -> StepStats:
    """A worker's stats at the start and after every evaluation."""
    none = jnp.full((), -1, jnp.int32)
    sums = {name: jnp.zeros(()) for name, row in SCALARS.items() if row.applies(worker)}
    return StepStats(sums, none, none)


def unit_gradients(
    loss: Callable, *, units_per_step: int, separate: bool, sketch: int | None = None
) -> Callable:
    """Gradients of B units from batches with leaves [B, unit_size, ...], with scaled rows.

    More than one cost a gradient each if they must be `separate` and are not sketched; where they
    need not be, the only row is their mean.
    """

    def scaled(rows, scale):
        return rows if scale is None else scale_lib.scaled(rows, scale)

    if separate and units_per_step > 1:
        if sketch:
            return ordering.sketched_grads(ordering.group_loss(loss), SKETCH_KEY(), size=sketch)
        of_units = ordering.per_example_grads(ordering.group_loss(loss))

        def exact(params, batch, *, key, scale=None):
            losses, mean, rows = of_units(params, batch, key=key)
            return losses, mean, scaled(rows, scale)

        return exact

    def merged(params, batch, key):
        flat = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), batch)
        losses = loss(params, flat, key)
        unit_losses = jnp.mean(losses.reshape(units_per_step, -1), axis=1)
        return jnp.mean(losses), unit_losses

    def gradients(params, batch, *, key, scale=None):
        (_, losses), mean = jax.value_and_grad(merged, has_aux=True)(params, batch, key)
        rows = scaled(jax.tree.map(lambda g: g[None], mean), scale)
        if sketch and separate:
            to_sketch = ordering.make_sketch(SKETCH_KEY(), size=sketch)
            rows = to_sketch(jax.tree.map(lambda g: g[0], rows))[None]
        return losses, mean, rows

    return gradients


def worker_step(worker: Worker, *, fresh: bool) -> Callable:
    """`(state, batch, units, rate, t, T) -> state`, a step of one worker in a run of T steps.

    Only fresh ones observe.
    """
    model, row, observes = worker.model, worker.row, fresh and worker.row.observes
    # If the loss mixes the examples of a batch, every order computes units separately, so that all
    # train on the same loss. With dealt examples the whole batch is the unit.
    separate = observes or (model.statistics is not None and row.deals != EXAMPLES)
    sketch = worker.sketch if fresh else None
    scales_rows = observes and worker.scale is not None

    def step(state, batch, units, rate, t, total):
        gradients = unit_gradients(
            model.loss, units_per_step=units.shape[0], separate=separate, sketch=sketch
        )
        losses, mean, rows = gradients(
            state.params,
            batch,
            key=jax.random.fold_in(state.key, t),
            scale=state.scale if scales_rows else None,
        )
        bad = bad_unit(jnp.isfinite(losses), finite_units(rows))
        # The proximal correction depends on whether the batch is new.
        updates, opt_state = worker.rounds.update(
            mean, state.opt_state, state.params, rate=rate, at=t / total, fresh=jnp.bool_(fresh)
        )
        scale = state.scale
        if scales_rows and worker.rounds.in_step:
            # Most of what the second moment learns it learns first: after 1, 2, 4, ... steps.
            again = functools.partial(worker.scale, opt_state, state.params)
            scale = jax.lax.cond(t & (t + 1) == 0, again, lambda: state.scale)
        after = state._replace(
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            orders=worker.order.observe(state.orders, rows) if observes else state.orders,
            averages=worker.averages.update(state.averages, state.params, t, total),
            scale=scale,
        )
        stats = state.stats.plus("step", worker, after, losses)
        first = (bad != -1) & (stats.bad_step < 0)
        return after._replace(
            stats=stats._replace(
                bad_step=jnp.where(first, t, stats.bad_step),
                bad_unit=jnp.where(first, jnp.where(bad < 0, bad, units[bad]), stats.bad_unit),
            )
        )

    return step


def bad_unit(finite_losses, finite_rows):
    """Index of the first unit that is not finite; -1: all are finite, -2: the unit is unknown."""
    named = finite_rows.size == finite_losses.size
    by_row = jnp.where(jnp.all(finite_rows), -1, jnp.argmin(finite_rows) if named else -2)
    by_loss = jnp.argmin(finite_losses)
    return jnp.where(jnp.all(finite_losses), by_row, by_loss).astype(jnp.int32)


def segment(worker: Worker, take: Callable, *, fresh: bool, size: int) -> Callable:
    """`(state, batch, start, stop, first, rates) -> state`, the steps of a segment of one worker.

    `take(batch, units)` selects these `size` units: of a fresh step the next of the order, of
    echoed ones all the same.
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
            return step(state, given, units, rates[t], t, len(rates))

        # The number of steps is not compiled in.
        return jax.lax.fori_loop(start, stop, body, state)

    return steps


def sync_of(worker: Worker) -> Callable:
    """`(state, rate, at) -> state`: the sync of one worker, with what `optimizers.inner` takes."""
    rounds = worker.rounds

    def sync(state, rate, at):
        params, opt_state = rounds.sync(state.params, state.opt_state, rate=rate, at=at)
        orders = worker.order.sync(state.orders) if worker.row.observes else state.orders
        state = state._replace(params=params, opt_state=opt_state, orders=orders)
        state = state._replace(stats=state.stats.plus("round", worker, state))
        return _scaled(worker, state) if worker.sketch else state  # factors are short to send

    return sync


def epoch_end_of(worker: Worker) -> Callable:
    """`state -> state`: the epoch's end of one worker."""

    def epoch_end(state):
        return _scaled(worker, state._replace(orders=worker.order.next_epoch(state.orders)))

    return epoch_end


def _scaled(worker: Worker, state: TrainState) -> TrainState:
    """The state with the present scale of what its order observes, if it is scaled."""
    if worker.scale is None:
        return state
    return state._replace(scale=worker.scale(state.opt_state, state.params))


def scale_of(
    task: Task,
    recipe: Recipe,
    rounds: local_opt.Rounds,
    sizes: Sizes,
    sketch: int | None,
    *,
    power: float,
) -> Callable:
    """`(state of rounds, params) -> scale` of one worker, the same for all of them.

    It is taken at the end of every epoch. Where workers synchronise in every step it is also taken
    after 1, 2, 4, ... steps; under local steps at every sync, if the order observes sketches. The
    first epoch of an exact order under local steps is not scaled.
    """
    params = jax.eval_shape(task.model.init, jax.random.key(0))
    leaves = None
    if sketch is not None and sketch < num_params(task.model):
        loss, unit = ordering.group_loss(task.model.loss), unit_of(task.train, sizes.unit_size)
        leaves = ordering.sketch_plan(loss, params, unit, key=jax.random.key(0), size=sketch)
    inner = optimizers.inner(recipe)
    moved = optax.GradientTransformation(
        inner.init, functools.partial(inner.update, rate=1.0, at=0.0)
    )
    of_state = functools.partial(ordering.second_moment_scale, moved, leaves=leaves, power=power)
    try:
        jax.eval_shape(of_state, jax.eval_shape(inner.init, params), params)
    except ValueError as error:
        raise UserError(
            f"--scale needs a second moment, and --optimizer={recipe.optimizer} has none: "
            f"pass --optimizer=adamw, or leave it out ({error})"
        ) from error

    def scale(state, params):
        if rounds.in_step:
            return of_state(state, params)
        return of_state(state.inner, params, axis_name=AXIS)

    return scale


def unit_of(train, unit_size: int):
    """The shapes of a batch of one unit."""
    few = train if isinstance(train, dict) else ordering.data.as_source(train)[:1]
    shape = lambda x: jax.ShapeDtypeStruct((1, unit_size, *x.shape[1:]), x.dtype)  # noqa: E731
    return jax.tree.map(shape, few)
