"""Rounds that average gradients: in every step, or accumulated over the steps of a round."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from local_opt import state as state_lib
from local_opt.checks import check_kind, checked_calls
from local_opt.outer import checked
from local_opt.rounds import Rounds
from local_opt.sync import check_own, synchronize
from local_opt.workers import AXIS, AxisName
from syncopate import mesh


def parallel_rounds(inner: optax.GradientTransformation, *, axis_name: AxisName = AXIS) -> Rounds:
    """Data-parallel training: every step takes the mean gradient of all workers.

    x <- x + inner(1/W sum_w g_w) in a step; a sync does nothing. `update(..., weight=v_w)` weighs
    the gradients, as `synchronize` does.

    Workers that start equal stay bitwise equal, so a loop may keep one copy of parameters and
    state for all of them.

    Args:
      inner: any optax optimizer; it sees the mean gradient, taken in float32.
      axis_name: the workers' axis or axes, bound by `jax.vmap` or `jax.shard_map`.

    Returns:
      A `Rounds` whose state is the inner optimizer's and whose `sync` returns its arguments.

    Raises:
      ValueError: from `init`, for parameters that are not floating; from `sync`, for a weight.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> rounds = local_opt.parallel_rounds(optax.sgd(0.5))
      >>> x = jnp.array([1.0, 1.0])  # two workers
      >>> step = jax.vmap(rounds.update, axis_name="worker")
      >>> updates, state = step(jnp.array([2.0, -4.0]), jax.vmap(rounds.init)(x), x)
      >>> (x + updates).tolist()
      [1.5, 1.5]

    References:
      Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
      https://arxiv.org/abs/1706.02677
    """
    inner = checked(inner)

    def init(params):
        check_kind(params)
        return state_lib.apart(inner.init(params), params)

    def update(grads, state, params=None, *, weight=None, **extra):
        check_own(grads, axis_name)
        mean = synchronize(grads, axis_name=axis_name, weight=weight)
        return inner.update(mean, state, params, **extra)

    def sync(params, state, *, weight=None, **extra):
        del extra
        if weight is not None:
            raise ValueError(
                f"weight is {weight!r} at a sync of parallel_rounds, which average gradients in "
                "every step: pass it to update, or leave it out."
            )
        return params, state

    return checked_calls(Rounds(init, update, sync, True))


class AccumulateState(NamedTuple):
    """The state of one worker in `accumulated_rounds`; all but `mean` is equal on all workers."""

    since: Int[Array, ""]  # steps since the last sync
    inner: Any
    mean: Any  # float32, this worker's mean gradient since the last sync


def accumulated_rounds(
    inner: optax.GradientTransformation, *, axis_name: AxisName = AXIS
) -> Rounds:
    """Gradient accumulation: one inner step per round, with the mean gradient of its batches.

    x <- x + inner(1/W sum_w 1/H sum_h g_wh), all gradients at the round's first parameters. With
    H = 1 this is data-parallel training; with one worker and constant H it is `optax.MultiSteps`.
    `sync(..., weight=v_w)` weighs the workers' mean gradients, as `synchronize` does.

    Args:
      inner: any optax optimizer; it gets the extra arguments of `sync`.
      axis_name: the workers' axis, bound by `jax.vmap` or `jax.shard_map`.

    Returns:
      A `Rounds` whose `update` returns zeros.

    Raises:
      ValueError: from `init`, for parameters that are not floating.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> rounds = local_opt.accumulated_rounds(optax.sgd(0.5))
      >>> x = jnp.array([1.0, 1.0])  # two workers, with two batches each
      >>> state = jax.vmap(rounds.init)(x)
      >>> for grads in jnp.array([[2.0, -4.0], [3.0, -5.0]]):
      ...     _, state = jax.vmap(rounds.update)(grads, state)
      >>> jax.vmap(rounds.sync, axis_name="worker")(x, state)[0].tolist()
      [1.5, 1.5]

    References:
      Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, 2020,
      https://arxiv.org/abs/1808.07217
    """
    inner = checked(inner)

    def init(params):
        check_kind(params)
        own = state_lib.apart(inner.init(params), params)
        state = AccumulateState(jnp.zeros((), jnp.int32), own, state_lib.wide_zeros(params))
        return state_lib.floating_as(state, params, axis_name)

    def update(grads, state, params=None, **extra):
        del params, extra
        check_own(grads, axis_name)
        since = state.since + 1
        mean = jax.tree.map(
            lambda m, g: m + (g.astype(m.dtype) - m) / since.astype(m.real.dtype), state.mean, grads
        )
        return jax.tree.map(jnp.zeros_like, grads), AccumulateState(since, state.inner, mean)

    def sync(params, state, *, weight=None, **extra):
        given, gradient = params, synchronize(state.mean, axis_name=axis_name, weight=weight)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
        updates, inner_state = inner.update(gradient, state.inner, params, **extra)
        params = optax.apply_updates(params, updates)
        zero = jnp.zeros_like(state.since)
        new = AccumulateState(zero, inner_state, jax.tree.map(jnp.zeros_like, state.mean))
        return mesh.alike((params, new), (given, state))

    return checked_calls(Rounds(init, update, sync))
