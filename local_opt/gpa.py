"""Generalized primal averaging: the steps of any optimizer, smoothed, for one worker."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from local_opt.outer import check_call, checked
from local_opt.workers import check_kind
from syncopate.plans import check_like, check_number


class GPAState(NamedTuple):
    """The state of `gpa`."""

    z: PyTree  # what the inner optimizer has stepped to
    mu_y: Float[Array, ""]
    inner: Any


def gpa(
    inner: optax.GradientTransformation, *, mu_x: float = 0.9967, mu_y: float = 0.7
) -> optax.GradientTransformationExtraArgs:
    """Generalized primal averaging: gradients at y, steps of z, and a smoothed x to evaluate.

    z <- z + inner(g(y)); x <- mu_x x + (1 - mu_x) z; y = mu_y x + (1 - mu_y) z.

    The parameters are y, and the state holds z: one copy more than the inner optimizer, no round
    and no collective. It smooths what one-worker DiLoCo (`snoo`) does every H steps; mu_x = 0.9967
    stands for H = 32, 0.9934 for 16, and 0.9984 for 64. `gpa_eval_params` has the weights to
    evaluate. As the inner optimizer of local steps, pass opt_state={"z": "mean"}: means of y and z
    are the mean of x.

    Args:
      inner: any optax optimizer; it gets z as its parameters, so weight decay acts on z.
      mu_x: in [0, 1), how slowly x follows.
      mu_y: in (0, 1], the share of x in y.

    Returns:
      A GradientTransformationExtraArgs; its `update` needs `params`.

    Raises:
      ValueError: for values out of range; from `update`, without params.

    Examples:
      >>> import jax.numpy as jnp, optax, local_opt
      >>> optimizer = local_opt.gpa(optax.sgd(1.0), mu_x=0.5, mu_y=0.5)
      >>> y = jnp.array([8.0])
      >>> state = optimizer.init(y)
      >>> updates, state = optimizer.update(jnp.array([4.0]), state, y)
      >>> y = optax.apply_updates(y, updates)
      >>> state.z.tolist(), local_opt.gpa_eval_params(state, y).tolist(), y.tolist()
      ([4.0], [6.0], [5.0])

    References:
      Defazio, Mishchenko, Raman, Shi, Xiao, Smoothing DiLoCo with Primal Averaging for Faster
      Training of LLMs, 2025, https://arxiv.org/abs/2512.17131 and
      https://github.com/facebookresearch/optimizers/tree/main/gpa
    """
    check_number("mu_x", mu_x, "[0, 1)")
    check_number("mu_y", mu_y, "(0, 1]")
    inner = checked(inner)

    def init(params):
        check_kind(params)
        return GPAState(jax.tree.map(jnp.copy, params), jnp.float32(mu_y), inner.init(params))

    def update(updates, state, params=None, **extra):
        if params is None:
            raise ValueError("z differs from the parameters: call update(grads, state, params).")
        check_call(init, state, params, updates)
        steps, own = inner.update(updates, state.inner, state.z, **extra)

        def move(y, z, u):  # of y, without x
            return ((1 - mu_x) * (z - y) + (1 - mu_x * mu_y) * u).astype(y.dtype)

        moves = jax.tree.map(move, params, state.z, steps)
        return moves, state._replace(z=optax.apply_updates(state.z, steps), inner=own)

    return optax.GradientTransformationExtraArgs(init, update)


def gpa_eval_params(state: Any, params: PyTree) -> PyTree:
    """The weights x of `gpa` to evaluate and export: x = (y - (1 - mu_y) z) / mu_y.

    Args:
      state: of `gpa`, also inside the state of a chain or of `local_steps`.
      params: y, the parameters that are trained.

    Returns:
      x, a tree like the parameters. Of workers with a leading axis, `consolidate` state and
      parameters first.

    Raises:
      ValueError: for the state of another optimizer.

    Examples:
      >>> import jax.numpy as jnp, optax, local_opt
      >>> y = jnp.array([8.0])
      >>> local_opt.gpa_eval_params(local_opt.gpa(optax.adamw(1e-3)).init(y), y).tolist()
      [8.0]
    """
    z, mu_y = (optax.tree_utils.tree_get(state, name) for name in ("z", "mu_y"))
    if z is None or mu_y is None:
        raise ValueError(f"state is a {type(state).__name__} without gpa's: pass that of gpa.")
    check_like("params", params, z, "gpa's z")
    return jax.tree.map(lambda y, z: (z + (y - z) / mu_y).astype(y.dtype), params, z)
