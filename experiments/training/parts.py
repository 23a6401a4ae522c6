"""What a segment is made of, before any data are there: the compiled parts of a run."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import local_opt
import ordering
from experiments.tasks.base import Recipe, Task
from experiments.training import input, optimizers, step
from experiments.training.config import Order, OrderSetting, Sizes
from experiments.training.step import HostOrder, TrainState
from local_opt import runners


class Parts(NamedTuple):
    """What a segment is made of, before any data are there."""

    row: Order
    order: ordering.Ordering
    rounds: local_opt.Rounds
    steps: dict[bool, Callable]  # fresh, echoed
    rest: dict[bool, Callable]  # the same of examples that fill no unit of all workers
    owned: tuple[bool, ...]  # which fields of the state have a worker axis
    sizes: Sizes
    sketch: int | None  # k of what the order looks at; None: gradients
    skips: bool  # updates that are not finite


def parts_of(
    task: Task, recipe: Recipe, row: Order, rounds_of: Callable, sizes: Sizes, *,
    proximal=0.0, mesh=None, epochs=None,
) -> Parts:  # fmt: skip
    """The parts of a training of `task`, whose data may be shapes only."""
    epochs = epochs or recipe.epochs or 1
    block_size = None if mesh else _simulated_block_size(task.model, sizes.workers)
    shared = rounds_of is local_opt.parallel_rounds
    order = row.make(order_setting(sizes, shared, epochs, block_size))
    inner = optimizers.inner(recipe, proximal=proximal)
    rounds = rounds_of(inner, axis_name=runners.AXIS)
    exchange, fresh_rounds = None, rounds
    # Among simulated workers nothing travels: there the exchange is only more work.
    exchanges = row.coordinated and row.sketch is None
    if shared and exchanges and sizes.units_per_step == 1 and mesh is not None:
        exchange = functools.partial(ordering.all_to_all_mean, axis_name=runners.AXIS)
        fresh_rounds = rounds._replace(update=inner.update)
    sketch, skips = sketch_size(row, task.model), recipe.nonfinite == "skip"
    steps = {
        True: step.worker_step(
            task.model, row, order, fresh_rounds, fresh=True, exchange=exchange, sketch=sketch,
            skips=skips,
        ),
        False: step.worker_step(task.model, row, order, rounds, fresh=False, skips=skips),
    }  # fmt: skip
    rest = {
        fresh: step.rest_step(task.model, rounds, fresh=fresh, skips=skips)
        for fresh in (True, False)
    }
    owned = (not shared, not shared, True, True, True)
    return Parts(row, order, rounds, steps, rest, owned, sizes, sketch, skips)


def _simulated_block_size(model, num_workers):
    """Reductions over simulated workers cost nothing: take what is fastest for one slice of r."""
    return ordering.balance.default_block_size(-(-num_params(model) // num_workers))


def order_setting(sizes: Sizes, sync_in_step: bool, epochs=1, block_size=None) -> OrderSetting:
    """What an order is told; sketches are gathered where the workers meet."""
    gathers = "step" if sync_in_step else "sync"
    workers = sizes.workers
    return OrderSetting(sizes.num_units, sizes.units_per_step, workers, epochs, block_size, gathers)


def sketch_size(row: Order, model) -> int | None:
    """k of what an order looks at, at most D; None: gradients."""
    return row.sketch and min(row.sketch, num_params(model))


def num_params(model) -> int:
    """D, without making any."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def steps_of(parts: Parts, run, reads: bool) -> Callable:
    """(fresh, units, of the rest) -> the compiled steps of a segment, all in one loop."""
    if reads:
        take = lambda batch, units: batch  # noqa: E731
    else:
        take = input.take_units
    own_batch = reads or not parts.row.deals

    def compiled(fresh: bool, size: int, rest: bool):
        steps = step.worker_steps(
            parts.rest[fresh] if rest else parts.steps[fresh],
            (lambda batch, units: batch) if rest else take,
            fresh=fresh,
            size=1 if rest else size,  # which units that would be is not asked of the rest
            units_per_step=parts.sizes.units_per_step,
        )
        owned_in = (*parts.owned, own_batch or rest, False, False, False, False)
        return jitted(steps, run, owned_in, parts.owned)

    return functools.cache(compiled)


def ends_of(parts: Parts, run) -> Callable:
    """(sync, epoch_end) -> what is compiled of what follows a segment's last step."""

    def compiled(sync: bool, epoch_end: bool):
        end = step.worker_end(
            parts.row, parts.order, parts.rounds, sync=sync, epoch_end=epoch_end, skips=parts.skips
        )
        return jitted(end, run, (*parts.owned, False), parts.owned)

    return functools.cache(compiled)


def jitted(function, run, owned_in, owned_out):
    """`(state, ...) -> state` of all workers, from that of one."""
    mapped = run(
        lambda *a: tuple(function(TrainState(*a[:5]), *a[5:])),
        owned_in=owned_in,
        owned_out=owned_out,
    )
    return jax.jit(lambda state, *rest: TrainState(*mapped(*state, *rest)), donate_argnums=0)


def state_shapes(parts: Parts, model, run=runners.simulate) -> TrainState:
    """The shapes of a state of all workers."""
    workers, (own, *_) = parts.sizes.workers, parts.owned
    params = jax.eval_shape(model.init, jax.random.key(0))
    if own:
        wide = lambda p: jax.ShapeDtypeStruct((workers, *p.shape), p.dtype)  # noqa: E731
        params = jax.tree.map(wide, params)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), workers))
    given = jax.ShapeDtypeStruct((workers, parts.sizes.num_units), jnp.int32)
    given = given if parts.row.on_host else None
    return TrainState(*jax.eval_shape(start_of(parts, run), params, keys, given, keys))


def start_of(parts: Parts, run) -> Callable:
    """`(params, keys of orders, orders of the host, keys) -> the fields of a TrainState`."""

    def start(params, order_key, given, key):
        like = params if parts.sketch is None else jnp.zeros(parts.sketch)
        orders = HostOrder(given) if parts.row.on_host else parts.order.init(order_key, like)
        return params, parts.rounds.init(params), orders, key, step.zero_stats(skips=parts.skips)

    return run(start, owned_in=(parts.owned[0], True, True, True), owned_out=parts.owned)
