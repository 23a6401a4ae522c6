"""One model out of many: the mean of workers, and what is measured anew on it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
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
