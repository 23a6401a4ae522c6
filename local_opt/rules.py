"""Rules for when to synchronise; each makes a plan, on the host and in float64.

t is the first step of a round, T is the number of steps, and eta_t is the learning rate at step t.
"""

from array import array
from collections.abc import Callable

import jax
import numpy as np

from local_opt.plans import SyncPlan
from syncopate.plans import check_number, check_total_steps, check_whole
from syncopate.schedules import bernoulli_draws, describe_schedule, evaluate_schedule


def constant(period: int, *, total_steps: int, offset: int = 0) -> SyncPlan:
    """Rounds of equal length, H(t) = H; the last may be shorter.

    Args:
      period: H >= 1.
      total_steps: T in 1 .. 10^7.
      offset: in 0 .. T - 1, the length of an additional first round; 0 for none.

    Returns:
      The plan.

    Raises:
      ValueError: for values out of range.

    Examples:
      >>> from syncopate import local_opt
      >>> local_opt.constant(4, total_steps=10).periods.tolist()
      [4, 4, 2]

    References:
      Stich, Local SGD Converges Fast and Communicates Little, 2019,
      https://arxiv.org/abs/1805.09767
    """
    period, total_steps = check_whole("period", period, 1), check_total_steps(total_steps)
    offset = check_whole("offset", offset, 0, total_steps - 1)
    starts = np.arange(offset, total_steps, min(period, total_steps))
    starts = np.append(0, starts) if offset else starts
    rule = f"constant, H = {period}" + (f", offset {offset}" if offset else "")
    return SyncPlan(starts, total_steps, rule)


def bernoulli(p: Callable | float | np.ndarray, *, total_steps: int, key: jax.Array) -> SyncPlan:
    """Synchronises after step t with probability p(t), and after the last step.

    Args:
      p: a probability in (0, 1], a schedule of them, or float[T].
      total_steps: T in 1 .. 10^7.
      key: a random key, the same on all workers.

    Returns:
      The plan.

    Raises:
      ValueError: if a probability is outside (0, 1], or for a total or key that does not fit.

    Examples:
      >>> import jax
      >>> from syncopate import local_opt
      >>> local_opt.bernoulli(1.0, total_steps=5, key=jax.random.key(0)).rounds
      5
    """
    heads = bernoulli_draws(p, total_steps, key)
    starts = np.append(0, 1 + np.flatnonzero(heads[:-1]))
    return SyncPlan(starts, total_steps, f"bernoulli, p = {describe_schedule(p)}")


def qsr(
    lr: Callable | float | np.ndarray,
    *,
    total_steps: int,
    alpha: float,
    h_base: int,
    power: float = 2.0,
    warmup_steps: int = 0,
    h_max: int | None = None,
    offset: int = 0,
) -> SyncPlan:
    """The Quadratic Synchronization Rule: rounds grow as the inverse square of the learning rate.

    h(t) = min(max(H_base, floor((alpha / eta_t)^power)), h_max); a round that starts at t has the
    largest H with H <= h(s) for all of its steps s. While the rate falls, H = h(t). If the rate
    never changes, neither does H, as in `constant`.

    During the warmup, H is that of the round right after it. The authors' code has an argument for
    this. As far as we remember, section 2 of the paper recommends it; its text was not at hand. Two
    choices are ours. A later rise of the rate counts as a warmup, so its steps have the H at its
    top. A round ends before a step whose h is shorter, as at a restart of the rate.

    Args:
      lr: eta, an optax schedule, a number, or float[T]; >= 0, finite.
      total_steps: T in 1 .. 10^7.
      alpha: growth coefficient > 0, in units of the learning rate.
      h_base: H_base >= 1, the minimal number of steps per round.
      power: > 0; 2 in the paper, which compares it with 1 and 3.
      warmup_steps: in 0 .. T, the steps before the rule starts. A warmup whose rate rises in every
        step is detected without it; a warmup in stairs is not.
      h_max: >= H_base, the maximal number of steps per round; None for no limit.
      offset: in 0 .. T - 1, the length of an additional first round; 0 for none.

    Returns:
      The plan.

    Raises:
      ValueError: for values out of range, or a rate that is negative, not finite, or 0 in the
        first step after the warmup and not rising (the rule would never synchronise).

    Examples:
      >>> import optax
      >>> from syncopate import local_opt  # ViT-B, 300 epochs of ImageNet
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
    check_number("alpha", alpha, "(0, inf)")
    check_number("power", power, "(0, inf)")
    check_whole("h_base", h_base, 1)
    if h_max is not None:
        check_whole("h_max", h_max, h_base)
    rates = evaluate_schedule(lr, total_steps, "lr")
    warmup = check_whole("warmup_steps", warmup_steps, 0, total_steps)
    offset = check_whole("offset", offset, 0, total_steps - 1)
    # The last step of every rise; every step of a fall counts as one, too.
    tops = np.flatnonzero(np.append(np.diff(rates) <= 0, True))
    rates = rates[np.repeat(tops, np.diff(tops, prepend=-1))]
    if warmup < total_steps and rates[warmup] == 0:
        raise ValueError(
            f"the learning rate at step {warmup} is 0, and alpha / 0 is an endless round: pass "
            "warmup_steps, the number of steps before the rate rises from 0, or a rate above 0."
        )
    with np.errstate(divide="ignore", over="ignore"):
        grown = np.power(np.float64(alpha) / rates, power)
    # Clamped before the conversion to an integer, since it may be infinite.
    most = total_steps if h_max is None else min(h_max, total_steps)
    fewest = min(h_base, total_steps)
    asked = np.maximum(fewest, np.floor(np.minimum(grown, most)).astype(int))
    if warmup < total_steps:  # the H after the warmup, or less if a rate in the warmup is higher
        asked[: warmup + 1] = np.minimum.accumulate(asked[warmup::-1])[::-1]
    else:  # no round follows
        asked[:] = fewest
    starts, start, end = array("q", [0] if offset else []), offset, offset
    for t, period in enumerate(asked[offset:].tolist(), offset):
        end = min(end, start + period)
        if t >= end:  # with this step the round would be longer than h at one of its steps
            start, end = t, t + period
            starts.append(t)
    rule = f"H = max({h_base}, floor(({alpha:g} / eta)^{power:g})), warmup {warmup}"
    rule += (f", at most {h_max}" if h_max else "") + (f", offset {offset}" if offset else "")
    return SyncPlan(np.array(starts), total_steps, rule)
