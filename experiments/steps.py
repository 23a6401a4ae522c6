"""What one worker does in a step and in an epoch, written with the named axis "worker"."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import ordering
from local_opt.runners import AXIS


class TrainState(NamedTuple):
    """What all workers share in synchronous data parallelism."""

    params: Any
    opt_state: Any
    step: jax.Array  # int32[]


class StepMetrics(NamedTuple):
    """What one worker saw in one step."""

    loss: jax.Array  # float32[], mean over its units
    bad_unit: (
        jax.Array
    )  # int32[], a unit whose loss or gradient is not finite; -1: none, -2: one of them


def init_train_state(params, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def unit_gradients(
    loss: Callable, *, units_per_step: int, observes: bool = True, mixes: bool = False
) -> Callable:
    """Gradients of B units from batches with leaves [B, unit_size, ...].

    One unit per step costs a plain gradient; more of them cost one gradient each, which is spared
    where no order looks at them (the rows are then one: the mean), unless the loss `mixes` the
    examples of its batch, which must then be a unit for every order.
    """
    if units_per_step == 1 or not (observes or mixes):

        def merged(params, batch, key):
            flat = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), batch)
            losses = loss(params, flat, key)
            unit_losses = jnp.mean(losses.reshape(units_per_step, -1), axis=1)
            return jnp.mean(losses), unit_losses

        def gradients(params, batch, key):
            (_, losses), mean = jax.value_and_grad(merged, has_aux=True)(params, batch, key)
            return losses, mean, ordering.Rows.of(jax.tree.map(lambda g: g[None], mean))

        return gradients

    def unit_losses(params, batch, key):
        return jax.vmap(lambda unit: jnp.mean(loss(params, unit, key)))(batch)

    return ordering.per_example(unit_losses)


def worker_step(
    loss: Callable,
    optimizer: optax.GradientTransformation,
    *,
    observes: bool = True,
    exchanges: bool = False,
    mixes: bool = False,
) -> Callable:
    """`(train, batch, key) -> (train, rows, loss, place of a bad unit, -1 or -2)` of one worker.

    Args:
      loss: per-example losses; optimizer: takes the mean gradient over all workers.
      observes: whether an order will look at the rows.
      exchanges: whether the mean comes from the exchange that a coordinated order needs anyway,
        which moves the same bytes where there is one unit per step.
      mixes: whether the loss of an example depends on its batch (normalisation over batches).
    """
    reduce = ordering.all_to_all_mean if exchanges else ordering.all_reduce_mean

    def step(train, batch, key):
        size = jax.tree.leaves(batch)[0].shape[0]  # the last step of an epoch may be shorter
        gradients = unit_gradients(loss, units_per_step=size, observes=observes, mixes=mixes)
        losses, mean, rows = gradients(train.params, batch, key)
        bad = bad_unit(jnp.isfinite(losses), ordering.rows.finite_units(rows))
        mean, rows = reduce(mean, rows, axis_name=AXIS)
        updates, opt_state = optimizer.update(mean, train.opt_state, train.params)
        params = optax.apply_updates(train.params, updates)
        return TrainState(params, opt_state, train.step + 1), rows, jnp.mean(losses), bad

    return step


def bad_unit(finite_losses, finite_rows):
    """Place of the first unit that is not finite; -1 if all are, -2 if only their sum shows it."""
    named = finite_rows.size == finite_losses.size
    by_row = jnp.where(jnp.all(finite_rows), -1, jnp.argmin(finite_rows) if named else -2)
    by_loss = jnp.argmin(finite_losses)
    return jnp.where(jnp.all(finite_losses), by_row, by_loss).astype(jnp.int32)


def units_per_observe(units_per_step: int) -> int:
    """Units an order is shown at once: an odd B takes two steps, so that no pair is split."""
    return units_per_step * (1 + units_per_step % 2)


def worker_chunk(
    step: Callable, order: ordering.Ordering, *, units_per_step: int, observes: bool = True
) -> Callable:
    """`(train, order state, batch, units, key) -> (train, order state, StepMetrics[t])`.

    The t steps over the units of one batch, leaves [b, unit_size, ...] with b at most
    `units_per_observe(B)`, then one look of the order at them; `units` is int32[b], their numbers.
    """

    def chunk(train, order_state, batch, units, key):
        seen, metrics = None, []
        for start in range(0, units.shape[0], units_per_step):
            place = slice(start, start + units_per_step)
            part = jax.tree.map(lambda x, place=place: x[place], batch)
            train, rows, loss, bad = step(train, part, jax.random.fold_in(key, train.step))
            seen = rows if seen is None or not observes else ordering.rows.concatenate(seen, rows)
            metrics.append(StepMetrics(loss, jnp.where(bad < 0, bad, units[place][bad])))
        if observes:
            order_state = order.observe(order_state, seen)
        return train, order_state, jax.tree.map(lambda *m: jnp.stack(m), *metrics)

    return chunk


def worker_epoch(chunk: Callable, order: ordering.Ordering, *, num_units: int, shown: int):
    """`(train, order state, data, key) -> (train, order state, StepMetrics[T])`, one epoch.

    `data` holds this worker's units, leaves [M, unit_size, ...], on the device. The epoch is one
    scan over chunks of `shown` units and, where that does not divide M, a shorter last one.
    """
    whole = num_units // shown * shown

    def take(carry, data, key, start, size):
        train, order_state = carry
        units = jax.lax.dynamic_slice_in_dim(order_state.current, start, size)
        batch = jax.tree.map(lambda x: x[units], data)
        train, order_state, metrics = chunk(train, order_state, batch, units, key)
        return (train, order_state), metrics

    def epoch(train, order_state, data, key):
        carry, metrics = jax.lax.scan(
            lambda carry, start: take(carry, data, key, start, shown),
            (train, order_state),
            jnp.arange(0, whole, shown),
        )
        metrics = jax.tree.map(lambda m: m.reshape(-1), metrics)
        if whole < num_units:
            carry, last = take(carry, data, key, whole, num_units - whole)
            metrics = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), metrics, last)
        train, order_state = carry
        return train, order.next_epoch(order_state), metrics

    return epoch
