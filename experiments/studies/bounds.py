"""The parallel herding bound of a run's orders, at the parameters where it stands."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.processes import distributed
from experiments.training import input
from experiments.training.step import unit_gradients
from local_opt import runners
from ordering.rows import flat, tree_size


def bounds_of(task, recipe, built, order) -> Callable | None:
    """`(params, orders) -> the parallel herding bound`; None where it is not asked for, or units
    have no owner."""
    if not recipe.bound_every or order.deals:
        return None
    sizes, data, of_all = built.sizes, built.data, runners.simulate
    if built.sharding is not None:
        of_all = runners.over_mesh(built.sharding.mesh)
    if data is None:
        owned = input.partition(task.train, sizes, built.source.units)
        data = distributed.place(owned, built.sharding)
    bound = order_bounds(
        task.model, of_all, num_units=sizes.num_units, units_per_step=sizes.units_per_step
    )

    def measure(params, orders):
        found = distributed.on_host(bound(params, orders, data))
        return {
            f"bound/{norm}": float(value) for norm, value in zip(("linf", "l2"), found, strict=True)
        }

    return measure


def order_bounds(model, run: Callable, *, num_units: int, units_per_step: int) -> Callable:
    """`(params, orders, data) -> float32[2]`: parallel herding bounds at fixed parameters.

    max over k of |sum_{j <= k} sum_w (g_{w, order_w(j)} - mean g)| in the norms L-infinity and
    L2, over all units of all workers. Two passes over the data, memory for one step's gradients.
    `run` is `simulate` or `over_mesh(mesh)` of `local_opt.runners`; the data has leaves
    [W, M, unit_size, ...].
    """
    whole = num_units // units_per_step * units_per_step

    def rows_of(params, order, data, start, size):
        units = jax.lax.dynamic_slice_in_dim(order, start, size)
        batch = jax.tree.map(lambda x: x[units], data)
        gradients = unit_gradients(model.loss, units_per_step=size, separate=True)
        return flat(gradients(params, batch, jax.random.key(0))[2])

    def scan_units(function, carry, params, order, data):
        """Folds `function(carry, rows summed over the workers)` over the steps of an epoch."""

        def step(carry, start, size):
            rows = jax.lax.psum(rows_of(params, order, data, start, size), runners.AXIS)
            return function(carry, rows)

        starts = jnp.arange(0, whole, units_per_step)
        carry, _ = jax.lax.scan(
            lambda c, start: (step(c, start, units_per_step), None), carry, starts
        )
        return step(carry, whole, num_units - whole) if whole < num_units else carry

    def bounds(params, order, data):
        zeros = jnp.zeros(tree_size(params))
        total = scan_units(lambda t, rows: t + jnp.sum(rows, axis=0), zeros, params, order, data)
        mean = total / num_units

        def follow(carry, rows):
            prefix, bound = carry
            prefixes = prefix[None] + jnp.cumsum(rows - mean[None], axis=0)
            norms = [jnp.max(jnp.abs(prefixes)), jnp.sqrt(jnp.max(jnp.sum(prefixes**2, axis=1)))]
            return prefixes[-1], jnp.maximum(bound, jnp.stack(norms))

        return scan_units(follow, (zeros, jnp.zeros(2)), params, order, data)[1]

    def wrapped(params, order, data):
        return (bounds(params, order, data),)

    mapped = run(wrapped, owned_in=(False, True, True), owned_out=(False,))
    return jax.jit(lambda params, orders, data: mapped(params, orders, data)[0])
