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
import ordering
from experiments.training.config import EXAMPLES, Order
from ordering.rows import finite_units

# One map for all workers and runs.
SKETCH_KEY = functools.partial(jax.random.key, 1907)


class StepStats(NamedTuple):
    """What a worker has seen since the last evaluation."""

    loss: jax.Array  # float32[], summed over steps
    bad_step: jax.Array  # int32[], the first step whose loss or gradient is not finite; -1: none
    bad_unit: jax.Array  # int32[], which unit it was; -2: one of them
    drift: jax.Array  # float32[], summed over syncs: how far it was from the workers' mean
    # int32[2], updates left out and losses that are not in the sum; None: such a run is stopped
    skipped: Any = None


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


class HostOrder(NamedTuple):
    """State of an order that is drawn on the host."""

    current: jax.Array  # int32[M]


def zero_stats(*, skips: bool = False) -> StepStats:
    """A worker's stats at the start and after every evaluation."""
    none = jnp.full((), -1, jnp.int32)
    skipped = jnp.zeros(2, jnp.int32) if skips else None
    return StepStats(jnp.zeros(()), none, none, jnp.zeros(()), skipped)


def unit_gradients(
    loss: Callable, *, units_per_step: int, separate: bool, sketch: int | None = None
) -> Callable:
    """Gradients of B units from batches with leaves [B, unit_size, ...].

    One unit per step costs a plain gradient; more of them cost one gradient each, which is spared
    unless they must be `separate`: the rows are then one, the mean. With `sketch` numbers that
    stand for a gradient, they cost a plain gradient too.
    """
    if units_per_step == 1 or not separate:

        def merged(params, batch, key):
            flat = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), batch)
            losses = loss(params, flat, key)
            unit_losses = jnp.mean(losses.reshape(units_per_step, -1), axis=1)
            return jnp.mean(losses), unit_losses

        def gradients(params, batch, key):
            (_, losses), mean = jax.value_and_grad(merged, has_aux=True)(params, batch, key)
            rows = ordering.Rows.of_one(mean)
            if sketch and separate:
                rows = ordering.sketch_rows(rows, ordering.sketch(SKETCH_KEY(), size=sketch))
            return losses, mean, rows

        return gradients

    if sketch:
        return ordering.sketched(ordering.grouped(loss), SKETCH_KEY(), size=sketch)
    return ordering.per_example(ordering.grouped(loss))


def worker_step(
    model,
    row: Order,
    order: ordering.Ordering,
    rounds: local_opt.Rounds,
    *,
    fresh: bool,
    exchange: Callable | None = None,
    sketch: int | None = None,
    skips: bool = False,
) -> Callable:
    """`(state, batch, units, rate, t) -> state`, a step of one worker.

    Args:
      row, order: of ORDERS, and what it made; only fresh steps observe.
      exchange: from this worker's (mean, rows) to those of all, where coordination and the mean
        gradient share one exchange; then `rounds` takes the mean as it is.
      sketch: k of what the order looks at; None: gradients.
      skips: updates that are not finite are left out and counted. Where workers meet in every step
        one that is not makes the mean so, and all leave it out.
    """
    observes = fresh and row.observes
    # A loss that mixes its batch has no gradient of single units: the unit is then the same for
    # every order, but for dealt examples, whose batch is the unit.
    separate = observes or (model.statistics is not None and row.deals != EXAMPLES)

    def step(state, batch, units, rate, t):
        gradients = unit_gradients(
            model.loss,
            units_per_step=units.shape[0],
            separate=separate,
            sketch=sketch,
        )
        losses, mean, rows = gradients(state.params, batch, jax.random.fold_in(state.key, t))
        bad = bad_unit(jnp.isfinite(losses), finite_units(rows))
        mean = marked(mean, bad) if skips else mean
        if exchange is not None:
            mean, rows = exchange(mean, rows)
        seen = Seen(jnp.mean(losses), bad, units, t)
        taken = take_step(state, mean, seen, rounds, rate=rate, fresh=fresh, skips=skips)
        orders = order.observe(state.orders, rows) if observes else state.orders
        return taken._replace(orders=orders)

    return step


def rest_step(model, rounds: local_opt.Rounds, *, fresh: bool, skips: bool = False) -> Callable:
    """As `worker_step`, of examples that fill no unit of all workers, and that no order observes.

    Its batch is (examples, weights float32[n]): some workers may have fewer of them, or none.
    """

    def step(state, batch, units, rate, t):
        examples, weights = batch

        def weighted(params):
            losses = model.loss(params, examples, jax.random.fold_in(state.key, t))
            return jnp.sum(weights * losses), losses

        (loss, losses), mean = jax.value_and_grad(weighted, has_aux=True)(state.params)
        bad = bad_unit(jnp.isfinite(losses), jnp.isfinite(optax.tree.norm(mean))[None])
        bad = jnp.where(bad == -1, -1, -2)  # it is no unit
        mean = marked(mean, bad) if skips else mean
        seen = Seen(loss, bad, units, t)
        return take_step(state, mean, seen, rounds, rate=rate, fresh=fresh, skips=skips)

    return step


