"""Gradients split over devices. A psum over inner products of the parts gives those of the whole.

Between workers, one all-to-all moves n gradients of D entries from each of W workers, so that every
device holds D / W entries of all n W gradients. It sends as much as the first half of an
all-reduce. Inside a worker of several devices, each device observes its part of every gradient, and
all get the same signs. The parts do not overlap, and each is sent only to the device in the same
place of another worker.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key, PyTree

from ordering import base
from ordering import rows as rows_lib
from ordering.base import Ordering
from ordering.rows import Rows
from syncopate import mesh

LANES = 128  # of a TPU's vector unit
GIVE_SPECS = (
    "Pass specs=, how one gradient is split over these axes, or specs=jax.P() if every device has "
    "all of it; if these axes hold workers, too, name all of them in axis_name."
)


def slice_size(entries: int, workers: int) -> int:
    """How many of a gradient's D entries one of W devices holds after an exchange: D / W, or more.

    Rounded up, from 128 on to a multiple of 128: a TPU compiles other gathers to an all-reduce.
    """
    size = -(-entries // workers)
    return size if size < LANES else -(-size // LANES) * LANES


def shared_key(key: Key[Array, ""], axis_name: str) -> Key[Array, ""]:
    """Worker 0's key, on every worker, for random numbers that are equal on all workers."""
    mesh.axis_size(axis_name)  # raises outside of the axis
    base.check_key(key)
    data = jax.random.key_data(key)
    mine = jnp.where(jax.lax.axis_index(axis_name) == 0, data, jnp.zeros_like(data))
    return jax.random.wrap_key_data(jax.lax.psum(mine, axis_name), impl=jax.random.key_impl(key))


def simulated(axis_name: str) -> bool:
    """Whether the workers are on one device, under `jax.vmap`."""
    return not {*mesh.names_of(axis_name)} & {*jax.sharding.get_abstract_mesh().manual_axes}


def equal_once(tree: PyTree, axis_name: str) -> PyTree:
    """A tree that is equal on all workers; where they are simulated one copy, so not batched."""
    if not simulated(axis_name):
        return tree

    def once(x):
        if mesh.is_key(x):
            return shared_key(x, axis_name)
        first = jnp.where(jax.lax.axis_index(axis_name) == 0, x, jnp.zeros_like(x))
        return jax.lax.psum(first, axis_name).astype(x.dtype)

    return jax.tree.map(once, tree)


def joined(slices: Array, entries: int, axis_name: str) -> Array:
    """Simulated workers' slices [..., `slice_size`] as one array [..., D], not batched."""
    return jax.lax.all_gather(slices, axis_name, axis=slices.ndim - 1, tiled=True)[..., :entries]


def own_slice(array: Array, size: int, axis_name: str) -> Array:
    """This worker's slice of what `joined` put together."""
    missing = size * mesh.axis_size(axis_name) - array.shape[-1]
    padded = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)])
    start = jax.lax.axis_index(axis_name) * size
    return jax.lax.dynamic_slice_in_dim(padded, start, size, axis=array.ndim - 1)


def exchange(rows: Rows, axis_name: str) -> Array:
    """From rows of n units on each worker, this device's slice of all n W: [n W, `slice_size`].

    Unit 1 of every worker comes first, then unit 2 of every worker, and so on, as `cd_grab` signs
    them. Inner products with these rows are partial: a psum over the axis completes them. Where
    workers are simulated, the one device holds the whole rows, [n W, D].
    """
    base.check_is_rows(rows, stacked=True)
    workers = mesh.axis_size(axis_name)
    leaves = [leaf.reshape(rows.size, -1) for leaf in jax.tree.leaves(rows.tree)]
    if simulated(axis_name):
        everyone = jax.lax.all_gather(jnp.concatenate(leaves, axis=1), axis_name)
        return everyone.swapaxes(0, 1).reshape(rows.size * workers, -1)
    entries = sum(leaf.shape[1] for leaf in leaves)
    size = slice_size(entries, workers)
    zeros = jnp.zeros((rows.size, size * workers - entries), jnp.result_type(*leaves))
    if rows.size == 1:  # no matrix of one row, which a TPU would pad to eight
        parts = jnp.concatenate([leaf[0] for leaf in (*leaves, zeros)]).reshape(workers, size)
    else:
        parts = jnp.concatenate([*leaves, zeros], axis=1)
        parts = parts.reshape(rows.size, workers, size).swapaxes(0, 1)
    parts = jax.lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0, tiled=True)
    if rows.size > 1:
        parts = parts.swapaxes(0, 1).reshape(rows.size * workers, size)
    return parts


