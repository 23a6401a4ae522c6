"""Rounds that average gradients, and not parameters: data-parallel training, and accumulation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from local_opt.rounds import Rounds
from local_opt.state import apart, check_floating, floating_as
from local_opt.sync import synchronize
from syncopate import mesh


def parallel_rounds(inner: optax.GradientTransformation, *, axis_name) -> Rounds:
    """Steps with the mean gradient of all workers.

    x <- x + inner(1/W sum_w g_w) in a step; nothing in a sync.

    Workers that start equal stay bitwise equal, whatever the plan, so a loop may keep one copy of
    parameters and state for all of them, where other rounds need one per worker.
    `accumulated_rounds` that synchronise after every step take the same steps.

    Args:
      inner: any optax optimizer; it sees the mean gradient, taken in float32.
      axis_name: of the workers, or a tuple of names; bound by `jax.vmap` or `jax.shard_map`.

    Returns:
      A `Rounds` whose state is the inner optimizer's, whose `update` holds one collective and
      passes its extra arguments on, and whose `sync` returns what it is given.

    Raises:
      ValueError: from `init`, for parameters that are not floating.

    Example:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> rounds = local_opt.parallel_rounds(optax.sgd(0.5), axis_name="worker")
      >>> x = jnp.array([1.0, 1.0])  # two workers
      >>> state = jax.vmap(rounds.init)(x)
      >>> step = jax.vmap(rounds.update, axis_name="worker")
      >>> updates, state = step(jnp.array([2.0, -4.0]), state, x)
      >>> (x + updates).tolist()
      [1.5, 1.5]

    References:
      Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
      https://arxiv.org/abs/1706.02677
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        check_floating(params)
        return apart(inner.init(params), params)

    def update(grads, state, params=None, **extra):
        return inner.update(_mean_gradient(grads, axis_name), state, params, **extra)

    def sync(params, state, **extra):
        del extra
        return params, state

    return Rounds(init, update, sync, in_step=True)


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
        return mesh.alike((params, new), (given, state))

    return Rounds(init, update, sync)


def _zeros(params):
    return jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)), params
    )


def _mean_gradient(grads, axis_name):
    """The mean over an axis, or a tuple of axes, in float32 or wider, and cast back."""
    wide = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, jnp.float32)), grads)
    mean = jax.lax.pmean(wide, axis_name)
    return jax.tree.map(lambda m, g: m.astype(g.dtype), mean, grads)