class Seen(NamedTuple):
    """What a step has seen: the mean loss, the place of a unit that is not finite, units, t."""

    loss: jax.Array
    bad: jax.Array
    units: jax.Array
    t: jax.Array


def marked(mean, bad):
    """The gradient, not finite where a loss is not: others, who may be told, then see it."""
    return jax.tree.map(lambda g: jnp.where(bad == -1, g, jnp.nan), mean)


def take_step(state, mean, seen: Seen, rounds, *, rate, fresh, skips) -> TrainState:
    """The state after an update by this gradient, or without it where it is not finite."""
    # The proximal anchor asks whether the batch is new.
    updates, opt_state = rounds.update(
        mean, state.opt_state, state.params, rate=rate, fresh=jnp.bool_(fresh)
    )
    if skips:
        updates, opt_state, taken = finite_update(updates, opt_state, state.opt_state)
        stats = _count(state.stats, seen.loss, taken)
    else:
        stats = _add(state.stats, *seen)
    params = optax.apply_updates(state.params, updates)
    return state._replace(params=params, opt_state=opt_state, stats=stats)


def bad_unit(finite_losses, finite_rows):
    """Place of the first unit that is not finite; -1 if all are, -2 if only their sum shows it."""
    named = finite_rows.size == finite_losses.size
    by_row = jnp.where(jnp.all(finite_rows), -1, jnp.argmin(finite_rows) if named else -2)
    by_loss = jnp.argmin(finite_losses)
    return jnp.where(jnp.all(finite_losses), by_row, by_loss).astype(jnp.int32)


def finite_update(updates, opt_state, before):
    """(updates, the state of `Rounds`, True); zeros, the state before and False if any is not."""
    taken = all_finite(updates)
    chosen = jax.tree.map(lambda new, old: jnp.where(taken, new, old), opt_state, before)
    if hasattr(opt_state, "since"):  # rounds count steps, and are as long for all workers
        chosen = chosen._replace(since=opt_state.since)
    return jax.tree.map(lambda u: jnp.where(taken, u, 0), updates), chosen, taken


def all_finite(tree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]))


def _count(stats, loss, taken):
    finite = jnp.isfinite(loss)
    skipped = stats.skipped + jnp.stack([~taken, ~finite])
    return stats._replace(loss=stats.loss + jnp.where(finite, loss, 0), skipped=skipped)


def _add(stats, loss, bad, units, t):
    first = (bad != -1) & (stats.bad_step < 0)
    return stats._replace(
        loss=stats.loss + loss,
        bad_step=jnp.where(first, t, stats.bad_step),
        bad_unit=jnp.where(first, jnp.where(bad < 0, bad, units[bad]), stats.bad_unit),
    )


def worker_steps(step: Callable, take: Callable, *, fresh: bool, size: int, units_per_step: int):
    """`(state, batch, start, stop, first, rates) -> state`, the steps of a segment of one worker.

    `take(batch, units)` is the batch of these units, out of what the segment was handed. A fresh
    step takes the next units of the order; echoed ones all take the same.
    """

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


def worker_end(
    row: Order, order: ordering.Ordering, rounds: local_opt.Rounds, *, sync: bool, epoch_end: bool,
    skips: bool = False,
):  # fmt: skip
    """`(state, rate) -> state`: the sync and the epoch's end of one worker.

    Args:
      skips: accumulated gradients that are not finite are left out by all, and counted.
    """

    def end(state, rate):
        if sync:
            params, opt_state = rounds.sync(state.params, state.opt_state, rate=rate)
            stats = state.stats
            if isinstance(opt_state, local_opt.LocalState):
                stats = stats._replace(drift=stats.drift + opt_state.drift)
            elif skips and isinstance(opt_state, local_opt.AccumulateState):
                taken = all_finite(params)
                params, inner = jax.tree.map(
                    lambda new, old: jnp.where(taken, new, old),
                    (params, opt_state.inner), (state.params, state.opt_state.inner),
                )  # fmt: skip
                opt_state = opt_state._replace(inner=inner)
                stats = stats._replace(skipped=stats.skipped.at[0].add(~taken))
            orders = order.sync(state.orders) if row.observes else state.orders
            state = state._replace(params=params, opt_state=opt_state, stats=stats, orders=orders)
        if epoch_end:
            state = state._replace(orders=order.next_epoch(state.orders))
        return state

    return end
