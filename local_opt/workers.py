"""The axis of the workers, checks that they are equal, and their mean as one model."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.typing import DTypeLike
from jaxtyping import PyTree

from local_opt import nnx
from syncopate.mesh import is_key, name_of
from syncopate.plans import check_like, check_number
from syncopate.unstable import axis_names
from syncopate.workers import axis_of

AxisName = str | tuple[str, ...] | None  # None is the only one in scope
LEAVES = jax.Array | np.ndarray | np.generic  # the types of arrays
ARRAYS = "pass arrays only, without strings and the arrays of other libraries."
TRAINED = "only floating parameters can be trained and averaged. Keep it outside the parameters."


@jax.transfer_guard("allow")
def mean_over_workers(tree: PyTree) -> PyTree:
    """One model from W workers: their mean, for evaluation and export.

    x_bar = x_0 + 1/W sum_w (x_w - x_0) in float32, cast back, so that the mean of equal numbers is
    that number. Leaves that are not floating are worker 0's. NumPy arrays of 64 bits are averaged
    in NumPy and keep their type. Leaves of an equinox module that are not arrays, such as sizes and
    activations, pass through.

    If workers keep running averages of their own parameters, the mean of these averages is the
    average of the mean parameters, because averages are linear.

    Args:
      tree: arrays with a leading worker axis [W, ...]: parameters, or a whole training state.

    Returns:
      The same tree without the worker axis, also in the middle of a round.

    Raises:
      ValueError: for a leaf without workers.

    Examples:
      >>> import jax.numpy as jnp
      >>> from syncopate import local_opt
      >>> local_opt.mean_over_workers({"w": jnp.array([[1.0], [3.0]]), "count": jnp.array([7, 7])})
      {'count': Array(7, dtype=int32), 'w': Array([2.], dtype=float32)}
    """

    def mean(x):
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        if _beyond_jax(x):
            mean = lambda x: x[0] + np.mean(x - x[0], axis=0, dtype=x.dtype)  # noqa: E731
            return np.asarray(mean(x) if floating else x[0])
        x = jnp.asarray(x)
        return _mean(x) if floating else first(x)

    arrays, rest = parted_modules(tree)
    check_leading(arrays, "worker")
    return nnx.share_as(tree, joined(jax.tree.map(mean, arrays), rest))


def check_synced(
    tree: PyTree, *, what: str = "parameters", ulps: float = 1.0, before: PyTree | None = None
) -> None:
    """Raises ValueError unless all workers are equal, as after a sync or at the start of training.

    max_w |x_w - x_0| <= ulps * eps * (max_w |x_w| + max_w |x_w - b_w|), for every leaf, where b is
    `before`, or x. Pass `ulps=0` after a sync of `local_rounds`, or at the start.

    The default allows for the rounding of `local_steps`, which adds x_bar - x_w. If distant workers
    have a mean close to zero, as 0.7 and -0.7 do, that rounding is large relative to the mean: pass
    `before`. Workers that have not been synchronised differ by more than this.

    Args:
      tree: arrays with a leading worker axis [W, ...], also over several devices and processes.
      what: the name of the tree, for the message.
      ulps: >= 0, how many roundings of the largest number in a leaf are allowed. Integers, keys and
        numbers that are not finite must be equal.
      before: b, the same tree before the step that ended the round; None if it does not matter.

    Raises:
      ValueError: if workers differ; the message has the leaf, the distance, and the worker furthest
        from worker 0. Also for a leaf without a worker axis, or if `before` is another tree.

    Examples:
      >>> import jax.numpy as jnp
      >>> from syncopate import local_opt
      >>> local_opt.check_synced({"w": jnp.array([[1.0], [1.0 + 1e-7]])})
      >>> local_opt.check_synced({"w": jnp.array([[1.0], [1.1]])})
      Traceback (most recent call last):
      ValueError: workers' parameters are 0.1 apart in ['w'] (worker 1 from worker 0), ...
    """
    check_number("ulps", ulps, "[0, inf)")
    check_leading(tree, "worker")
    if before is not None:
        check_like("before", before, tree, "the tree")
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    wide = any(map(_beyond_jax, jax.tree.leaves((tree, before))))
    with jax.transfer_guard("allow"), jax.enable_x64(wide or jax.config.read("jax_enable_x64")):
        distances = jax.device_get(_distances(tree, tree if before is None else before))
    # Flatten by structure, since the tree may itself hold tuples, like the states of optax.
    distances = jax.tree.structure(tree).flatten_up_to(distances)
    for path, (distance, worker, largest, allowed) in zip(paths, distances, strict=True):
        if not distance <= ulps * allowed:
            raise ValueError(
                f"workers' {what} are {float(distance):.3g} apart in {name_of(path)} "
                f"(worker {worker} from worker 0), of numbers up to {float(largest):.3g}, where "
                f"{ulps:g} roundings are allowed: start all from one key, and check after a step "
                "that ends a round (plan.syncs_after(step)), which no worker may skip; with "
                "local_steps, pass before=, the parameters before that step."
            )


@jax.jit
def _distances(tree, before):
    """(distance of the workers, the furthest one, the largest number, its error) of every leaf."""

    def distance(x, b):
        if is_key(x):
            x, b = jax.random.key_data(x), jax.random.key_data(b)
        floating = jnp.issubdtype(x.dtype, jnp.inexact)
        eps = float(jnp.finfo(x.dtype).eps) if floating else 0
        x, b = (a.astype(wide_type(a.dtype)) for a in (x, b))
        reference = first(x)[None]
        same = x == reference
        if floating:  # NaN on both counts as equal
            same |= jnp.isnan(x) & jnp.isnan(reference)
        furthest = jnp.where(same, 0, jnp.abs(x - reference) if floating else 1)
        furthest = jnp.max(furthest, axis=tuple(range(1, x.ndim)), initial=0)
        largest, moved = (jnp.max(jnp.abs(a), where=jnp.isfinite(a), initial=0) for a in (x, x - b))
        return jnp.max(furthest), jnp.argmax(furthest), largest, eps * (largest + moved)

    return jax.tree.map(distance, tree, before)


def _beyond_jax(x):
    """Whether JAX would truncate a NumPy array of 64 bits to 32."""
    numpy = isinstance(x, np.ndarray | np.generic)
    return numpy and jax.dtypes.canonicalize_dtype(x.dtype) != x.dtype


@jax.jit
def _mean(x):
    """The mean over the workers of [W, ...], summed in float32."""
    wide = x.astype(wide_type(x.dtype))
    start = first(wide)
    start = jnp.where(jnp.isfinite(start), start, 0)
    return (start + jnp.sum(wide - start[None], axis=0) / len(x)).astype(x.dtype)


@jax.jit
def first(x: jax.Array) -> jax.Array:
    """Worker 0's part of an array [W, ...], also if the worker axis is an explicit mesh axis."""
    if is_key(x):
        return jax.random.wrap_key_data(first(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    wide = x.astype(wide_type(x.dtype))  # devices cannot send the narrowest types
    where = jax.typeof(x).sharding
    if AxisType.Explicit in where.mesh.axis_types:  # such an axis cannot be sliced
        is_first = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0, out_sharding=where) == 0
        return jnp.sum(jnp.where(is_first, wide, jnp.zeros_like(wide)), axis=0).astype(x.dtype)
    return wide[0].astype(x.dtype)


def parted(tree: PyTree) -> tuple[PyTree, PyTree]:
    """The tree's arrays, and its other leaves; None in place of the other kind."""
    arrays = jax.tree.map(lambda x: x if isinstance(x, LEAVES) else None, tree)
    return arrays, jax.tree.map(lambda x: None if isinstance(x, LEAVES) else x, tree)


def parted_modules(tree: PyTree) -> tuple[PyTree, PyTree]:
    """Splits off the leaves of equinox' modules that are not arrays: (the tree, these leaves)."""

    def part(of):
        return lambda x: (parted(x) if is_module(x) else (x, None))[of]

    arrays, rest = (jax.tree.map(part(of), tree, is_leaf=is_module) for of in (0, 1))
    return arrays, rest


def joined(arrays: PyTree, rest: PyTree) -> PyTree:
    """The inverse of `parted`."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, arrays, rest, is_leaf=lambda x: x is None
    )


def is_module(x: Any) -> bool:
    """Whether this is a module of equinox; its leaves may be sizes and functions."""
    return isinstance(x, getattr(sys.modules.get("equinox"), "Module", ()))


def in_scope(axis_name: Any) -> Any:
    """The given axis of the workers; for None, the only axis in scope."""
    return axis_of(axis_name, axis_names(), alone=True)


def check_leading(tree: PyTree, of: str) -> int:
    """The length of the leading axis; raises ValueError unless all leaves have the same."""
    check_kind(tree, np.generic, ARRAYS)
    paths = jax.tree_util.tree_leaves_with_path(tree)
    count = np.shape(paths[0][1])[:1] if paths else (1,)
    for path, x in paths:
        if np.shape(x)[:1] != count or count in ((), (0,)):
            raise ValueError(
                f"leaf {name_of(path)} has the shape {np.shape(x)}: pass arrays with "
                f"a leading axis of at least one {of}, and of one length in all leaves."
            )
    return count[0]


def check_kind(params: PyTree, kind: Any = jnp.inexact, why: str = TRAINED) -> None:
    """Raises ValueError for a leaf of another kind, and says why."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        try:
            dtype = jax.typeof(leaf).dtype
            fits = jnp.issubdtype(dtype, kind)
        except TypeError:  # not an array
            dtype, fits = type(leaf).__name__, False
        if not fits:
            raise ValueError(f"leaf {name_of(path)} is {dtype}: {why}")


def wide_type(dtype: DTypeLike) -> Any:
    """float32 or int32 in place of a narrower type, and any other type itself."""
    if jnp.dtype(dtype).itemsize >= 4:
        return jnp.dtype(dtype)
    return jnp.dtype(jnp.float32 if jnp.issubdtype(dtype, jnp.inexact) else jnp.int32)
