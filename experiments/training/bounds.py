"""Parallel herding bounds of the workers' present orders, which evaluations measure."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import local_opt
from experiments.training import input, placement
from ordering.rows import Rows, flat, tree_size

HELD = 2**16  # numbers of the gradients that a herding bound holds at once, or one gradient


def bounds_of(task, recipe, built, order, compiled: Callable) -> tuple[Callable | None, Any]:
    """(`order_bounds`, its data); the first is None if it is not asked for or units have no owner.
    `compiled` is a cache of `order_bounds` for the task's model."""
    if not recipe.bound_every or order.deals:
        return None, None
    sizes, data = built.sizes, built.data
    over = built.sharding.mesh if built.sharding else sizes.workers
    if data is None:
        owned = input.partition(task.train, sizes, built.source.units)
        data = placement.place(owned, built.sharding)
    return compiled(over, num_units=sizes.num_units), data


def order_bounds(model, over, *, num_units: int) -> Callable:
    """`(params, orders, data) -> float32[2]`: parallel herding bounds at fixed parameters.

    max over k of |sum_{j <= k} sum_w (g_{w, order_w(j)} - mean g)| in the norms L-infinity and
    L2, over all units of all workers. It passes over the data twice, and holds the gradients of a
    few units, summed over the workers. `over` is W or the workers' mesh; the data have leaves
    [W, M, unit_size, ...].
    """

    def losses(points, order, data, start):
        """Of a worker: the sum of its units' losses from `start` on, each at its own `points`."""
        size = jax.tree.leaves(points)[0].shape[0]
        units = jax.lax.dynamic_slice_in_dim(order, start, size)
        of_unit = lambda point, unit: jnp.mean(model.loss(point, unit, jax.random.key(0)))  # noqa: E731
        return jnp.sum(jax.vmap(of_unit)(points, jax.tree.map(lambda x: x[units], data)))

    lifted = local_opt.lift(losses, over, inputs="shared owned owned shared", outputs="owned")

    def bounds(params, orders, data):
        size = tree_size(params)
        at_once = min(num_units, max(1, HELD // size))
        whole = num_units // at_once * at_once

        def rows_of(start, count):
            """[count, D]: gradients of the units in these places, summed over the workers."""
            total = lambda points: jnp.sum(lifted(points, orders, data, start))  # noqa: E731
            points = jax.tree.map(lambda p: jnp.broadcast_to(p, (count, *p.shape)), params)
            return flat(Rows.of(jax.grad(total)(points)))

        def fold(function, carry):
            """Folds `function(carry, rows)` over the places of an epoch."""
            step = lambda carry, start: (function(carry, rows_of(start, at_once)), None)  # noqa: E731
            carry, _ = jax.lax.scan(step, carry, jnp.arange(0, whole, at_once))
            rest = num_units - whole
            return function(carry, rows_of(whole, rest)) if rest else carry

        zeros = jnp.zeros(size)
        mean = fold(lambda total, rows: total + jnp.sum(rows, axis=0), zeros) / num_units

        def follow(carry, rows):
            prefix, bound = carry
            prefixes = prefix[None] + jnp.cumsum(rows - mean[None], axis=0)
            norms = [jnp.max(jnp.abs(prefixes)), jnp.sqrt(jnp.max(jnp.sum(prefixes**2, axis=1)))]
            return prefixes[-1], jnp.maximum(bound, jnp.stack(norms))

        return fold(follow, (zeros, jnp.zeros(2)))[1]

    return jax.jit(bounds)
