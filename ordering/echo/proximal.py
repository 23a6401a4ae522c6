"""An optimizer that is pulled back to the parameters of the last load."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from syncopate import plans


class ProximalState(NamedTuple):
    """State of `proximal_anchor`."""

    anchor: PyTree[jax.Array]  # the parameters at the last load


def proximal_anchor(strength: float) -> optax.GradientTransformationExtraArgs:
    """Pulls the parameters towards their value at the last load.

    g <- g + lambda (x - a), where a is x at the last step that loaded a batch.

    The K uses of a batch then minimise f_batch(x) + lambda/2 |x - a|^2. Its minimum limits how far
    they move the parameters, so the learning rate need not fall with K. Put it first in a chain,
    before momentum.

    Args:
      strength: lambda >= 0, in units of the gradient over the parameter; 0 for no pull.

    Returns:
      A GradientTransformationExtraArgs; `update` needs `params` and the extra argument `fresh`,
      bool or bool[], True in the first use of a batch.

    Raises:
      ValueError: for a negative or infinite strength; from `update` without params or `fresh`.

    Examples:
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
    plans.check_number("strength", strength, "[0, inf)")

    def init(params):
        # A copy: parameters and state are often donated together.
        return ProximalState(jax.tree.map(jnp.copy, params))

    def update(updates, state, params=None, *, fresh=None, **extra):
        del extra
        if params is None or fresh is None:
            missing = "params" if params is None else "fresh"
            raise ValueError(
                f"{missing} is missing: call update(g, state, params, fresh=use.fresh)."
            )
        if not isinstance(state, ProximalState):
            raise ValueError(f"state is a {type(state).__name__}: pass that of this init.")
        known = isinstance(fresh, bool)
        if not known and (getattr(fresh, "dtype", None) != jnp.bool_ or jnp.shape(fresh)):
            raise ValueError(f"fresh is {fresh!r}: pass a bool, or bool[] of a step's arguments.")
        plans.check_like("updates", updates, params, "params")
        plans.check_like(
            "anchor", state.anchor, params, "params", "pass the state of these params."
        )
        anchor = jax.tree.map(lambda p, a: jnp.where(fresh, p, a), params, state.anchor)
        updates = jax.tree.map(
            lambda u, p, a: u + (strength * (p - a)).astype(u.dtype), updates, params, anchor
        )
        return updates, ProximalState(anchor)

    return optax.GradientTransformationExtraArgs(init, update)
