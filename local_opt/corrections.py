"""Corrections of a worker's drift between syncs, from what it learned at the last sync."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from local_opt.mean import averaged, check_scalar, moved_from, weighed
from local_opt.opt_state import wide_zeros
from syncopate.plans import check_number

__all__ = ["Correction", "fedprox", "scaffold"]


class Correction(NamedTuple):
    """Pure functions of one worker, for `local_rounds(correction=...)`.

    Attributes:
      init: `params -> state`.
      gradient: `(grads, state, params, anchor) -> grads`, before the inner optimizer; the anchor
        is the parameters at the start of the round.
      update: `(updates, state, **extra) -> (updates, state)`, after the inner optimizer, with the
        step's extra arguments.
      counts: `state -> float32[k]`, whole numbers below 2^24 / W that a sync sums over the workers.
      sync: `(state, *, change, mean, totals, axis_name, relative_weight) -> state`. It gets this
        worker's change in the round, the mean change of all workers and the sums of the counts.
        `relative_weight` is this worker's weight divided by the mean weight, or None.
    """

    init: Callable
    gradient: Callable = lambda grads, state, params, anchor: grads
    update: Callable = lambda updates, state, **extra: (updates, state)
    counts: Callable = lambda state: ()
    sync: Callable = lambda state, **results: state


class ControlState(NamedTuple):
    """The state of one worker in `scaffold`."""

    variate: Any  # c - c_w, float32 or wider; its sum over the workers is zero
    rates: Float[Array, ""]  # float32, the sum of the rates of the round's steps


def scaffold() -> Correction:
    """SCAFFOLD's control variates: each worker corrects its steps towards the mean gradient.

    In a step, x_w <- x_w + u - eta (c - c_w), where u is the inner optimizer's update. After a
    round of H steps whose sync gives the mean x_bar, c - c_w <- c - c_w + (x_w - x_bar) / (H eta).
    eta is the extra argument `rate` of the step: `update(grads, state, params, rate=lr)`. Without
    `rate`, c is in units of updates, which is equivalent at a constant rate.

    With SGD this is SCAFFOLD, option II, with full participation. Let a be the parameters at the
    start of the round. Then c_w <- c_w - c + (a - x_w) / (H eta), and c is the mean of the c_w,
    which is (a - x_bar) / (H eta). Only c - c_w is kept, as in ProxSkip, so a sync sends one
    additional number. The mean of the workers moves as without a correction.

    If workers take different numbers of steps H_w or different rates, each divides by its own
    H_w eta. The sync then also averages (x_w - a) / (H_w eta), which is as large as the parameters.
    That takes a second collective, since only the first one shows whether rates differ. A worker
    that took no step keeps its c - c_w.

    The update is corrected and not the gradient, because its units are right for every inner
    optimizer: c_w is the mean of a worker's updates divided by the rate. Keep the optimizer state
    local. Momentum that is averaged or reset at a sync builds up again in every round, and part of
    the bias stays.

    If a sync has weights, the mean of the c_w has the same weights; a worker with weight zero
    keeps its c - c_w. If nonzero weights change much from sync to sync, the corrections of a round
    do not cancel exactly. Each sync permanently adds the rounding of the mean change to c, about
    6e-8 |x_w - a| / (H eta) in float32.

    Returns:
      A `Correction`, for `local_rounds` and `local_steps`, with as many numbers as the parameters.

    Examples:
      >>> import optax
      >>> from syncopate import local_opt
      >>> correction = local_opt.corrections.scaffold()
      >>> rounds = local_opt.local_rounds(optax.sgd(0.1), correction=correction)

    References:
      Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: Stochastic Controlled Averaging for
      Federated Learning, 2020, https://arxiv.org/abs/1910.06378
      Mishchenko, Malinovsky, Stich, Richtarik, ProxSkip: Yes! Local Gradient Steps Provably Lead to
      Communication Acceleration! Finally!, 2022, https://arxiv.org/abs/2202.09357
    """

    def init(params):
        return ControlState(wide_zeros(params), jnp.zeros((), jnp.float32))

    def update(updates, state, *, rate=1.0, **extra):
        del extra
        check_scalar("rate", rate, jnp.integer, jnp.floating)
        eta = jnp.asarray(rate, jnp.float32)
        updates = jax.tree.map(
            lambda u, c: (u.astype(c.dtype) - eta.astype(c.real.dtype) * c).astype(u.dtype),
            updates,
            state.variate,
        )
        return updates, state._replace(rates=state.rates + eta)

    return Correction(init, update=update, counts=_bits_of_rates, sync=_new_variate)


def _bits_of_rates(state: ControlState) -> Float[Array, "33"]:
    """The bits of a worker's sum of rates, and 1; their sums show whether all rates are equal."""
    bits = lax.bitcast_convert_type(state.rates, jnp.uint32) >> jnp.arange(32, dtype=jnp.uint32)
    return jnp.append(bits & 1, 1).astype(jnp.float32)


