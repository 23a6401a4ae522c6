"""The mean of a tree over the workers, inside vmap or shard_map, and the weights of workers."""

from collections.abc import Iterable
from typing import Any, NamedTuple

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

LEAST, MOST = 2.0**-40, 2.0**40  # the range of weights
JOINED = 2**20  # numbers; smaller arrays are copied into one message (gloo takes 5 ms for 4 MB)


def pmean(tree: PyTree, *, axis_name: AxisName = AXIS, weight: ArrayLike | None = None) -> PyTree:
    """Overwrites every floating leaf with its mean over the workers.

    x <- 1/W sum_w x_w, or with weights v_w, x <- sum_w v_w x_w / sum_w v_w. Sums are taken in
    float32 (float64 leaves in float64), cast back, and bitwise equal on all workers. They must fit
    that type: v_w |x_w| < 3e38 / W. Integers, booleans and PRNG keys are not averaged.

    The mean of equal numbers may differ from them by a rounding error, which stops growing if the
    mean is taken repeatedly. If later steps would amplify it, average differences from a value that
    all workers share. Their mean is exactly 0 where nothing differs, as in `local_rounds` with an
    outer optimizer.

    Args:
      tree: this worker's arrays.
      axis_name: the workers' axis or axes, of `jax.vmap` or `jax.shard_map`; None for the only
        named axis in scope.
      weight: v_w, 0 or in [2^-40, 2^40]: one number for this worker, such as its count of tokens,
        or a bool; None for equal weights. The arrays of a worker with weight zero are not read, so
        they may be NaN. If all weights are zero, or one is out of range, the mean is NaN.

    Returns:
      A tree of the same shapes and dtypes.

    Raises:
      ValueError: outside of the workers' axis, for leaves that are not arrays, or for a weight that
        is not one number. Also for a tree whose type says that it is equal on all workers, such as
        a gradient that JAX has summed over them, and for axes of `jax.vmap` inside a
        `jax.shard_map` with check_vma=True.

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
    check_varying(tree, axis_name, all_of=True)
    return averaged(tree, axis_name, weight).mean


class Averaged(NamedTuple):
    """The results of one collective.

    Attributes:
      mean: the mean of a tree.
      relative_weight: this worker's weight divided by the mean weight; None for equal weights.
      totals: the sums of counts over the workers with a weight above zero, equal on all.
    """

    mean: PyTree
    relative_weight: Float[Array, ""] | None
    totals: Array


def averaged(
    tree: PyTree, axis_name: AxisName, weight: ArrayLike | None, counts: ArrayLike | tuple = ()
) -> Averaged:
    """The tree's mean, as in `pmean`, and exact sums of whole numbers below 2^24 / W."""
    if (axis_name := in_scope(axis_name)) != ():  # () is one worker without an axis
        mesh.axis_size(axis_name)
        _check_mixed(mesh.names_of(axis_name))
    leaves, treedef = jax.tree.flatten(tree)
    leaves, counts = [jnp.asarray(x) for x in leaves], jnp.asarray(counts, jnp.float32)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    sent, relative = [leaves[i].astype(wide_type(leaves[i].dtype)) for i in places], None
    if weight is not None:
        weight = checked_weight(weight)
        sent, counts = [weighed(x, weight) for x in sent], jnp.where(weight == 0, 0, counts)
    # In one call, so that processes on CPUs send everything as one vector.
    more = [*([] if weight is None else [weight]), *([counts] if counts.size else [])]
    means = _means([*sent, *more], axis_name)
    if counts.size:
        counts = jnp.round(means.pop() * lax.axis_size(axis_name))
    if weight is not None:
        mean_weight = means.pop()
        means = [m / mean_weight.astype(m.real.dtype) for m in means]
        relative = weight / mean_weight
    for i, mean in zip(places, means, strict=True):
        leaves[i] = mean.astype(leaves[i].dtype)
    return Averaged(jax.tree.unflatten(treedef, leaves), relative, counts)


