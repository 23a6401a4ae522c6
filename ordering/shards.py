"""A worker that is several devices: each observes its part of every gradient, and all agree.

The parts of a worker's devices make up one gradient and do not overlap. So inner products over
parts, added up by a psum, are those of whole gradients, and no part ever leaves its device but to
the same place of another worker.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ordering import base
from ordering import rows as rows_lib
from syncopate import mesh


def check_alone(axis_name, *, what: str, act: str, manual_only: bool = False) -> None:
    """Raises where the mesh in scope has axes beside the workers', of which nothing was said.

    Args:
      axis_name: of the workers, or a tuple of names; what, act: of the message.
      manual_only: whether axes that are left to the compiler do no harm.

    Raises:
      ValueError: with the names of these axes.
    """
    if others := mesh.beside(axis_name, manual_only=manual_only):
        raise ValueError(
            f"{what} under the mesh axes {others} beside the workers' {axis_name!r}: devices of "
            f"one worker must see the same numbers, and no gradient is gathered for it. {act}"
        )


def parts(tree, specs, axes, *, leading: int = 0):
    """This device's parts: shards as they are, and a share of each leaf that others hold too.

    Args:
      tree: this device's shards, leaves [..., *shard] with `leading` axes in front.
      specs: a tree like it; axes: of a worker, manual.

    Returns:
      A tree like it; a leaf that is whole over some axes is flat, ceil(size / devices) entries.
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


def sharded(order: base.Ordering, specs, axes, *, state_specs, coordinated) -> base.Ordering:
    """An order over parts: `pair_balance` or `cd_grab` whose products are summed over `axes`.

    Args:
      order: of parts; specs: of one gradient; axes: inside a worker.
      state_specs: specs of the running sum -> specs of the state.
      coordinated: whether the running sum is one vector, or a tree like the parts.
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
                "take the mean gradient by all_reduce_mean, which leaves rows where they are."
            )

        def run(state, tree):
            return order.observe(state, rows_lib.Rows.of(parts(tree, specs, axes, leading=1)))

        of_rows = jax.tree.map(lambda spec: P(None, *spec), mesh.like(specs, rows.tree))
        of_state = where(rows.tree)
        return mesh.over_shards(axes, run, (of_state, of_rows), of_state)(state, rows.tree)

    def next_epoch(state):
        of_state = where(state.running_sum)
        return mesh.over_shards(axes, order.next_epoch, (of_state,), of_state)(state)

    return base.Ordering(init, observe, next_epoch)


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
