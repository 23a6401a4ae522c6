"""A submission that keeps what the judge's queue yields, and orders it from the second pass on.

The queue shuffles and repeats by itself and names no example, so that an order can be kept of
nothing but what has been received. Batches of the first pass are cut into units, one per worker,
which move together; the k-th that a worker receives is the k-th of its first, random order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import plain

from syncopate import local_opt

WORKERS = 4  # simulated, or on devices: local_opt.lift takes a mesh
UNIT = plain.BATCH // WORKERS


def received(pool, units, ids, batch):
    """The pool, leaves [W, M, UNIT, ...], with a batch of one unit per worker in its places."""
    new = jax.tree.map(lambda a: np.asarray(a).reshape(WORKERS, UNIT, *a.shape[1:]), batch)
    if pool is None:
        pool = jax.tree.map(lambda a: np.empty((WORKERS, units, *a.shape[1:]), a.dtype), new)
    for held, part in zip(jax.tree.leaves(pool), jax.tree.leaves(new), strict=True):
        held[np.arange(WORKERS), ids] = part
    return pool


def chosen(pool, ids):
    """The units `ids`, one of each worker, as one batch."""
    return jax.tree.map(
        lambda a: a[np.arange(WORKERS), ids].reshape(plain.BATCH, *a.shape[3:]), pool
    )


def submission(order_of):
    """(init_optimizer_state, update_params, data_selection) under an order of M units."""

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def train_step(workload, units, params, model_state, adam, orders, batch, rate, rng):
        def of_one(params, model_state, orders, batch, rng):
            grads, model_state = jax.grad(plain.mean_loss, has_aux=True)(
                params, workload, model_state, batch, rng
            )
            orders = order_of(units).observe(orders, jax.tree.map(lambda g: g[None], grads))
            return jax.lax.pmean(grads, "worker"), orders, model_state

        lifted = local_opt.lift(
            of_one, WORKERS, "shared shared owned split key -> shared owned mean"
        )
        grads, orders, model_state = lifted(params, model_state, orders, batch, rng)
        return *plain.moved(params, adam, grads, rate), orders, model_state

    next_epoch = jax.jit(
        lambda orders: jax.vmap(order_of(orders.current.shape[1]).next_epoch)(orders)
    )

    def init_optimizer_state(workload, model_params, model_state, hyperparameters, rng):
        state, _ = plain.init_optimizer_state(
            workload, model_params, model_state, hyperparameters, rng
        )
        units = workload.num_train_examples // plain.BATCH
        init = local_opt.lift(order_of(units).init, WORKERS, "key shared -> owned")
        orders = init(jax.random.wrap_key_data(jnp.asarray(rng)), model_params)
        return state | {"orders": orders}, {"ids": np.asarray(orders.current), "pool": None}

    def update_params(**given):
        """Keeps what is new here: `data_selection` may not change any state."""
        workload, step = given["workload"], given["global_step"]
        state, kept = given["optimizer_state"]
        ids, pool = kept["ids"], kept["pool"]
        units, place = ids.shape[1], step % ids.shape[1]
        if step < units:
            pool = received(pool, units, ids[:, place], given["batch"])
        params, adam, orders, model_state = train_step(
            workload, units, given["current_param_container"], given["model_state"],
            state["adam"], state["orders"], given["batch"],
            plain.rate_at(workload, given["hyperparameters"], step),
            jax.random.wrap_key_data(jnp.asarray(given["rng"])),
        )  # fmt: skip
        if place == units - 1:
            orders = next_epoch(orders)
            ids = np.asarray(orders.current)
        found = {"adam": adam, "orders": orders}, {"ids": ids, "pool": pool}
        return found, params, model_state

    def data_selection(workload, input_queue, optimizer_state, *rest):
        kept, step = optimizer_state[1], rest[3]
        ids = kept["ids"]
        if step < ids.shape[1]:
            return next(input_queue)
        return chosen(kept["pool"], ids[:, step % ids.shape[1]])

    return init_optimizer_state, update_params, data_selection
