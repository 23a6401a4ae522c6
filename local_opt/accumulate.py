"""Gradient accumulation: the same communication as local steps, without moving in between."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from local_opt.buffers import apart
from local_opt.rounds import Rounds, check_floating, floating_as
from local_opt.synchronize import synchronize
from syncopate.plans import specs


class AccumulateState(NamedTuple):
    """State of one worker; all but `mean` is equal on all workers."""

    since: jax.Array  # int32[], steps since the last sync
    inner: Any
    mean: Any  # float32, this worker's mean gradient since the last sync


def accumulated_rounds(inner: optax.GradientTransformation, *, axis_name) -> Rounds:
    """One step of the inner optimizer per round, with the mean gradient of all its batches.

    x <- x + inner(1/W sum_w 1/H sum_h g_wh), all gradients at the round's first parameters.
    With a plan that synchronises after every step this is data-parallel training; one worker with
    constant H is `optax.MultiSteps`, which computes the inner update, and so any collective in
    it, in every step.

    Args:
      inner: any optax optimizer; takes one step per round, and its extra arguments from `sync`.
      axis_name: of the workers, bound by `jax.vmap` or `jax.shard_map`.

    Returns:
      A `Rounds` whose `update` returns zeros.

    Raises:
      ValueError: from `init`, for parameters that are not floating.

    Example:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> rounds = local_opt.accumulated_rounds(optax.sgd(0.5), axis_name="worker")
      >>> x = jnp.array([1.0, 1.0])  # two workers
      >>> state = jax.vmap(rounds.init)(x)
      >>> updates, state = jax.vmap(rounds.update)(jnp.array([2.0, -4.0]), state, x)
      >>> x, state = jax.vmap(rounds.sync, axis_name="worker")(x + updates, state)
      >>> x.tolist()
      [1.5, 1.5]

    References:
      Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, 2020,
      https://arxiv.org/abs/1808.07217
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        check_floating(params)
        state = AccumulateState(
            jnp.zeros((), jnp.int32), apart(inner.init(params), params), _zeros(params)
        )
        return floating_as(state, params, axis_name)

    def update(grads, state, params=None, **extra):
        del params, extra
        since = state.since + 1
        mean = jax.tree.map(
            lambda m, g: m + (g.astype(m.dtype) - m) / since.astype(m.real.dtype), state.mean, grads
        )
        return jax.tree.map(jnp.zeros_like, grads), AccumulateState(since, state.inner, mean)

    def sync(params, state, **extra):
        given, gradient = params, synchronize(state.mean, axis_name=axis_name)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
        updates, inner_state = inner.update(gradient, state.inner, params, **extra)
        params = optax.apply_updates(params, updates)
        zero = jnp.zeros_like(state.since)
        new = AccumulateState(zero, inner_state, jax.tree.map(jnp.zeros_like, state.mean))
        return specs.alike((params, new), (given, state))

    return Rounds(init, update, sync)


def _zeros(params):
    return jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )
