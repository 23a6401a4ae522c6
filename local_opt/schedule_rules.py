"""Rules whose period H follows a schedule: of the learning rate, or of its own.

t is the first step of a round, T the number of steps, eta_t the learning rate at step t.
"""

import math
from collections.abc import Callable

import numpy as np

from local_opt.plan import SyncPlan
from local_opt.rules import check_whole, from_function
from syncopate.plans import evaluate_schedule


def power_rule(
    lr: Callable | float | np.ndarray,
    *,
    total_steps: int,
    alpha: float,
    h_base: int,
    power: float,
    warmup_steps: int = 0,
    h_max: int | None = None,
    offset: int = 0,
) -> SyncPlan:
    """Rounds grow as a power of the inverse learning rate at their first step.

    H(t) = min(max(H_base, floor((alpha / eta_t)^power)), h_max, T - t), and H_base in rounds that
    start before the end of the warmup. Power 2 is the Quadratic Synchronization Rule.

    Args:
      lr: eta, any schedule from step to rate (optax's are), a number, or float[T]; >= 0, finite.
      total_steps: T >= 1.
      alpha: growth coefficient > 0, in units of the learning rate.
      h_base: H_base >= 1, the least number of steps per round.
      power: > 0.
      warmup_steps: in 0 .. T; the steps in which the rate still rises.
      h_max: >= H_base, the most steps per round; None for no limit.
      offset: in 0 .. T - 1, the steps of a first round of its own; 0 for none.

    Returns:
      The plan.

    Raises:
      ValueError: for values out of range, or a rate that is negative, not finite, or 0 already
        in the first step after the warmup (the rule would never synchronise).

    Example:
      >>> import optax, local_opt
      >>> lr = optax.cosine_decay_schedule(0.1, 100)
      >>> plan = local_opt.power_rule(lr, total_steps=100, alpha=0.2, h_base=1, power=1)
      >>> plan.periods.tolist()[-4:]
      [5, 7, 11, 17]

    References:
      Gu, Lyu, Arora, Zhang, Huang, A Quadratic Synchronization Rule for Distributed Deep
      Learning, 2024, https://arxiv.org/abs/2310.14423
    """
    _check_positive("alpha", alpha)
    _check_positive("power", power)
    check_whole("h_base", h_base, 1)
    if h_max is not None:
        check_whole("h_max", h_max, h_base)
    rates = evaluate_schedule(lr, total_steps, "lr")
    check_whole("warmup_steps", warmup_steps, 0, total_steps)
    if warmup_steps < total_steps and rates[warmup_steps] == 0:
        raise ValueError(
            f"the learning rate at step {warmup_steps} is 0, and alpha / 0 is a round without end: "
            "pass warmup_steps, the number of steps in which the rate still rises from 0."
        )

    def period(t):
        if t < warmup_steps:
            return h_base
        with np.errstate(divide="ignore", over="ignore"):
            grown = np.power(np.float64(alpha) / rates[t], power)
        # Clamped before it becomes an integer: it may be infinite.
        return max(h_base, math.floor(min(grown, total_steps - t, h_max or math.inf)))

    return from_function(
        period,
        total_steps=total_steps,
        rule=f"H = max({h_base}, floor(({alpha:g} / eta)^{power:g})), warmup {warmup_steps}"
        + (f", at most {h_max}" if h_max else ""),
        offset=offset,
    )


def qsr(
    lr: Callable | float | np.ndarray,
    *,
    total_steps: int,
    alpha: float,
    h_base: int,
    warmup_steps: int = 0,
    h_max: int | None = None,
    offset: int = 0,
) -> SyncPlan:
    """The Quadratic Synchronization Rule, H(t) = max(H_base, floor((alpha / eta_t)^2)).

    Args:
      lr: eta, any schedule from step to rate (optax's are), a number, or float[T]; >= 0, finite.
      total_steps: T >= 1.
      alpha: growth coefficient > 0, in units of the learning rate.
      h_base: H_base >= 1, the least number of steps per round.
      warmup_steps: in 0 .. T; rounds that start earlier have H_base steps.
      h_max: >= H_base, the most steps per round; None for no limit.
      offset: in 0 .. T - 1, the steps of a first round of its own; 0 for none.

    Returns:
      The plan.

    Raises:
      ValueError: as `power_rule`.

    Example:
      >>> import optax, local_opt  # ViT-B, 300 epochs of ImageNet
      >>> lr = optax.warmup_cosine_decay_schedule(0.0, 0.008, 10000, 93600, 1e-6)
      >>> plan = local_opt.qsr(
      ...     lr, total_steps=93600, alpha=0.0175, h_base=4, warmup_steps=10000
      ... )
      >>> plan.rounds, int(plan.starts[-1]), int(plan.periods[-1])
      (9711, 85458, 8142)

    References:
      Gu, Lyu, Arora, Zhang, Huang, A Quadratic Synchronization Rule for Distributed Deep
      Learning, 2024, https://arxiv.org/abs/2310.14423
    """
    return power_rule(
        lr,
        total_steps=total_steps,
        alpha=alpha,
        h_base=h_base,
        power=2,
        warmup_steps=warmup_steps,
        h_max=h_max,
        offset=offset,
    )


def from_schedule(
    period: Callable | float,
    *,
    total_steps: int,
    h_base: int = 1,
    h_max: int | None = None,
    offset: int = 0,
) -> SyncPlan:
    """Rounds that grow with the step, whatever the learning rate does.

    H(t) = min(max(H_base, floor(period(t))), h_max, T - t).

    Args:
      period: any schedule from step to a real number of steps (optax's linear or exponential
        ones), or a number; >= 0 and finite.
      total_steps: T >= 1.
      h_base: H_base >= 1, the least number of steps per round.
      h_max: >= H_base, the most; None for no limit.
      offset: in 0 .. T - 1, the steps of a first round of its own; 0 for none.

    Returns:
      The plan.

    Raises:
      ValueError: for values out of range.

    Example:
      >>> import optax, local_opt
      >>> grow = optax.linear_schedule(1, 10, 20)
      >>> local_opt.from_schedule(grow, total_steps=20).periods.tolist()
      [1, 1, 1, 2, 3, 4, 6, 2]
    """
    check_whole("h_base", h_base, 1)
    if h_max is not None:
        check_whole("h_max", h_max, h_base)
    lengths = evaluate_schedule(period, total_steps, "period")
    return from_function(
        lambda t: max(h_base, math.floor(min(lengths[t], h_max or math.inf))),
        total_steps=total_steps,
        rule="H = floor(period(t))",
        offset=offset,
    )


def _check_positive(name, value):
    if not (isinstance(value, int | float | np.number) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}: it must be a positive, finite number.")
