"""Corrections of local drift: what keeps workers together between two syncs, and sends nothing.

A worker that steps alone walks towards the optimum of its own units. What it needs to know of the
others to walk less far, the sync has told it.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from local_opt.state import wide_zeros
from local_opt.wires import Wire


class Correction(NamedTuple):
    """Pure functions of one worker, for `correction` of `local_rounds`; none holds a collective.

    Fields:
      init: `params -> state`.
      gradient: `(grads, state, params) -> grads`, before the inner optimizer.
      update: `(updates, state, **extra) -> (updates, state)`, after it; the extra arguments of the
        step.
      sync: `(state, *, own, mean, new) -> state`: the worker's parameters before the sync, the
        mean of all, and what the round begins with: the mean, or what an outer optimizer makes.
    """

    init: Callable
    gradient: Callable = lambda grads, state, params: grads
    update: Callable = lambda updates, state, **extra: (updates, state)
    sync: Callable = lambda state, *, own, mean, new: state


class ControlState(NamedTuple):
    """State of control variates of one worker."""

    against: Any  # c - c_w, float32 or wider: added up over the workers it is zero
    rates: jax.Array  # float32[], the sum of the rates of the round's steps


def control_variates() -> Correction:
    """SCAFFOLD's control variates: every worker steps as if its gradient's mean were all workers'.

    x_w <- x_w + u - eta (c - c_w) in a step, where u is the inner optimizer's update; after a round
    of H steps, with x_bar the mean that the sync has found, c - c_w <- c - c_w + (x_w - x_bar) /
    (H eta). eta is the extra argument `rate` of the step: `update(grads, state, params, rate=lr)`;
    without it c is in units of updates, the same for a constant rate.

    With SGD these are the steps of SCAFFOLD, option II, where all workers take part:
    c_w <- c_w - c + (a - x_w) / (H eta) with a the round's first parameters, and as the c_w have
    the mean c, c <- (a - x_bar) / (H eta). So no mean of the c_w is ever asked for, and only their
    difference is kept: it is ProxSkip's, too. The mean over the workers moves as without.

    The update is corrected and not the gradient, so that the units are right for every inner
    optimizer: with SGD the two are the same, with momentum the correction does not pass through
    the buffer (which would apply it 1 / (1 - m) times), and Adam does not divide it. c_w is then
    the mean of a worker's own updates per rate, not of its gradients; workers of Adam go where
    they go with a sync after every step. The state of the optimizer is to stay local: momentum that
    is averaged or reset at a sync builds up anew in every round, which a constant correction cannot
    follow, and a part of the bias stays.

    c_w is the mean gradient of the last round's batches. It is the worker's own where the round
    took all its units; over fewer of them it is noisy, and the noise is put into the next round.
    Every sync adds the mean's rounding to c, about 6e-8 |x| / (H eta) in float32, and nothing takes
    it away: rounds of one step at small rates, which need no correction, drift by it.

    Returns:
      A `Correction`, for `local_rounds` and `local_steps`. It holds as many numbers as the
      parameters.

    Example:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> rounds = local_opt.local_rounds(
      ...     optax.sgd(0.1), axis_name="worker", correction=local_opt.control_variates()
      ... )
      >>> x, curvature, own = jnp.zeros(2), jnp.array([1.0, 3.0]), jnp.array([3.0, -1.0])
      >>> state = jax.vmap(rounds.init)(x)
      >>> for step in range(400):  # the minimum of the mean loss is 0
      ...     updates, state = jax.vmap(rounds.update)(curvature * (x - own), state, x)
      ...     x = x + updates
      ...     if step % 4 == 3:
      ...         x, state = jax.vmap(rounds.sync, axis_name="worker")(x, state)
      >>> bool(abs(x).max() < 1e-6)
      True

    References:
      Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: Stochastic Controlled Averaging for
      Federated Learning, 2020, https://arxiv.org/abs/1910.06378
      Mishchenko, Malinovsky, Stich, Richtarik, ProxSkip: Yes! Local Gradient Steps Provably Lead to
      Communication Acceleration! Finally!, 2022, https://arxiv.org/abs/2202.09357
    """

    def init(params):
        return ControlState(wide_zeros(params), jnp.zeros(()))

    def update(updates, state, *, rate=1.0, **extra):
        del extra
        eta = jnp.asarray(rate, jnp.float32)
        updates = jax.tree.map(lambda u, c: (u - eta * c).astype(u.dtype), updates, state.against)
        return updates, state._replace(rates=state.rates + eta)

    def sync(state, *, own, mean, new):
        del new
        # A round without a step, or with a rate of 0, has moved nobody.
        scale = jnp.where(state.rates > 0, 1 / jnp.where(state.rates > 0, state.rates, 1), 0)
        against = jax.tree.map(
            lambda c, x, m: c + scale * (x.astype(c.dtype) - m.astype(c.dtype)),
            state.against, own, mean,
        )  # fmt: skip
        return state._replace(against=against, rates=jnp.zeros_like(state.rates))

    return Correction(init, update=update, sync=sync)


def proximal(strength: float) -> Correction:
    """FedProx's pull back to the parameters that the round began with.

    g <- g + mu (x_w - a), where a are the parameters after the last sync: before the inner
    optimizer, as part of the loss. Its workers end nearer to each other and to where they were; the
    fixed point of the mean lies between that of local steps and of parallel training, and rounds
    move by less.

    Args:
      strength: mu, finite and >= 0; 0 changes nothing. Keep rate * (curvature + mu) below 1.

    Returns:
      A `Correction`, for `local_rounds` and `local_steps`. It holds as many numbers as the
      parameters.

    Raises:
      ValueError: for a strength out of range; from a step without params.

    Example:
      >>> import jax.numpy as jnp, local_opt
      >>> pull = local_opt.proximal(0.5)
      >>> state = pull.init(jnp.array(1.0))
      >>> float(pull.gradient(jnp.array(0.0), state, jnp.array(3.0)))
      1.0

    References:
      Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated Optimization in Heterogeneous Networks,
      2020, https://arxiv.org/abs/1812.06127
    """
    if not (isinstance(strength, int | float) and 0 <= strength < math.inf):
        raise ValueError(f"strength is {strength!r}: mu must be finite and >= 0.")

    def gradient(grads, state, params):
        if params is None:
            raise ValueError("the pull is on parameters: call update(grads, state, params).")
        return jax.tree.map(
            lambda g, x, a: (g + strength * (x - a)).astype(g.dtype), grads, params, state
        )

    def sync(state, *, own, mean, new):
        del state, own, mean
        return jax.tree.map(jnp.copy, new)  # both are donated

    return Correction(lambda params: jax.tree.map(jnp.copy, params), gradient=gradient, sync=sync)


def check_correction(correction: Correction, wire: Wire | None) -> None:
    """Raises ValueError for what is no correction, or one whose sync would round."""
    if not isinstance(correction, Correction):
        raise ValueError(
            f"correction is {correction!r}: pass what control_variates() or proximal(0.1) return."
        )
    if wire is not None:
        raise ValueError(
            f"the wire ({wire.rule}) rounds what workers send, and a correction would take that "
            "for drift: leave out correction= or wire=."
        )
