"""Published methods as settings of `local_steps`, and their outer optimizers."""

import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Int, PyTree

from local_opt.corrections import Correction
from local_opt.formats import Compressor
from local_opt.mean import check_scalar
from local_opt.opt_state import LOCAL, checked
from local_opt.plans import SyncPlan, check_plan
from local_opt.rounds import local_steps
from local_opt.workers import AxisName, wide_type
from syncopate.plans import check_number, check_whole
from syncopate.workers import AXIS

__all__ = ["diloco", "normalize_by_period", "slowmo"]


def diloco(
    inner: optax.GradientTransformation,
    plan: SyncPlan,
    *,
    axis_name: AxisName = AXIS,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    sync_opt_state: str | Mapping[str, str | SyncPlan] = LOCAL,
    compress: Compressor | None = None,
    correction: Correction | None = None,
    specs: PyTree[PartitionSpec] | None = None,
    drift: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """DiLoCo: local steps of AdamW, and Nesterov momentum on the mean change of a round.

    x_w <- x_w + inner(g_w) in a step; at a sync, with d = a - x_bar: v <- m v + d,
    a <- a - lr (d + m v), x_w <- a.

    Outer momentum overshoots, and the oscillation decays at worst as m^(R / 2) over R rounds. A
    warning says if more than a tenth of it may be left at the end. With Muon as the inner optimizer
    this is MuLoCo. Its code has lr = 0.7 and m = 0.6 for one worker, 0.9 and 0.8 for two, and 1 and
    0.9 for 16.

    Args:
      inner: the workers' optimizer; `optax.adamw` in the paper.
      plan: `constant(500, total_steps=T)` in the paper; take at least 44 rounds for m = 0.9.
      learning_rate, momentum: of the outer optimizer: lr > 0 and m in [0, 1).
      axis_name, sync_opt_state, compress, correction, specs, drift: see `local_steps`.

    Returns:
      A GradientTransformationExtraArgs, as `local_steps`.

    Raises:
      ValueError: for values out of range, and as `local_steps`.

    Examples:
      >>> import optax
      >>> from syncopate import local_opt
      >>> plan = local_opt.constant(50, total_steps=5000)
      >>> optimizer = local_opt.presets.diloco(optax.adamw(4e-4), plan)
      >>> muon = optax.contrib.muon(0.02, beta=0.9, nesterov=False, adam_b2=0.99)
      >>> optimizer = local_opt.presets.diloco(muon, plan, learning_rate=0.9, momentum=0.8)

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
      https://arxiv.org/abs/2311.08105
      Thérien et al., MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo, 2025,
      https://arxiv.org/abs/2505.23725 and https://github.com/facebookresearch/MuLoCo
    """
    outer = outer_momentum("diloco", plan, learning_rate, momentum)
    return local_steps(
        inner,
        plan,
        axis_name=axis_name,
        sync_opt_state=sync_opt_state,
        outer=outer,
        compress=compress,
        correction=correction,
        specs=specs,
        drift=drift,
    )


def slowmo(
    inner: optax.GradientTransformation,
    plan: SyncPlan,
    *,
    axis_name: AxisName = AXIS,
    learning_rate: float = 1.0,
    momentum: float = 0.5,
    inner_rate: optax.ScalarOrSchedule = 1.0,
    sync_opt_state: str | Mapping[str, str | SyncPlan] = LOCAL,
    compress: Compressor | None = None,
    correction: Correction | None = None,
    specs: PyTree[PartitionSpec] | None = None,
    drift: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """SlowMo: local steps, and heavy-ball momentum on the mean change of a round.

    x_w <- x_w + inner(g_w) in a step; at a sync, with d = a - x_bar: v <- m v + d / gamma,
    a <- a - lr gamma v, x_w <- a.

    gamma is the inner rate of the round's last step, as in the authors' code; a constant rate
    cancels. Without gamma, the momentum of earlier rounds weighs too much once the rate has fallen.

    Args:
      inner: the workers' optimizer; SGD with Nesterov momentum in the paper.
      plan: `constant(12, total_steps=T)` in the paper.
      learning_rate, momentum: those of the outer optimizer: lr > 0 and m in [0, 1). The paper has
        lr = 1 and m from 0.4 to 0.8.
      inner_rate: gamma > 0, the schedule of `inner` over the steps since `init`; any number for a
        constant rate. A round that ends at a rate of 0 adds nothing to the momentum.
      axis_name, sync_opt_state, compress, correction, specs, drift: see `local_steps`; the paper
        has `sync_opt_state="reset"`.

    Returns:
      A GradientTransformationExtraArgs, as `local_steps`.

    Raises:
      ValueError: for values out of range, and as `local_steps`.

    Examples:
      >>> import optax
      >>> from syncopate import local_opt
      >>> plan = local_opt.constant(12, total_steps=1200)
      >>> lr = optax.cosine_decay_schedule(0.1, 1200)
      >>> optimizer = local_opt.presets.slowmo(optax.sgd(lr), plan, inner_rate=lr)

    References:
      Wang, Tantia, Ballas, Rabbat, SlowMo: Improving Communication-Efficient Distributed SGD with
      Slow Momentum, 2020, https://arxiv.org/abs/1910.00643, and
      https://github.com/facebookresearch/fairscale
    """
    if not callable(inner_rate):
        check_number("inner_rate", inner_rate, "(0, inf)")
    outer = outer_momentum("slowmo", plan, learning_rate, momentum, nesterov=False)
    outer = _per_rate(outer, inner_rate) if callable(inner_rate) else outer
    return local_steps(
        inner,
        plan,
        axis_name=axis_name,
        sync_opt_state=sync_opt_state,
        outer=outer,
        compress=compress,
        correction=correction,
        specs=specs,
        drift=drift,
    )


class PerRateState(NamedTuple):
    """The state of the outer optimizer of `slowmo`."""

    count: Int[Array, ""]  # steps of all rounds
    outer: Any


def _per_rate(outer, rate):
    """The outer optimizer with input d / gamma and updates that are scaled by gamma."""

    def init(params):
        return PerRateState(jnp.zeros((), jnp.int32), outer.init(params))

    def update(updates, state, params=None, *, period: ArrayLike = 0, **extra):
        # The period is a mean over the workers, so it is float32.
        count = state.count + jnp.round(period).astype(jnp.int32)
        gamma = jnp.asarray(rate(jnp.maximum(count - 1, 0)), jnp.float32)
        inverse = jnp.where(gamma > 0, 1 / gamma, 0)
        scaled = jax.tree.map(lambda d: (d * inverse).astype(d.dtype), updates)
        updates, outer_state = outer.update(scaled, state.outer, params, **extra)
        updates = jax.tree.map(lambda u: (u * gamma).astype(u.dtype), updates)
        return updates, PerRateState(count, outer_state)

    return optax.GradientTransformationExtraArgs(init, update)


def normalize_by_period(
    outer: optax.GradientTransformation, *, h_base: int
) -> optax.GradientTransformationExtraArgs:
    """Corrects an outer optimizer for rounds of different lengths.

    The change of a round of H steps is scaled by H_base / H, and the update by H / H_base. So the
    outer optimizer's state holds changes per H_base steps. If rounds grow, the long last ones leave
    no time to recover from the overshoot of momentum: limit them by `h_max`.

    Args:
      outer: the outer optimizer.
      h_base: >= 1, the round length for which its rate was chosen.

    Returns:
      An optimizer that needs the extra argument `period`, which `local_steps` passes.

    Raises:
      ValueError: for h_base below 1; from `update`, without a period.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from syncopate import local_opt
      >>> outer = local_opt.presets.normalize_by_period(optax.sgd(1.0, momentum=0.5), h_base=2)
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
            raise ValueError("pass period=, the number of steps in the round, like local_steps.")
        check_scalar("period", period, jnp.integer, jnp.floating, interval="[0, inf)")
        length = jnp.maximum(jnp.asarray(period, jnp.float32), 1) / h_base  # a sync without steps
        wide = lambda x: x.astype(wide_type(x.dtype))  # noqa: E731
        scaled = jax.tree.map(lambda d: (wide(d) / length).astype(d.dtype), updates)
        updates, state = outer.update(scaled, state, params, period=period, **extra)
        return jax.tree.map(lambda u: (wide(u) * length).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(outer.init, update)


def outer_momentum(
    name: str, plan: SyncPlan, learning_rate: float, momentum: float, *, nesterov: bool = True
) -> optax.GradientTransformation:
    """A preset's outer optimizer; warns if the plan has too few rounds for its momentum."""
    check_number("learning_rate", learning_rate, "(0, inf)")
    check_number("momentum", momentum, "[0, 1)")
    check_plan(plan)
    rounds, needed = plan.rounds, 1  # the least R with m^(R / 2) <= 0.1
    if momentum:
        needed = math.ceil(2 * math.log(0.1) / math.log(momentum))
    if rounds < needed:
        warnings.warn(
            f"{name} has {rounds} rounds for an outer momentum of {momentum:g}: at the end "
            f"{momentum ** (rounds / 2):.0%} of its overshoot may be left. Take at least "
            f"{needed} rounds (a shorter H or a longer run), a smaller momentum, or "
            "plain averaging: local_steps without outer=.",
            stacklevel=3,
        )
    return optax.sgd(learning_rate, momentum=momentum, nesterov=nesterov)
