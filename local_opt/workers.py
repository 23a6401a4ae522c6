"""What workers must agree in, and one model out of many: their mean, and its moments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType


def consolidate(tree):
    """One model out of W: the mean over the workers, for evaluation and export.

    x_bar = 1/W sum_w x_w in float32, cast back; leaves that are not floating are worker 0's.

    Args:
      tree: arrays with a leading worker axis [W, ...].

    Returns:
      The same tree without the worker axis. Training goes on with its argument, so a model can be
      looked at in the middle of a round.

    Raises:
      ValueError: for a leaf without workers.

    Example:
      >>> import jax.numpy as jnp, local_opt
      >>> local_opt.consolidate({"w": jnp.array([[1.0], [3.0]]), "count": jnp.array([7, 7])})
      {'count': Array(7, dtype=int32), 'w': Array([2.], dtype=float32)}
    """

    def mean(x):
        if not jnp.ndim(x) or not x.shape[0]:
            raise ValueError(
                f"a leaf has the shape {jnp.shape(x)}: pass arrays with a leading axis of at least "
                "one worker."
            )
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return first(x)
        return jnp.mean(x, axis=0, dtype=jnp.promote_types(x.dtype, jnp.float32)).astype(x.dtype)

    return jax.tree.map(mean, tree)


def reestimate(statistics: Callable, params, batches):
    """The moments of normalisation layers, measured anew on averaged parameters.

    s = 1/K sum_k statistics(x_bar, batch_k). The moments that each worker has seen belong to its
    own parameters, not to their mean; so they are never synchronised in training, and measured
    before every evaluation.

    Args:
      statistics: `(params, batch) -> tree of moments`.
      params: averaged parameters.
      batches: leaves [K, ...], K batches.

    Returns:
      The mean tree of moments. Under a named axis, follow it by `synchronize` to use the batches
      of all workers.

    Example:
      >>> import jax.numpy as jnp, local_opt
      >>> moments = lambda scale, x: {"mean": jnp.mean(scale * x), "var": jnp.var(scale * x)}
      >>> batches = jnp.array([[0.0, 2.0], [4.0, 6.0]])
      >>> {k: float(v) for k, v in local_opt.reestimate(moments, 2.0, batches).items()}
      {'mean': 6.0, 'var': 4.0}

    References:
      Ioffe, Szegedy, Batch Normalization, 2015, https://arxiv.org/abs/1502.03167
    """
    per_batch = jax.lax.map(lambda batch: statistics(params, batch), batches)
    return jax.tree.map(lambda s: jnp.mean(s, axis=0), per_batch)


def check_same_start(tree, *, what: str = "parameters") -> None:
    """Raises unless all workers hold the same numbers.

    Workers that start from different points average to a point that none of them has trained.

    Args:
      tree: arrays with a leading worker axis [W, ...]; they may be spread over devices and
        processes.
      what: the name of the tree, for the message.

    Raises:
      ValueError: with the leaf and the workers that differ from worker 0; for a leaf without a
        worker axis.

    Example:
      >>> import jax.numpy as jnp, local_opt
      >>> local_opt.check_same_start({"w": jnp.ones((4, 3))})
      >>> local_opt.check_same_start({"w": jnp.array([[0.0], [1.0]])})
      Traceback (most recent call last):
      ValueError: workers [1] start with other parameters than worker 0 in ['w']: ...
    """
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not jnp.ndim(x):
            raise ValueError(
                f"{what} {jax.tree_util.keystr(path)} is a scalar: every leaf needs a leading "
                "worker axis. Stack the workers' trees, or initialise them by jax.vmap."
            )
    for path, same in jax.tree_util.tree_flatten_with_path(_same_as_first(tree))[0]:
        if not (same := np.asarray(same)).all():
            raise ValueError(
                f"workers {np.flatnonzero(~same).tolist()} start with other {what} than worker 0 "
                f"in {jax.tree_util.keystr(path)}: initialise all workers from one key, or "
                "broadcast the state of one."
            )


@jax.jit
def _same_as_first(tree):
    def same(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        own = first(x)[None]
        both = x == own
        if jnp.issubdtype(x.dtype, jnp.inexact):  # workers that are equally lost are equal
            both |= jnp.isnan(x) & jnp.isnan(own)
        return jnp.all(both, axis=tuple(range(1, x.ndim)))

    return jax.tree.map(same, tree)


def check_synced(tree, *, what: str = "parameters", ulps: float = 1.0) -> None:
    """Raises unless workers agree after a sync, to the rounding that `local_steps` leaves.

    max_w |x_w - x_0| <= ulps * ulp(max_w |x_w|), for every leaf; `local_rounds` pass with 0.

    Args:
      tree: arrays with a leading worker axis [W, ...], after a step that ends a round.
      what: the name of the tree, for the message.
      ulps: >= 0, roundings of the largest number of a leaf. Whole numbers must be equal.

    Raises:
      ValueError: with the leaf, and how far the workers are apart. A worker that skipped a sync, or
        was never in one, is seldom within a rounding.

    Example:
      >>> import jax.numpy as jnp, local_opt
      >>> local_opt.check_synced({"w": jnp.array([[1.0], [1.0 + 1e-7]])})
      >>> local_opt.check_synced({"w": jnp.array([[1.0], [1.1]])})
      Traceback (most recent call last):
      ValueError: workers' parameters are 0.1 apart in ['w'], of numbers up to 1.1, ...
    """
    for path, (apart, largest, ulp) in jax.tree_util.tree_leaves_with_path(
        _apart(tree), is_leaf=lambda x: isinstance(x, tuple)
    ):
        if not apart <= ulps * ulp:
            raise ValueError(
                f"workers' {what} are {float(apart):.3g} apart in {jax.tree_util.keystr(path)}, of "
                f"numbers up to {float(largest):.3g}, where a sync leaves {ulps:g} roundings: look "
                "after a step that ends a round (plan.syncs_after(step)); no worker may skip it."
            )


@jax.jit
def _apart(tree):
    """(how far workers are apart, the largest number, its last place) of every leaf."""

    def distance(x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            zero = jnp.zeros((), jnp.float32)
            apart = jnp.abs(x.astype(jnp.float32) - first(x)[None].astype(jnp.float32))
            return jnp.max(apart, initial=0.0), jnp.max(jnp.abs(x)), zero
        largest = jnp.max(jnp.abs(x), initial=0.0)
        ulp = jnp.finfo(x.dtype).eps * largest
        return jnp.max(jnp.abs(x - first(x)[None]), initial=0.0), largest, ulp

    return jax.tree.map(distance, tree)


def check_same_plan(plan, *, gather: Callable | None = None) -> None:
    """Raises unless all processes have made the same plan.

    A worker that waits for a sync that another does not know of waits for ever; and workers that
    load in other steps see other numbers of batches.

    Args:
      plan: of this process: a `SyncPlan`, an `ordering.echo.EchoPlan`, or anything else with `rule`
        and `digest()`.
      gather: from uint8[32] of this process to uint8[processes, 32] of all; None is
        `jax.experimental.multihost_utils.process_allgather`.

    Raises:
      ValueError: with the processes whose plan differs from the plan of process 0.

    Example:
      >>> import local_opt
      >>> local_opt.check_same_plan(local_opt.constant(4, total_steps=100))
    """
    if gather is None:
        from jax.experimental.multihost_utils import process_allgather as gather
    own = np.frombuffer(bytes.fromhex(plan.digest()), np.uint8)
    digests = np.asarray(gather(own)).reshape(-1, own.size)
    other = np.flatnonzero((digests != digests[0]).any(axis=1))
    if len(other):
        raise ValueError(
            f"processes {other.tolist()} have another plan than process 0 (here: {plan.rule}, hash "
            f"{plan.digest()[:12]}): give all of them the same flags, schedule and key, or save "
            "the plan once and load it everywhere."
        )


def first(x):
    """Worker 0's part of an array [W, ...], also where the workers' is an explicit mesh axis."""
    if explicit(x) is None:
        return x[0]
    own = jnp.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == 0  # such an axis is never cut
    if x.dtype == bool:
        return jnp.any(x & own, axis=0)
    return jnp.sum(jnp.where(own, x, jnp.zeros_like(x)), axis=0, dtype=x.dtype)


def explicit(x):
    """The sharding of an array on a mesh with explicit axes, or None."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


class Part(NamedTuple):
    """A tree in two: its arrays, and how they stand among leaves that are none."""

    arrays: list
    paths: list  # of the arrays
    structure: Any
    rest: list  # (whether an array stands here, else what)


def parted(tree, kind) -> Part:
    kinds = jax.Array | np.ndarray | np.generic
    if kind == "shared":  # a number has no axis of workers: it is the same for all of them
        kinds |= int | float | complex
    named = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [(path, x) for path, x in named if isinstance(x, kinds)]
    rest = [(True, None) if isinstance(x, kinds) else (False, x) for _, x in named]
    paths, arrays = [path for path, _ in arrays], [x for _, x in arrays]
    return Part(arrays, paths, jax.tree.structure(tree), rest)


def joined(arrays, part: Part):
    own = iter(arrays)
    return part.structure.unflatten([next(own) if array else x for array, x in part.rest])
