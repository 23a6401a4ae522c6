"""The proximal anchor: echoed steps that are drawn back to where the batch was loaded."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax


class ProximalState(NamedTuple):
    """State of the anchor."""

    anchor: Any  # the parameters at the last load


def proximal_anchor(strength: float) -> optax.GradientTransformationExtraArgs:
    """Adds the pull of the parameters at the last load to the gradient.

    g <- g + lambda (x - a), a = x at the steps that load a fresh batch.

    The K uses of a batch then minimise f_batch(x) + lambda/2 |x - a|^2, however many they are: a
    batch cannot pull the parameters further than its proximal point, and the learning rate need
    not fall with K. Put it first in a chain, before momentum.

    Args:
      strength: lambda >= 0, in units of the gradient over the parameter; 0 changes nothing.

    Returns:
      A GradientTransformationExtraArgs; `update` needs `params` and the extra argument `fresh`,
      bool or bool[], True in the first use of a batch.

    Raises:
      ValueError: for a negative or infinite strength; from `update` without params.

    Example:
      >>> import jax.numpy as jnp, optax, ordering
      >>> opt = optax.chain(ordering.echo.proximal_anchor(2.0), optax.sgd(0.5))
      >>> x, g = jnp.array(1.0), jnp.array(1.0)
      >>> state = opt.init(x)
      >>> for fresh in (True, False, False):
      ...     update, state = opt.update(g, state, x, fresh=fresh)
      ...     x = x + update
      >>> float(x)  # 1, then 0.5 = the proximal point 1 - g / lambda, where it stays
      0.5

    References:
      Agarwal, Anil, Koren, Talwar, Zhang, Stochastic Optimization with Laggard Data Pipelines,
      2020, https://arxiv.org/abs/2010.13639
    """
    if not (np.isfinite(strength) and strength >= 0):
        raise ValueError(f"strength is {strength!r}: lambda must be finite and >= 0.")

    def init(params):
        # A copy: parameters and state are often donated together.
        return ProximalState(jax.tree.map(jnp.copy, params))

    def update(updates, state, params=None, *, fresh, **extra):
        del extra
        if params is None:
            raise ValueError("the anchor pulls on parameters: call update(grads, state, params).")
        anchor = jax.tree.map(lambda p, a: jnp.where(fresh, p, a), params, state.anchor)
        updates = jax.tree.map(
            lambda u, p, a: u + (strength * (p - a)).astype(u.dtype), updates, params, anchor
        )
        return updates, ProximalState(anchor)

    return optax.GradientTransformationExtraArgs(init, update)
