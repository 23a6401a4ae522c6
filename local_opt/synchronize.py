"""The mean over workers of a tree, in one collective. Runs inside vmap or shard_map."""

import jax
import jax.numpy as jnp
from jax import lax


def synchronize(
    tree,
    *,
    axis_name,
    anchor=None,
    wire_dtype=None,
    flat: bool = True,
):
    """Overwrites every floating leaf with its mean over the workers.

    x <- 1/W sum_w x_w, accumulated in float32 (float64 leaves in float64) and cast back. With an
    anchor, a tree that is equal on all workers, the changes are averaged instead,
    x <- a + 1/W sum_w (x_w - a): then they may travel in a narrow format.

    Leaves that are whole numbers, booleans or PRNG keys have no mean and stay this worker's own.
    The results are bitwise equal on all workers.

    Args:
      tree: this worker's arrays.
      axis_name: of the workers, or a tuple of names; bound by `jax.vmap` or `jax.shard_map`.
      anchor: a tree like `tree`, or None.
      wire_dtype: a 16-bit format, `jnp.bfloat16` or `jnp.float16`, for the changes on the wire:
        half the bytes of a ring all-reduce, sums still in float32; needs an anchor. None for no
        rounding.
      flat: one collective for all leaves (they are copied into one vector) instead of one each.

    Returns:
      A tree of the same shapes and dtypes.

    Raises:
      ValueError: for a wire format without an anchor, or one that is not 16 bits wide; for an
        anchor with another number of leaves.

    Example:
      >>> import jax, jax.numpy as jnp, local_opt
      >>> mean = lambda x: local_opt.synchronize(x, axis_name="worker")
      >>> jax.vmap(mean, axis_name="worker")(jnp.array([1.0, 2.0, 6.0])).tolist()
      [3.0, 3.0, 3.0]
    """
    check_wire(wire_dtype, anchor is not None)
    leaves, treedef = jax.tree.flatten(tree)
    leaves = [jnp.asarray(x) for x in leaves]
    anchors = [None] * len(leaves) if anchor is None else jax.tree.leaves(anchor)
    if len(anchors) != len(leaves):
        raise ValueError(
            f"the anchor has {len(anchors)} leaves and the tree {len(leaves)}: pass the same tree "
            "as it was after the last sync."
        )
    groups = {}
    for i, x in enumerate(leaves):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            wide = jnp.promote_types(x.dtype, jnp.float32)
            groups.setdefault(wide if flat else (wide, i), []).append(i)
    for places in groups.values():
        wide = jnp.promote_types(leaves[places[0]].dtype, jnp.float32)
        own = [leaves[i].astype(wide) for i in places]
        base = [anchors[i] for i in places]
        if anchor is not None:
            own = [x - a.astype(wide) for x, a in zip(own, base, strict=True)]
        means = _means(own, axis_name, wire_dtype)
        for i, mean, a in zip(places, means, base, strict=True):
            mean = mean if a is None else a.astype(wide) + mean
            leaves[i] = mean.astype(leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves)


def _means(arrays, axis_name, wire_dtype):
    """Means of arrays of one dtype, which travel as one vector."""
    vector = arrays[0].reshape(-1)
    if len(arrays) > 1:
        vector = jnp.concatenate([x.reshape(-1) for x in arrays])
    if wire_dtype is None:
        vector = lax.pmean(vector, axis_name)
    else:
        vector = _narrow_mean(vector, axis_name, wire_dtype=wire_dtype)
    means, start = [], 0
    for x in arrays:
        means.append(vector[start : start + x.size].reshape(x.shape))
        start += x.size
    return means


def _narrow_mean(vector, axis_name, *, wire_dtype):
    """A mean in two halves, as a ring does it: every worker sums its slice in full precision.

    An all-reduce of 16-bit numbers would also add in 16 bits. The bits travel as whole numbers,
    so that no backend widens them.
    """
    num_workers = lax.axis_size(axis_name)
    padded = jnp.pad(vector, (0, -vector.size % num_workers))
    slices = _bits(padded.reshape(num_workers, -1), wire_dtype)
    received = lax.all_to_all(slices, axis_name, 0, 0)
    mean = jnp.mean(_floats(received, wire_dtype, vector.dtype), axis=0)
    whole = lax.all_gather(_bits(mean, wire_dtype), axis_name, tiled=True)
    return _floats(whole, wire_dtype, vector.dtype)[: vector.size]


def _bits(x, wire_dtype):
    return lax.bitcast_convert_type(x.astype(wire_dtype), jnp.uint16)


def _floats(bits, wire_dtype, dtype):
    return lax.bitcast_convert_type(bits, wire_dtype).astype(dtype)


def check_wire(wire_dtype, has_anchor: bool) -> None:
    """Raises ValueError for a format that cannot carry the changes."""
    if wire_dtype is None:
        return
    if jnp.dtype(wire_dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        raise ValueError(
            f"wire_dtype is {jnp.dtype(wire_dtype)}: it must be bfloat16, float16 or None."
        )
    if not has_anchor:
        raise ValueError(
            f"wire_dtype is {jnp.dtype(wire_dtype)} without an anchor: parameters rounded to 16 "
            "bits lose the steps of a round. Pass the tree of the last sync as anchor."
        )