def exchange_rows(rows: Rows, *, axis_name: str = "worker") -> tuple[PyTree, Rows]:
    """Exchanges the workers' rows for `cd_grab`, and averages the gradients at no further cost.

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

    Examples:
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
    part = jnp.mean(rows_lib.as_float32(sent), axis=0)
    # A mean of integers is not one.
    as_mean = lambda g: g if jnp.issubdtype(g.dtype, jnp.floating) else rows_lib.as_float32(g)  # noqa: E731
    template, unravel = ravel_pytree(jax.tree.map(lambda g: as_mean(g)[0], rows.tree))
    whole = part if simulated(axis_name) else jax.lax.all_gather(part, axis_name, tiled=True)
    flat = whole[: template.size]
    exchanged = Rows.of(sent)._replace(workers=len(sent) // rows.size)
    return unravel(flat.astype(template.dtype)), exchanged


def check_alone(
    axis_name: str, *, what: str, act: str = GIVE_SPECS, manual_only: bool = False
) -> None:
    """Raises ValueError if the mesh has axes (`manual_only`: manual axes) beside the workers'."""
    if others := mesh.beside(axis_name, manual_only=manual_only):
        raise ValueError(
            f"{what} under the mesh axes {others} beside the workers' {axis_name!r}, over which "
            f"gradients are not gathered: all devices of a worker need the same numbers. {act}"
        )


def parts(tree: PyTree, specs: PyTree, axes: tuple[str, ...], *, leading: int = 0) -> PyTree:
    """This device's parts of a worker's arrays, so that no entry is on two devices.

    Leaves are [..., *shard] with `leading` axes in front. A shard is kept as it is; a leaf that is
    replicated over some of the worker's `axes` becomes a flat share, ceil(size / devices) entries.
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


def sharded(
    order: Ordering, specs: PyTree, axes: tuple[str, ...], *, state_specs: Callable,
    coordinated: bool,
) -> Ordering:  # fmt: skip
    """`pair_balance` or `cd_grab` on the `parts` of gradients, with products summed over `axes`.

    `state_specs` gives the state's specs from those of the running sum. This is one vector where
    workers are coordinated, and a tree like the parts otherwise.
    """

    def where(tree):
        """The state's specs: it is split as the gradients are, and else the same on all devices."""
        if coordinated:
            return state_specs(P(axes))
        # The share of a leaf that is replicated over some axis is flat.
        flat = lambda spec: spec if len(mesh.axes_in(spec)) == len(axes) else P(axes)  # noqa: E731
        return state_specs(jax.tree.map(flat, mesh.like(specs, tree)))

    def init(key, params):
        found = jax.sharding.get_abstract_mesh()

        def run(key):
            zeros = lambda x, spec: jnp.zeros(_shard(jnp.shape(x), spec, found))  # noqa: E731
            local = jax.tree.map(zeros, params, mesh.like(specs, params))
            return order.init(key, parts(local, specs, axes))

        return mesh.over_shards(axes, run, P(), where(params))(key)

    def observe(state, rows):
        base.check_is_rows(rows, stacked=True)

        def run(state, tree):
            return order.observe(state, Rows.of(parts(tree, specs, axes, leading=1)))

        of_rows = jax.tree.map(lambda spec: P(None, *spec), mesh.like(specs, rows.tree))
        of_state = where(rows.tree)
        return mesh.over_shards(axes, run, (of_state, of_rows), of_state)(state, rows.tree)

    def next_epoch(state):
        of_state = where(state.running_sum)
        return mesh.over_shards(axes, order.next_epoch, (of_state,), of_state)(state)

    return Ordering(init, observe, next_epoch)


def _shard(shape, spec, over):
    """The shape of a shard of an array; an array is its own shard over axes that are manual."""
    found = list(shape)
    for i, names in enumerate(spec):
        count = math.prod(over.shape[a] for a in mesh.names_of(names) if a not in over.manual_axes)
        if i >= len(found) or found[i] % count:
            raise ValueError(
                f"a leaf of shape {tuple(shape)} cannot be split as {spec}: axis {i} is missing or "
                f"not a multiple of {count}. Use jax.P() for leaves that are whole on every device."
            )
        found[i] //= count
    return found
