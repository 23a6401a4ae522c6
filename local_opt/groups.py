"""Groups in which a wire sends the parameters, so that it takes memory for one group at a time."""

from collections.abc import Callable, Collection, Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from local_opt.wires import LANES, Wire
from local_opt.workers import AxisName

# Numbers of a group, unless a share of all is more: a wire takes a few copies of its group.
GROUP, GROUPS = 2**22, 16


def groups_of(sizes: Sequence[int], wire: Wire, axis_name: AxisName) -> list[list[tuple]]:
    """Groups of (leaf, start, end): parts of the leaves that are sent one after the other.

    Groups together have messages of as many bytes as one of everything, because all but the last
    fill rows: with the scales of a multiple of 128 rows in every worker's slice, or, of a wire that
    gathers, with the tables of a multiple of 2048 blocks.
    """
    times = 16 if wire.gathers else lax.axis_size(axis_name)
    unit = times * wire.multiple * LANES * LANES
    size = -(-max(GROUP, sum(sizes) // GROUPS) // unit) * unit
    groups, seen = [], 0
    for i, length in enumerate(sizes):
        start = 0
        while start < length:
            if seen % size == 0:
                groups.append([])
            end = min(length, start + size - seen % size)
            groups[-1].append((i, start, end))
            seen, start = seen + end - start, end
    return groups


def after_all(done: Collection[Array], axis_name: AxisName) -> Callable:
    """A function that gives back an array, which a compiler computes only after those done.

    It drops barriers before it schedules a program, and would hold the changes of all groups at
    once. A zero that it cannot foresee makes the array depend on what is done.
    """
    zero = (lax.axis_index(axis_name) // lax.axis_size(axis_name)).astype(jnp.uint32)
    for x in done:
        zero &= lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.uint32)

    def after(x):
        unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
        raw = lax.bitcast_convert_type(x, unsigned) ^ zero.astype(unsigned)
        return lax.bitcast_convert_type(raw, x.dtype)

    return after if done else lambda x: x
