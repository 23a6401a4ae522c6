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
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key, PyTree

from ordering import base
from ordering.base import Ordering
from ordering.trees import check_gradients
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


def exchange(gradients: PyTree, axis_name: str) -> Array:
    """From n units on each worker, this device's slice of all n W gradients: [n W, `slice_size`].

    Unit 1 of every worker comes first, then unit 2 of every worker, and so on, as `cd_grab` signs
    them. Inner products with these are partial: a psum over the axis completes them. Where workers
    are simulated, the one device holds the whole gradients, [n W, D].
    """
    workers, leaves = mesh.axis_size(axis_name), jax.tree.leaves(gradients)
    count = len(leaves[0])
    leaves = [leaf.reshape(count, -1) for leaf in leaves]
    if simulated(axis_name):
        everyone = jax.lax.all_gather(jnp.concatenate(leaves, axis=1), axis_name)
        return everyone.swapaxes(0, 1).reshape(count * workers, -1)
    entries = sum(leaf.shape[1] for leaf in leaves)
    size = slice_size(entries, workers)
    zeros = jnp.zeros((count, size * workers - entries), jnp.result_type(*leaves))
    if count == 1:  # no matrix of one row, which a TPU would pad to eight
        parts = jnp.concatenate([leaf[0] for leaf in (*leaves, zeros)]).reshape(workers, size)
    else:
        parts = jnp.concatenate([*leaves, zeros], axis=1)
        parts = parts.reshape(count, workers, size).swapaxes(0, 1)
    parts = jax.lax.all_to_all(parts, axis_name, split_axis=0, concat_axis=0, tiled=True)
    if count > 1:
        parts = parts.swapaxes(0, 1).reshape(count * workers, size)
    return parts


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

    def observe(state, gradients):
        check_gradients(gradients)

        def run(state, gradients):
            return order.observe(state, parts(gradients, specs, axes, leading=1))

        of_units = jax.tree.map(lambda spec: P(None, *spec), mesh.like(specs, gradients))
        of_state = where(gradients)
        return mesh.over_shards(axes, run, (of_state, of_units), of_state)(state, gradients)

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
