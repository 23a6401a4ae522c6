"""Methods that people ask for by name: each is `local_steps` with an outer optimizer."""

import math
import warnings

import optax

from local_opt.outer import nesterov, slow_momentum
from local_opt.plans import SyncPlan
from local_opt.transform import local_steps

LEFT = 0.1  # of an oscillation at the end of a run, above which rounds are few


def diloco(
    inner: optax.GradientTransformation,
    plan: SyncPlan,
    *,
    axis_name,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    **options,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: local steps of AdamW, and Nesterov momentum on the mean change of a round.

    x_w <- x_w + inner(g_w) in a step; at a sync, with d = a - x_bar: v <- m v + d,
    a <- a - lr (d + m v), x_w <- a.

    An outer momentum needs rounds: what it overshoots comes back as an oscillation that falls as
    m^(R / 2) in R rounds, at worst. Where a tenth is left of it there is a warning.

    Args:
      inner: the workers' optimizer; `optax.adamw` in the paper.
      plan: `constant(500, total_steps=T)` in the paper; a run of at least 44 rounds for m = 0.9.
      axis_name: of the workers.
      learning_rate, momentum: of the outer optimizer: lr > 0 and m in [0, 1).
      options: of `local_steps`.

    Returns:
      A GradientTransformationExtraArgs, as of `local_steps`.

    Raises:
      ValueError: as of `nesterov` and `local_steps`.

    Warns:
      UserWarning: where the plan has few rounds for the momentum.

    Example:
      >>> import optax, local_opt
      >>> plan = local_opt.constant(50, total_steps=5000)
      >>> optimizer = local_opt.diloco(optax.adamw(4e-4), plan, axis_name="worker")

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
      https://arxiv.org/abs/2311.08105
    """
    outer = nesterov(learning_rate=learning_rate, momentum=momentum)
    _warn_if_short("diloco", plan, momentum)
    return local_steps(inner, plan, axis_name=axis_name, outer=outer, **options)


def slowmo(
    inner: optax.GradientTransformation,
    plan: SyncPlan,
    *,
    axis_name,
    learning_rate: float = 1.0,
    momentum: float = 0.5,
    **options,
) -> optax.GradientTransformationExtraArgs:
    """SlowMo: local steps, and heavy-ball momentum on the mean change of a round.

    x_w <- x_w + inner(g_w) in a step; at a sync, with d = a - x_bar: v <- m v + d, a <- a - lr v,
    x_w <- a.

    Args:
      inner: the workers' optimizer; SGD with Nesterov momentum in the paper.
      plan: `constant(12, total_steps=T)` in the paper.
      axis_name: of the workers.
      learning_rate, momentum: of the outer optimizer: lr > 0, 1 in the paper, and m in [0, 1),
        0.4 to 0.8 there.
      options: of `local_steps`; the paper resets the inner momentum: `opt_state="reset"`.

    Returns:
      A GradientTransformationExtraArgs, as of `local_steps`.

    Raises:
      ValueError: as of `slow_momentum` and `local_steps`.

    Warns:
      UserWarning: where the plan has few rounds for the momentum.

    Example:
      >>> import optax, local_opt
      >>> plan = local_opt.constant(12, total_steps=1200)
      >>> optimizer = local_opt.slowmo(optax.sgd(0.1), plan, axis_name="worker", opt_state="reset")

    References:
      Wang, Tantia, Ballas, Rabbat, SlowMo: Improving Communication-Efficient Distributed SGD with
      Slow Momentum, 2020, https://arxiv.org/abs/1910.00643
    """
    outer = slow_momentum(learning_rate=learning_rate, momentum=momentum)
    _warn_if_short("slowmo", plan, momentum)
    return local_steps(inner, plan, axis_name=axis_name, outer=outer, **options)


def rounds_needed(momentum: float) -> int:
    """The least R with m^(R / 2) <= 0.1."""
    return math.ceil(2 * math.log(LEFT) / math.log(momentum)) if momentum else 1


def _warn_if_short(name, plan, momentum) -> None:
    rounds = getattr(plan, "rounds", math.inf)  # what is no plan is refused where it is used
    if rounds < (needed := rounds_needed(momentum)):
        warnings.warn(
            f"{name} has {rounds} rounds for an outer momentum of {momentum:g}: of what it "
            f"overshoots {momentum ** (rounds / 2):.0%} may be left at the end. Take at least "
            f"{needed} rounds (a shorter H or a longer run), a smaller momentum, or "
            "plain averaging: local_steps without outer=.",
            stacklevel=3,
        )