def _new_variate(state, *, change, mean, totals, axis_name, relative_weight):
    """The state after a sync of `scaffold`."""
    # After a round without steps, or at a rate of 0, no worker has moved.
    moved = state.rates > 0
    scale = jnp.where(moved, 1 / jnp.where(moved, state.rates, 1), 0)
    counts = jnp.ones((), bool) if relative_weight is None else relative_weight != 0
    per_rate = lambda c, x: scale.astype(c.real.dtype) * x.astype(c.dtype)  # noqa: E731

    def even():
        return jax.tree.map(lambda c, x, m: per_rate(c, x - m), state.variate, change, mean)

    def uneven():
        each, taken = jax.tree.map(per_rate, state.variate, change), moved & counts
        weight = jnp.where(taken, 1.0 if relative_weight is None else relative_weight, 0)
        sent = jax.tree.map(lambda x: weighed(x, weight), each), weight
        of_all, total = averaged(sent, axis_name, None).mean
        return jax.tree.map(lambda x, m: jnp.where(taken, x - m / total, 0), each, of_all)

    equal = jnp.all((totals[:-1] == 0) | (totals[:-1] == totals[-1]))
    more = lax.cond(equal, even, uneven)
    return ControlState(jax.tree.map(jnp.add, state.variate, more), jnp.zeros_like(state.rates))


def recentred(
    state: ControlState, is_new: jax.Array, axis_name: Any, weight: Any = None
) -> ControlState:
    """Subtracts from c - c_w its mean over the workers of a sync, after these have changed.

    The weighted sum of c - c_w over the workers is then zero again. A worker that `is_new` has
    weight 0 and starts with zeros; its first rounds determine its c_w.
    """
    begun = jax.tree.map(lambda c: jnp.where(is_new, 0, c), state.variate)
    mean, share, _ = averaged(begun, axis_name, weight)
    counts = ~is_new if share is None else share != 0
    variate = jax.tree.map(lambda c, m: jnp.where(counts, c - m, c), begun, mean)
    return state._replace(variate=variate)


def fedprox(strength: float) -> Correction:
    """FedProx's pull back to the parameters at the start of the round.

    g <- g + mu (x_w - a), before the inner optimizer, where a is the parameters after the last
    sync. The mean of the workers has a fixed point between that of local steps and that of
    data-parallel training.

    Args:
      strength: mu, finite and >= 0; 0 changes nothing. Keep rate * (curvature + mu) below 1.

    Returns:
      A `Correction`, for `local_rounds` and `local_steps`, without a state.

    Raises:
      ValueError: for a strength out of range; from a step without params.

    Examples:
      >>> import jax.numpy as jnp
      >>> from syncopate import local_opt
      >>> pull, x, start = local_opt.corrections.fedprox(0.5), jnp.array(3.0), jnp.array(1.0)
      >>> float(pull.gradient(jnp.array(0.0), pull.init(start), x, start))
      1.0

    References:
      Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated Optimization in Heterogeneous Networks,
      2020, https://arxiv.org/abs/1812.06127
    """
    check_number("strength", strength, "[0, inf)")

    def gradient(grads, state, params, anchor):
        del state
        if params is None:
            raise ValueError("fedprox needs the parameters: call update(grads, state, params).")
        return jax.tree.map(
            lambda g, d: (g.astype(d.dtype) + strength * d).astype(g.dtype),
            grads,
            moved_from(anchor, params),
        )

    return Correction(lambda params: (), gradient=gradient)
