"""Gradients over devices: inner products of parts, added up by a psum, are those of the whole.

Between workers: one all-to-all moves n gradients of D entries from each of W workers so that every
device holds all n W gradients, D / W entries each: the bytes of the first half of an all-reduce.
Inside a worker that is several devices: each observes its part of every gradient, and all agree.
These parts make up one gradient and do not overlap, and none ever leaves its device but to the
same place of another worker.
"""

import math

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from ordering import base
from ordering import rows as rows_lib
from ordering.base import Ordering, PyTree
from syncopate import mesh

LANES = 128  # of a TPU's vector unit
GIVE_SPECS = (
    "Pass specs=, how one gradient is split over them, or specs=jax.P() if it is whole on every "
    "device; if they hold other workers, name them all in axis_name."
)


def slice_size(entries: int, workers: int) -> int:
    """Entries of a gradient of D that one of W devices holds after an exchange: D / W, rounded up.

    From 128 on to a multiple of that: a TPU turns the gather of other slices into an all-reduce.
    """
    size = -(-entries // workers)
    return size if size < LANES else -(-size // LANES) * LANES


def shared_key(key: jax.Array, axis_name: str) -> jax.Array:
    """Worker 0's key, on every worker: coins drawn from it are the same everywhere."""
    mesh.axis_size(axis_name)  # raises outside of it
    base.check_key(key)
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


def check_slices(rows: rows_lib.Rows, workers: int, total) -> None:
    """Raises ValueError unless a running sum is the slice that rows of this width need."""
    base.check_stacked(rows)
    entries = rows_lib.tree_size(rows.tree) // rows.size
    needed = entries if rows.workers else slice_size(entries, workers)
    base.check_width(entries, needed, rows_lib.tree_size(total))


def exchange(rows: rows_lib.Rows, axis_name: str) -> rows_lib.Rows:
    """Rows of n units per worker become rows of n W units, [n W, `slice_size`] on every worker.

    In the interleaved order of the coordinated stream: unit 1 of every worker, then unit 2 of
    every worker, and so on. Inner products with them are partial: a psum over the axis completes
    them.
    """
    base.check_stacked(rows)
    workers = mesh.axis_size(axis_name)
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


def exchange_rows(
    rows: rows_lib.Rows, *, axis_name: str = "worker"
) -> tuple[PyTree, rows_lib.Rows]:
    """Sends the rows of all workers to `cd_grab`, and returns the mean gradient with them.

    mean = 1 / (n W) sum over workers w and units i of g_(w, i)

    An all-to-all and an all-gather replace the all-reduce of `jax.lax.pmean` and move the same
    bytes, so that with one unit per worker and step (`microbatch`) coordination sends nothing more.
    With an even number of units per step `jax.lax.pmean` is cheaper: `cd_grab` then sends pair
    differences, half as many as gradients.

    Args:
      rows: this worker's stacked rows of n units.
      axis_name: the workers' axis.

    Returns:
      (mean, exchanged rows): the mean gradient over all units of all workers, a tree like one
      gradient, equal on all workers; and what `cd_grab(...).observe` takes in place of `rows`.

    Raises:
      ValueError: if the rows hold no gradients, or the mesh has axes besides the workers'.

    Example:
      >>> import jax, jax.numpy as jnp, ordering
      >>> mean = lambda g: ordering.exchange_rows(ordering.Rows.of(g))[0]
      >>> jax.vmap(mean, axis_name="worker")(jnp.array([[[1.0]], [[3.0]]])).tolist()
      [[2.0], [2.0]]

    References:
      Cooper et al., Coordinating Distributed Example Orders for Provably Accelerated Training,
      2023, https://arxiv.org/abs/2302.00845
    """
    check_alone(axis_name, what="exchange_rows sends", act="Use jax.lax.pmean.")
    sent = exchange(rows, axis_name)
    part = jnp.mean(rows_lib.as_float32(sent.tree), axis=0)
    template, unravel = ravel_pytree(jax.tree.map(lambda g: g[0], rows.tree))
    flat = jax.lax.all_gather(part, axis_name, tiled=True)[: template.size]
    return unravel(flat.astype(template.dtype)), sent


def check_alone(axis_name, *, what: str, act: str = GIVE_SPECS, manual_only: bool = False) -> None:
    """Raises for mesh axes beside the workers'; if `manual_only`, not for the compiler's."""
    if others := mesh.beside(axis_name, manual_only=manual_only):
        raise ValueError(
            f"{what} under the mesh axes {others} beside the workers' {axis_name!r}: devices of "
            f"one worker must see the same numbers, and no gradient is gathered for it. {act}"
        )


def parts(tree, specs, axes, *, leading: int = 0):
    """This device's parts: shards as they are, and a share of each leaf that others hold too.

    Leaves are [..., *shard] with `leading` axes in front; one that is whole over some of a worker's
    `axes` becomes flat, with ceil(size / devices) entries.
    """

    def part(leaf, spec):
        whole = [axis for axis in axes if axis not in mesh.axes_in(spec)]
        if not whole:
            return leaf
        flat = leaf.reshape(*leaf.shape[:leading], -1)
        count = jax.lax.axis_size(tuple(whole))
        each = -(-flat.shape[-1] // count)
        padding = [(0, 0)] * leading + [(0, each * count - flat.shape[-1])]
        start = jax.lax.axis_index(tuple(whole)) * each
        return jax.lax.dynamic_slice_in_dim(jnp.pad(flat, padding), start, each, axis=leading)

    return jax.tree.map(part, tree, mesh.like(specs, tree))


def sharded(order: Ordering, specs, axes, *, state_specs, coordinated) -> Ordering:
    """An order over parts: `pair_balance` or `cd_grab` whose products are summed over `axes`.

    `state_specs` gives the state's specs from those of the running sum, which is one vector where
    workers are coordinated, and a tree like the parts where they are not.
    """

    def where(tree):
        """Where the state lives: parts of gradients in their places, all else on every device."""
        if coordinated:
            return state_specs(P(axes))
        # A share of a leaf that is whole over some axis is flat.
        flat = lambda spec: spec if len(mesh.axes_in(spec)) == len(axes) else P(axes)  # noqa: E731
        return state_specs(jax.tree.map(flat, mesh.like(specs, tree)))

    def init(key, params):
        found = jax.sharding.get_abstract_mesh()

        def run(key):
            local = jax.tree.map(
                lambda x, spec: jnp.zeros(_shard(jnp.shape(x), spec, found)),
                params,
                mesh.like(specs, params),
            )
            return order.init(key, parts(local, specs, axes))

        return mesh.over_shards(axes, run, P(), where(params))(key)

    def observe(state, rows):
        base.check_stacked(rows)
        if rows.workers is not None:
            raise ValueError(
                f"rows of {rows.workers} workers are exchanged already, and specs are given: "
                "take the mean gradient by jax.lax.pmean, which leaves rows where they are."
            )

        def run(state, tree):
            return order.observe(state, rows_lib.Rows.of(parts(tree, specs, axes, leading=1)))

        of_rows = jax.tree.map(lambda spec: P(None, *spec), mesh.like(specs, rows.tree))
        of_state = where(rows.tree)
        return mesh.over_shards(axes, run, (of_state, of_rows), of_state)(state, rows.tree)

    def next_epoch(state):
        of_state = where(state.running_sum)
        return mesh.over_shards(axes, order.next_epoch, (of_state,), of_state)(state)

    return Ordering(init, observe, next_epoch)


def _shard(shape, spec, over):
    """The shape of a shard, where these axes are not manual yet; else it is one already."""
    found = list(shape)
    for i, names in enumerate(spec):
        count = math.prod(over.shape[a] for a in mesh.names_of(names) if a not in over.manual_axes)
        if found[i] % count:
            raise ValueError(
                f"a leaf of shape {tuple(shape)} cannot be split as {spec}: {found[i]} is no "
                f"multiple of {count}. Use jax.P() for leaves that are whole."
            )
        found[i] //= count
    return found