def check_varying(tree: PyTree, axis_name: AxisName, *, all_of: bool = False) -> None:
    """Raises ValueError for a floating leaf that is typed as equal on all workers.

    JAX has summed such a gradient over the workers, so it is W times their mean. With `all_of`,
    only trees whose floating leaves all have such types are refused. Under `check_vma=False` and
    `jax.vmap` there are no such types.
    """
    typed = mesh.typed_axes(in_scope(axis_name))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    floating = [(path, x) for path, x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    equal = [(path, typed - mesh.varying_axes(x)) for path, x in floating]
    equal = [(mesh.name_of(path), sorted(axes)) for path, axes in equal if axes]
    if equal and (len(equal) == len(floating) or not all_of):
        name, axes = equal[0]
        raise ValueError(
            f"leaf {name} is typed as equal on all workers of {axes}, like "
            "parameters under in_specs=jax.P() and their gradients, which JAX has summed over "
            f"the workers. Before the gradient call params = jax.lax.pcast(params, {tuple(axes)}, "
            "to='varying'), or give parameters a leading worker axis and in_specs=jax.P('worker')."
        )


def _check_mixed(names):
    """Raises ValueError for axes of `jax.vmap` beside those of `jax.shard_map`, if it has types."""
    inside = [x for x in names if x not in jax.sharding.get_abstract_mesh().manual_axes]
    if inside and (typed := mesh.typed_axes(names)):
        raise ValueError(
            f"the workers' axes {inside} are of jax.vmap and {sorted(typed)} of jax.shard_map, "
            "whose types do not cover the former: pass check_vma=False to jax.shard_map."
        )


def _means(arrays, axis_name):
    """The mean of each array over the workers; processes on CPUs send small ones as one vector."""
    names, manual = mesh.names_of(axis_name), jax.sharding.get_abstract_mesh().manual_axes
    simulated = [name for name in names if name not in manual]
    # For axes inside a worker, a compiler would gather the vector's shards.
    if mesh.platform() != "cpu" or mesh.beside(axis_name):
        return lax.pmean(arrays, axis_name)
    if simulated == list(names):
        return [_simulated_mean(x, names) for x in arrays]
    if jax.process_count() == 1 or simulated:
        return lax.pmean(arrays, axis_name)
    # CPUs send one array after another, and each waits for the other processes.
    groups = {}  # {dtype, or the number of a large array: arrays}
    for i, x in enumerate(arrays):
        groups.setdefault(x.dtype if x.size <= JOINED else i, []).append(i)
    means = list(arrays)
    for places in groups.values():
        group = [arrays[i] for i in places]
        vector = lax.pmean(jnp.concatenate([x.reshape(-1) for x in group]), axis_name)
        for i, mean in zip(places, pieces_of(vector, group), strict=True):
            means[i] = mean
    return means


def _simulated_mean(x, names):
    """The mean of an array over workers that share one device, a CPU."""
    count = lax.axis_size(names)
    for name in names:
        rows = lax.all_gather(x, name)  # XLA is ten times slower for a sum than for a product
        x = jnp.tensordot(jnp.ones(len(rows), x.dtype), rows, 1, precision="highest")
    return x / count


def pieces_of(rows: Array, like: Iterable) -> list[Array]:
    """Cuts the first numbers of an array into arrays with the shapes of others."""
    vector, pieces, start = rows.reshape(-1), [], 0
    for x in like:
        pieces.append(vector[start : start + x.size].reshape(x.shape))
        start += x.size
    return pieces


def checked_weight(weight: Any) -> Float[Array, ""]:
    """The weight as a floating number; NaN if it is out of range, which makes every mean NaN.

    Within the range, products of the weight and usual numbers neither overflow nor vanish, so that
    one collective is enough. A larger range would first need the largest weight of all workers.
    Raises ValueError unless the weight is one number, or if it is concrete and out of range.
    """
    check_scalar("weight", weight, jnp.bool_, jnp.integer, jnp.floating, interval="[0, inf)")
    if is_number(weight) and weight and not LEAST <= weight <= MOST:
        raise ValueError(
            f"weight is {weight!r}: pass 0 or a number from {LEAST:.2g} to {MOST:.2g}; only "
            "the ratios of weights matter."
        )
    floating = jnp.issubdtype(jnp.result_type(weight), jnp.floating)
    kind = wide_type(jnp.result_type(weight)) if floating else jnp.result_type(float)
    weight = jnp.asarray(weight, kind)
    fits = (weight == 0) | ((weight >= LEAST) & (weight <= MOST))
    return jnp.where(fits, weight, jnp.nan)


def moved_from(anchor: PyTree, params: PyTree) -> PyTree:
    """x - a in float32 or wider, exactly 0 where a round that began at `a` has moved nothing.

    An anchor of a wider type is rounded first, because the round started from its rounded value.
    """

    def change(a, x):
        wide = wide_type(x.dtype)
        return x.astype(wide) - a.astype(x.dtype).astype(wide)

    return jax.tree.map(change, anchor, params)


def weighed(x: Array, weight: Float[Array, ""]) -> Array:
    """w x; zeros for a weight of zero, even if x is not finite."""
    return lax.select(weight == 0, jnp.zeros_like(x), x * weight.astype(x.real.dtype))


def if_counted(tree: PyTree, other: PyTree, weight: Float[Array, ""] | None) -> PyTree:
    """The tree, or the other one where the weight is zero."""
    if weight is None:
        return tree
    return jax.tree.map(lambda x, y: lax.select(weight == 0, y, x), tree, other)


def check_scalar(name: str, value: Any, *kinds: Any, interval: str = "") -> None:
    """Raises ValueError unless a value is one number of these kinds, in the interval if given."""
    try:
        kind = jax.typeof(value)
        fits = not kind.shape and any(jnp.issubdtype(kind.dtype, k) for k in kinds)
    except (TypeError, OverflowError):  # not an array
        fits = False
    if not fits:
        names = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"{name} is {value!r}: pass one number of type {names}.")
    if interval and is_number(value):
        check_number(name, value, interval)
