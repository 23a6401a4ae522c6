"""Rows of all workers, each device holding one slice of the parameters.

One all-to-all moves n gradients of D entries from each of W workers so that every device holds
all n W gradients, D / W entries each: the same bytes as the first half of an all-reduce. Partial
inner products over the slices, added up by a psum, are then exact.
"""

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from ordering import base, shards
from ordering import rows as rows_lib
from syncopate import mesh, plans

LANES = 128  # of a TPU's vector unit


def slice_size(entries: int, workers: int) -> int:
    """Entries of a gradient of D that one of W devices holds after an exchange: D / W, rounded up.

    From 128 on to a multiple of that: a TPU turns the gather of other slices into an all-reduce.
    """
    size = -(-entries // workers)
    return size if size < LANES else -(-size // LANES) * LANES


def shared_key(key: jax.Array, axis_name: str) -> jax.Array:
    """Worker 0's key, on every worker: coins drawn from it are the same everywhere."""
    plans.check_key(key)
    data = jax.random.key_data(key)
    mine = jnp.where(jax.lax.axis_index(axis_name) == 0, data, jnp.zeros_like(data))
    return jax.random.wrap_key_data(jax.lax.psum(mine, axis_name), impl=jax.random.key_impl(key))


def equal_once(tree, axis_name: str):
    """What is equal on all workers; those that vmap simulates keep, and compute with, one copy."""
    if {*mesh.names_of(axis_name)} & {*jax.sharding.get_abstract_mesh().manual_axes}:
        return tree

    def once(x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return shared_key(x, axis_name)
        first = jnp.where(jax.lax.axis_index(axis_name) == 0, x, jnp.zeros_like(x))
        return jax.lax.psum(first, axis_name).astype(x.dtype)

    return jax.tree.map(once, tree)


def exchange(rows: rows_lib.Rows, axis_name: str) -> rows_lib.Rows:
    """Rows of n units per worker become rows of n W units, sliced over the workers.

    The exchanged rows are in the interleaved order of the coordinated stream: unit 1 of every
    worker, then unit 2 of every worker, and so on. Inner products with them are partial: the sum
    over the axis (`jax.lax.psum`) completes them.

    Args:
      rows: local rows with a tree, leaves [n, ...].
      axis_name: the workers' axis, of `jax.vmap` or `jax.shard_map`.

    Returns:
      `Rows` of size n W whose tree is one array [n W, `slice_size`].

    Raises:
      ValueError: if the rows hold no gradients to send.

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> tree = lambda g: ordering.exchange.exchange(ordering.Rows.of(g), "worker").tree
      >>> jax.vmap(tree, axis_name="worker")(jnp.ones((4, 2, 6))).shape  # W, n W, ceil(6 / 4)
      (4, 8, 2)
    """
    base.check_stacked(rows)
    workers = jax.lax.axis_size(axis_name)
    leaves = [leaf.reshape(rows.size, -1) for leaf in jax.tree.leaves(rows.tree)]
    entries = sum(leaf.shape[1] for leaf in leaves)
    size = slice_size(entries, workers)
    zeros = jnp.zeros((rows.size, size * workers - entries), jnp.result_type(*leaves))
    if rows.size == 1:  # a matrix of one row would be laid out with seven empty ones
        parts = jnp.concatenate([leaf[0] for leaf in (*leaves, zeros)]).reshape(workers, size)
    else:
        parts = jnp.concatenate([*leaves, zeros], axis=1)
        parts = parts.reshape(rows.size, workers, size).swapaxes(0, 1)
    parts = jax.lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0, tiled=True)
    if rows.size > 1:
        parts = parts.swapaxes(0, 1).reshape(rows.size * workers, size)
    return rows_lib.Rows.of(parts)._replace(workers=workers)


def all_reduce_mean(mean, rows: rows_lib.Rows, *, axis_name: str = "worker"):
    """The mean gradient over all workers, by an all-reduce; the rows stay local.

    Args:
      mean: this worker's mean gradient; rows: its rows; axis_name: the workers' axis.

    Returns:
      (mean over the workers, rows).

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> mean = lambda g: ordering.all_reduce_mean(g[0], ordering.Rows.of(g))[0]
      >>> jax.vmap(mean, axis_name="worker")(jnp.array([[[1.0]], [[3.0]]])).tolist()
      [[2.0], [2.0]]
    """
    return jax.lax.pmean(mean, axis_name), rows


def all_to_all_mean(mean, rows: rows_lib.Rows, *, axis_name: str = "worker"):
    """The mean gradient over all workers and the rows of all workers, from one exchange.

    An all-to-all and an all-gather in place of the all-reduce of `all_reduce_mean`: with one unit
    per worker and step (`microbatch`) both move the same bytes, so coordination costs no volume.
    With an even number of units `all_reduce_mean` is the cheaper one, for `cd_grab` then sends
    differences.

    Args:
      mean: this worker's mean gradient, which gives structure, shapes and dtypes.
      rows: its rows, stacked; axis_name: the workers' axis.

    Returns:
      (mean over all units of all workers, exchanged rows for `cd_grab`).

    Raises:
      ValueError: if the rows hold no gradients to send, or the mesh has other axes beside.

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> mean = lambda g: ordering.all_to_all_mean(g[0], ordering.Rows.of(g))[0]
      >>> jax.vmap(mean, axis_name="worker")(jnp.array([[[1.0]], [[3.0]]])).tolist()
      [[2.0], [2.0]]

    References:
      Cooper et al., Coordinating Distributed Example Orders for Provably Accelerated Training,
      2023, https://arxiv.org/abs/2302.00845
    """
    shards.check_alone(axis_name, what="all_to_all_mean sends", act="Use all_reduce_mean.")
    rows = exchange(rows, axis_name)
    part = jnp.mean(rows_lib.as_float32(rows.tree), axis=0)
    flat = jax.lax.all_gather(part, axis_name, tiled=True)[: rows_lib.tree_size(mean)]
    template, unravel = ravel_pytree(mean)
    return unravel(flat.astype(template.dtype)), rows
