"""Data-parallel training as rounds: workers talk in every step, and a sync has nothing to do."""

import optax

from local_opt.buffers import apart
from local_opt.rounds import Rounds, check_floating, mean_gradient


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
        return inner.update(mean_gradient(grads, axis_name), state, params, **extra)

    def sync(params, state, **extra):
        del extra
        return params, state

    return Rounds(init, update, sync)
