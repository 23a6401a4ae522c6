"""Outer optimizers: what is done with the mean change of a round, as if it were a gradient."""

import jax
import jax.numpy as jnp
import optax


def nesterov(*, learning_rate: float = 0.7, momentum: float = 0.9) -> optax.GradientTransformation:
    """Nesterov momentum on the changes of the rounds, as in DiLoCo.

    v <- m v + d; x <- a - lr (d + m v), where d = a - x_bar is the round's change.

    Args:
      learning_rate: > 0; 0.7 in the paper.
      momentum: in [0, 1); 0.9 in the paper. With 0 and a rate of 1 this is plain averaging.

    Returns:
      An optax transformation, for `outer` of `local_steps`.

    Raises:
      ValueError: for values out of range.

    Example:
      >>> import optax, local_opt
      >>> plan = local_opt.constant(30, total_steps=300)
      >>> outer = local_opt.nesterov(learning_rate=0.7, momentum=0.9)
      >>> opt = local_opt.local_steps(optax.adamw(1e-3), plan, axis_name="worker", outer=outer)

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
      https://arxiv.org/abs/2311.08105
    """
    _check(learning_rate, momentum)
    return optax.sgd(learning_rate, momentum=momentum, nesterov=True)


def slow_momentum(
    *, learning_rate: float = 1.0, momentum: float = 0.5
) -> optax.GradientTransformation:
    """Heavy-ball momentum on the changes of the rounds, as in SlowMo.

    v <- m v + d; x <- a - lr v, where d = a - x_bar is the round's change. The paper divides d by
    the inner learning rate and multiplies v by it: the same for a constant rate.

    Args:
      learning_rate: > 0; 1 in the paper.
      momentum: in [0, 1); 0.4 to 0.8 in the paper.

    Returns:
      An optax transformation, for `outer` of `local_steps`.

    Raises:
      ValueError: for values out of range.

    Example:
      >>> import jax.numpy as jnp, local_opt
      >>> outer = local_opt.slow_momentum(momentum=0.5)
      >>> state = outer.init(jnp.zeros(()))
      >>> for _ in range(2):
      ...     update, state = outer.update(jnp.ones(()), state)
      >>> float(update)
      -1.5

    References:
      Wang, Tantia, Ballas, Rabbat, SlowMo: Improving Communication-Efficient Distributed SGD with
      Slow Momentum, 2020, https://arxiv.org/abs/1910.00643
    """
    _check(learning_rate, momentum)
    return optax.sgd(learning_rate, momentum=momentum)


def normalize_by_period(
    outer: optax.GradientTransformation, *, h_base: int
) -> optax.GradientTransformationExtraArgs:
    """Corrects an outer optimizer for rounds of different lengths.

    The change of a round of H steps enters as d H_base / H and the update leaves as u H / H_base:
    the state of the outer optimizer holds changes per H_base steps, so a long round neither
    floods the momentum that the next short ones inherit, nor is moved by the momentum of short
    rounds as if it were one. Nothing changes for H = H_base, nor for plain averaging.

    The momentum of an outer optimizer multiplies a steady change by lr / (1 - m) whatever the
    round's length; long last rounds of a growing plan leave no time to come back from it. Bound
    them by `h_max`.

    Args:
      outer: any optax transformation of changes.
      h_base: >= 1, the round length that the outer optimizer's rate was chosen for.

    Returns:
      An optax transformation that needs the extra argument `period`, which `local_steps` passes.

    Raises:
      ValueError: for h_base below 1.

    Example:
      >>> import jax.numpy as jnp, local_opt
      >>> outer = local_opt.normalize_by_period(local_opt.slow_momentum(momentum=0.5), h_base=2)
      >>> state = outer.init(jnp.zeros(()))
      >>> for period in (2, 8):  # a change of 1 per step
      ...     update, state = outer.update(jnp.float32(period), state, period=period)
      >>> float(update)
      -12.0
    """
    if isinstance(h_base, bool) or not isinstance(h_base, int) or h_base < 1:
        raise ValueError(f"h_base is {h_base!r}: it must be a whole number >= 1.")
    outer = optax.with_extra_args_support(outer)

    def update(changes, state, params=None, *, period, **extra):
        length = jnp.maximum(jnp.asarray(period, jnp.float32), 1) / h_base  # a sync without steps
        scaled = jax.tree.map(lambda d: (d / length).astype(d.dtype), changes)
        updates, state = outer.update(scaled, state, params, period=period, **extra)
        return jax.tree.map(lambda u: (u * length).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(outer.init, update)


def _check(learning_rate, momentum):
    if not learning_rate > 0:
        raise ValueError(f"learning_rate is {learning_rate}: it must be positive.")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum}: it must lie in [0, 1).")
