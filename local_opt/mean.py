"""The mean over the workers of a tree, inside vmap or shard_map, and the weights of workers."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from local_opt.workers import ARRAYS, AxisName, check_kind, in_scope, wide_type
from syncopate import mesh
from syncopate.plans import check_number, is_number
from syncopate.workers import AXIS

JOINED = 2**20  # numbers of an array that is rather copied than sent alone: 4 MB take gloo 5 ms


def pmean(tree: PyTree, *, axis_name: AxisName = AXIS, weight: ArrayLike | None = None) -> PyTree:
    """Overwrites every floating leaf with its mean over the workers.

    x <- 1/W sum_w x_w, or with weights v_w, x <- sum_w v_w x_w / sum_w v_w. Sums are taken in
    float32 (float64 leaves in float64), cast back, and bitwise equal on all workers; they must fit
    that type, |x_w| < 3e38 / W. Integers, booleans and PRNG keys stay this worker's own.

    Args:
      tree: this worker's arrays.
      axis_name: the workers' axis or axes, of `jax.vmap` or `jax.shard_map`; None for the only one.
      weight: v_w >= 0 and finite, one number of this worker, as of its tokens, or a bool; None for
        equal weights. An array of a worker with weight zero is not read, so it may be NaN. Where
        all weights are zero, or one is negative or not finite, the mean is NaN.

    Returns:
      A tree of the same shapes and dtypes.

    Raises:
      ValueError: outside of the workers' axis, for leaves that are no arrays, a weight that is not
        one number, or a tree that is equal on all workers by its type, as a gradient that JAX has
        added up over them.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import local_opt
      >>> jax.vmap(local_opt.pmean, axis_name="worker")(jnp.array([1.0, 2.0, 6.0])).tolist()
      [3.0, 3.0, 3.0]
      >>> mean = jax.vmap(lambda x, v: local_opt.pmean(x, weight=v), axis_name="worker")
      >>> mean(jnp.array([1.0, 2.0, jnp.nan, 6.0]), jnp.array([200, 100, 0, 100])).tolist()
      [2.5, 2.5, 2.5, 2.5]
    """
    check_kind(tree, np.generic, ARRAYS)
    check_own(tree, axis_name, all_of=True)
    return averaged(tree, axis_name, weight)[0]


def averaged(tree: PyTree, axis_name: AxisName, weight: ArrayLike | None) -> tuple:
    """(the tree's mean, this worker's weight by the mean weight or None): see `pmean`."""
    if (axis_name := in_scope(axis_name)) != ():  # one worker without an axis
        mesh.axis_size(axis_name)
    leaves, treedef = jax.tree.flatten(tree)
    leaves, share = [jnp.asarray(x) for x in leaves], None
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    wide = [leaves[i].astype(wide_type(leaves[i].dtype)) for i in places]
    if weight is None:
        means = _means(wide, axis_name)
    else:
        weight = scaled(checked_weight(weight), axis_name)
        # Together, so that processes on CPUs send the weight in the vector of the leaves.
        *means, total = _means([*(weighed(x, weight) for x in wide), weight], axis_name)
        means = [m / total.astype(m.real.dtype) for m in means]
        share = weight / total
    for i, mean in zip(places, means, strict=True):
        leaves[i] = mean.astype(leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves), share


def check_own(tree: PyTree, axis_name: AxisName, *, all_of: bool = False) -> None:
    """Raises ValueError for a floating leaf that is typed as equal on all workers, or if all are.

    JAX has added up such a gradient over the workers: it is W times their mean. Where types say
    nothing, as under `check_vma=False` and `jax.vmap`, nothing is refused.
    """
    typed = mesh.typed_axes(in_scope(axis_name))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    floating = [(path, x) for path, x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    equal = [(path, typed - mesh.varying_axes(x)) for path, x in floating]
    equal = [(mesh.name_of(path), sorted(axes)) for path, axes in equal if axes]
    if equal and (len(equal) == len(floating) or not all_of):
        name, axes = equal[0]
        raise ValueError(
            f"leaf {name} is typed as equal on all workers of {axes}, as are "
            "parameters under in_specs=jax.P() and their gradients, which JAX has added up over "
            f"the workers. Before the gradient call params = jax.lax.pcast(params, {tuple(axes)}, "
            "to='varying'), or give parameters a leading worker axis and in_specs=jax.P('worker')."
        )


def _means(arrays, axis_name):
    """The mean of each array over the workers; processes on CPUs send small ones as one vector."""
    names, manual = mesh.names_of(axis_name), jax.sharding.get_abstract_mesh().manual_axes
    simulated = [name for name in names if name not in manual]
    # Over axes inside a worker a compiler would gather the vector's shards.
    if mesh.platform() != "cpu" or mesh.beside(axis_name):
        return lax.pmean(arrays, axis_name)
    if simulated == list(names):
        return [_simulated_mean(x, names) for x in arrays]
    if jax.process_count() == 1 or simulated:
        return lax.pmean(arrays, axis_name)
    # CPUs send array after array, and each waits for the other processes.
    groups = {}  # by dtype, or alone
    for i, x in enumerate(arrays):
        groups.setdefault(x.dtype if x.size <= JOINED else i, []).append(i)
    means = list(arrays)
    for places in groups.values():
        own = [arrays[i] for i in places]
        vector = lax.pmean(jnp.concatenate([x.reshape(-1) for x in own]), axis_name)
        for i, mean in zip(places, pieces_of(vector, own), strict=True):
            means[i] = mean
    return means


def _simulated_mean(x, names):
    """The mean of an array over workers of one device, a CPU."""
    count = lax.axis_size(names)
    for name in names:
        rows = lax.all_gather(x, name)  # XLA takes ten times as long for a sum as for a product
        x = jnp.tensordot(jnp.ones(len(rows), x.dtype), rows, 1, precision="highest")
    return x / count


def pieces_of(rows: Array, like: Iterable) -> list[Array]:
    """The first numbers of an array in the shapes of others, one after the other."""
    vector, found, start = rows.reshape(-1), [], 0
    for x in like:
        found.append(vector[start : start + x.size].reshape(x.shape))
        start += x.size
    return found


def checked_weight(weight: Any) -> Float[Array, ""]:
    """The weight as a floating number; NaN, and so every mean, if it is < 0 or not finite.

    Raises ValueError for anything but one number, or one out of range that is known in a trace.
    """
    check_scalar("weight", weight, jnp.bool_, jnp.integer, jnp.floating, interval="[0, inf)")
    floating = jnp.issubdtype(jnp.result_type(weight), jnp.floating)
    kind = wide_type(jnp.result_type(weight)) if floating else jnp.result_type(float)
    weight = jnp.asarray(weight, kind)
    return jnp.where((weight >= 0) & (weight < jnp.inf), weight, jnp.nan)


def scaled(weight: Float[Array, ""], axis_name: Any) -> Float[Array, ""]:
    """The weight by about the largest of all workers', so that only their ratios count.

    The divisor is a power of two, which rounds nothing.
    """
    kind = jnp.finfo(weight.dtype)
    high = kind.maxexp - 28  # 2^high weight is infinite for weights of 2^28 and more
    # Devices take the least numbers for zero, but their bits count them.
    bits = lax.bitcast_convert_type(weight, jnp.dtype(f"uint{kind.bits}"))
    least = bits.astype(weight.dtype) * 2.0 ** (high + kind.minexp - kind.nmant)
    raised = jnp.where(bits < 2**kind.nmant, least, weight * 2.0**high)
    both = jnp.stack([raised, weight])
    largest = lax.pmax(both, axis_name)
    power = lax.reduce_precision(jnp.minimum(largest, kind.max / 4), kind.nexp, 0)
    return jnp.where(largest[0] < jnp.inf, *(both / power))


def weighed(x: Array, weight: Float[Array, ""]) -> Array:
    """w x, and zeros for a weight of zero, even if x is not finite."""
    return lax.select(weight == 0, jnp.zeros_like(x), x * weight.astype(x.real.dtype))


def if_counted(tree: PyTree, other: PyTree, weight: Float[Array, ""] | None) -> PyTree:
    """The tree, or the other one where the weight is zero."""
    if weight is None:
        return tree
    return jax.tree.map(lambda x, y: lax.select(weight == 0, y, x), tree, other)


def check_scalar(name: str, value: Any, *kinds: Any, interval: str = "") -> None:
    """Raises ValueError unless a value is one number of these kinds, in the interval if known."""
    try:
        kind = jax.typeof(value)
        fits = not kind.shape and any(jnp.issubdtype(kind.dtype, k) for k in kinds)
    except (TypeError, OverflowError):  # not an array
        fits = False
    if not fits:
        known = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"{name} is {value!r}: pass one number of type {known}.")
    if interval and is_number(value):
        check_number(name, value, interval)
