"""Outer optimizers, which take the mean change of a round as a gradient."""

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import PyTree
from optax import contrib

from local_opt.mean import check_scalar
from local_opt.plans import SyncPlan, check_plan
from local_opt.workers import wide_type
from syncopate.plans import check_like, check_number, check_whole, is_number

# {a state: what its optimizer takes, and what to do}: gradients that are not like the parameters.
TAKES = {
    contrib.DifferentiallyPrivateAggregateState: (
        "optax.contrib.dpsgd takes the gradients of all examples, and a step here one gradient "
        "like the parameters: put optax.contrib.differentially_private_aggregate before it, as "
        "optax.chain(differentially_private_aggregate(..), local_steps(optax.sgd(..), plan))."
    ),
    optax.LookaheadState: (
        "optax.lookahead takes pairs of fast and slow parameters, and a step here one copy: take "
        "its fast optimizer, and outer=optax.sgd(slow_step_size), which does the same at a sync; "
        "for one worker with axis_name=()."
    ),
}


def checked(
    optimizer: optax.GradientTransformation, name: str = "inner"
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which takes extra arguments; raises ValueError for anything else.

    Its init raises ValueError for the state of an optimizer of TAKES.
    """
    if not all(callable(getattr(optimizer, part, None)) for part in ("init", "update")):
        raise ValueError(f"{name} is {optimizer!r}: pass an optimizer, as optax.sgd(0.1).")
    update = optax.with_extra_args_support(optimizer).update
    parameters = inspect.signature(optimizer.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # optax.MultiSteps is not typed so
        update = optimizer.update

    def init(params):
        state = optimizer.init(params)
        for node in jax.tree.leaves(state, is_leaf=lambda node: type(node) in TAKES):
            if type(node) in TAKES:
                raise ValueError(f"{name}: {TAKES[type(node)]}")
        return state

    return optax.GradientTransformationExtraArgs(init, update)


def check_call(init: Callable, state: PyTree, params: PyTree, grads: PyTree) -> None:
    """Raises ValueError unless gradients are like the parameters, and the state as init makes it.

    Without parameters (None) the gradients stand in for them.
    """
    if params is not None:
        check_like("gradient", grads, params, "the parameters")
    try:
        made = jax.eval_shape(init, grads if params is None else params)
    except jax.errors.JAXTypeError:  # an init that looks at values
        return
    check_like("state", state, made, "init(params)")


def outer_step(outer: Any, state: Any, anchor: PyTree, mean: PyTree, period: Any) -> tuple:
    """(parameters, state) after a round of so many steps: a + outer(a - x_bar), or the mean."""
    if outer is None:
        return mean, state

    def step(state, anchor, mean):
        change = jax.tree.map(jnp.subtract, anchor, mean)
        updates, state = outer.update(change, state, anchor, period=period)
        return optax.apply_updates(anchor, updates), state

    if not jax.sharding.get_abstract_mesh().manual_axes:
        return step(state, anchor, mean)
    # Devices hold arrays [1, ...]. In that shape XLA writes momentum and anchor in place; in the
    # worker's own it computes momentum twice, of copies.
    rows = jax.tree.map(lambda x: jnp.expand_dims(x, 0), (state, anchor, mean))
    return jax.tree.map(lambda x: jnp.squeeze(x, 0), jax.vmap(step)(*rows))


def normalize_by_period(
    outer: optax.GradientTransformation, *, h_base: int
) -> optax.GradientTransformationExtraArgs:
    """Corrects an outer optimizer for rounds of different lengths.

    The change of a round of H steps is scaled by H_base / H, and the update by H / H_base. The
    outer optimizer's state then holds changes per H_base steps, whatever the round's length. If
    workers took different numbers of steps, H is their mean, weighted as the sync is.
    Nothing changes for H = H_base, or for plain averaging.

    Outer momentum multiplies a steady change by lr / (1 - m). The long last rounds of a growing
    plan leave no time to recover from the overshoot: bound them by `h_max`.

    Args:
      outer: the outer optimizer.
      h_base: >= 1, the round length for which its rate was chosen.

    Returns:
      An optimizer that needs the extra argument `period`, which `local_steps` passes.

    Raises:
      ValueError: for h_base below 1; from `update`, without a period.

    Examples:
      >>> import jax.numpy as jnp, optax, local_opt
      >>> outer = local_opt.normalize_by_period(optax.sgd(1.0, momentum=0.5), h_base=2)
      >>> state = outer.init(jnp.zeros(()))
      >>> for period in (2, 8):  # a change of 1 per step
      ...     update, state = outer.update(jnp.float32(period), state, period=period)
      >>> float(update)
      -12.0
    """
    check_whole("h_base", h_base, 1)
    outer = checked(outer, "outer")

    def update(updates, state, params=None, *, period: ArrayLike | None = None, **extra):
        if period is None:
            raise ValueError("pass period=, the round's number of steps, as local_steps does.")
        check_scalar("period", period, jnp.integer, jnp.floating)
        if is_number(period):  # not while it is traced
            check_number("period", period, "[0, inf)")
        length = jnp.maximum(jnp.asarray(period, jnp.float32), 1) / h_base  # a sync without steps
        wide = lambda x: x.astype(wide_type(x.dtype))  # noqa: E731
        scaled = jax.tree.map(lambda d: (wide(d) / length).astype(d.dtype), updates)
        updates, state = outer.update(scaled, state, params, period=period, **extra)
        return jax.tree.map(lambda u: (wide(u) * length).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(outer.init, update)


def rounds_needed(momentum: float) -> int:
    """The least R with m^(R / 2) <= 0.1, the rest of an oscillation."""
    return math.ceil(2 * math.log(0.1) / math.log(momentum)) if momentum else 1


def outer_momentum(
    name: str, plan: SyncPlan, learning_rate: float, momentum: float, *, nesterov: bool = True
) -> optax.GradientTransformation:
    """A preset's outer optimizer; warns where the plan has few rounds for its momentum."""
    check_number("learning_rate", learning_rate, "(0, inf)")
    check_number("momentum", momentum, "[0, 1)")
    check_plan(plan)
    rounds = plan.rounds
    if rounds < (needed := rounds_needed(momentum)):
        warnings.warn(
            f"{name} has {rounds} rounds for an outer momentum of {momentum:g}: of what it "
            f"overshoots {momentum ** (rounds / 2):.0%} may be left at the end. Take at least "
            f"{needed} rounds (a shorter H or a longer run), a smaller momentum, or "
            "plain averaging: local_steps without outer=.",
            stacklevel=3,
        )
    return optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
