"""The rules that make plans, each one function; all numbers are float64 on the host.

t is the first step of a round, T the number of steps. Rules that follow a schedule are in
`local_opt.schedule_rules`.
"""

from collections.abc import Callable

import jax
import numpy as np

from local_opt.plan import SyncPlan
from syncopate.plans import (
    bernoulli_draws,
    check_total_steps,
    describe_schedule,
    is_whole,
    probabilities,
)


def from_function(
    period: Callable[[int], int], *, total_steps: int, rule: str = "", offset: int = 0
) -> SyncPlan:
    """A plan from any function of the round's first step.

    H(t) = period(t), cut at the end of the run.

    Args:
      period: from the first step of a round, in 0 .. T - 1, to the steps in it, a whole number
        >= 1.
      total_steps: T >= 1.
      rule: a name for people.
      offset: in 0 .. T - 1, the steps of a round before the first of the function, so that the
        parts of `PartPlans` take turns; 0 for none.

    Returns:
      The plan.

    Raises:
      ValueError: if a period is not a whole number >= 1, or the offset is out of range.

    Example:
      >>> import local_opt
      >>> local_opt.from_function(lambda t: 1 + t, total_steps=10).periods.tolist()
      [1, 2, 4, 3]
    """
    check_total_steps(total_steps)
    check_whole("offset", offset, 0, total_steps - 1)
    starts, t = ([0], offset) if offset else ([], 0)
    while t < total_steps:
        h = period(t)
        if not is_whole(h) or h < 1:
            raise ValueError(f"period({t}) is {h!r}: a round has a whole number of steps, >= 1.")
        starts.append(t)
        t += int(h)
    name = rule or f"H = {getattr(period, '__name__', 'function')}(t)"
    name += f", offset {offset}" if offset else ""
    return SyncPlan(np.array(starts, np.int64), total_steps, name)


def every_step(total_steps: int) -> SyncPlan:
    """Synchronises after every step, H = 1: volume 1.

    Args:
      total_steps: T >= 1.

    Returns:
      The plan.

    Example:
      >>> import local_opt
      >>> local_opt.every_step(10).volume
      1.0
    """
    check_total_steps(total_steps)
    return SyncPlan(np.arange(total_steps), total_steps, "every step")


def constant(period: int, *, total_steps: int, offset: int = 0) -> SyncPlan:
    """Rounds of equal length, H(t) = H; the last may be shorter.

    Args:
      period: H >= 1.
      total_steps: T >= 1.
      offset: in 0 .. T - 1, the steps of a first round of its own; 0 for none.

    Returns:
      The plan.

    Raises:
      ValueError: for a period below 1 or that is not whole, or an offset out of range.

    Example:
      >>> import local_opt
      >>> local_opt.constant(4, total_steps=10).periods.tolist()
      [4, 4, 2]

    References:
      Stich, Local SGD Converges Fast and Communicates Little, 2019,
      https://arxiv.org/abs/1805.09767
    """
    check_total_steps(total_steps)
    check_whole("period", period, 1)
    rule = f"constant, H = {period}"
    return from_function(lambda t: period, total_steps=total_steps, rule=rule, offset=offset)


def post_local(period: int, *, switch_step: int, total_steps: int) -> SyncPlan:
    """Post-local SGD: every step until t0, then rounds of H steps.

    Args:
      period: H >= 1 from t0 on.
      switch_step: t0 in 0 .. T.
      total_steps: T >= 1.

    Returns:
      The plan.

    Raises:
      ValueError: for values out of range.

    Example:
      >>> import local_opt
      >>> local_opt.post_local(4, switch_step=3, total_steps=10).periods.tolist()
      [1, 1, 1, 4, 3]

    References:
      Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, 2020,
      https://arxiv.org/abs/1808.07217
    """
    check_total_steps(total_steps)
    check_whole("period", period, 1)
    check_whole("switch_step", switch_step, 0, total_steps)
    return from_function(
        lambda t: 1 if t < switch_step else period,
        total_steps=total_steps,
        rule=f"post-local, H = 1 to step {switch_step}, then {period}",
    )


def swap(period: int, *, switch_step: int, total_steps: int) -> SyncPlan:
    """Modified SWAP: rounds of H steps until t0, then one single round to the end.

    The first round that starts at or after t0 is the last.

    Args:
      period: H >= 1 before t0.
      switch_step: t0 in 0 .. T.
      total_steps: T >= 1.

    Returns:
      The plan.

    Raises:
      ValueError: for values out of range.

    Example:
      >>> import local_opt
      >>> local_opt.swap(2, switch_step=4, total_steps=10).periods.tolist()
      [2, 2, 6]

    References:
      Gupta, Serrano, DeCoste, Stochastic Weight Averaging in Parallel, 2020,
      https://arxiv.org/abs/2001.02312
    """
    check_total_steps(total_steps)
    check_whole("period", period, 1)
    check_whole("switch_step", switch_step, 0, total_steps)
    return from_function(
        lambda t: period if t < switch_step else total_steps - t,
        total_steps=total_steps,
        rule=f"SWAP, H = {period} to step {switch_step}, then one round",
    )


def bernoulli(p: Callable | float | np.ndarray, *, total_steps: int, key: jax.Array) -> SyncPlan:
    """Synchronises after step t with probability p(t); the last step always does.

    Args:
      p: a probability in (0, 1], a schedule of them, or float[T].
      total_steps: T >= 1.
      key: shared by all workers, so that all take the same decisions.

    Returns:
      The plan.

    Raises:
      ValueError: if a probability is outside (0, 1].

    Example:
      >>> import jax, local_opt
      >>> local_opt.bernoulli(1.0, total_steps=5, key=jax.random.key(0)).rounds
      5
    """
    heads = bernoulli_draws(probabilities(p, total_steps, "p"), key)
    starts = np.append(0, 1 + np.flatnonzero(heads[:-1]))
    return SyncPlan(starts, total_steps, f"bernoulli, p = {describe_schedule(p)}")


def sync_every_load(fresh: np.ndarray) -> SyncPlan:
    """One sync per load of an echoed run, before the next batch is loaded.

    Round r takes all uses of batch r. Workers step on their own while a batch is used again, so
    echoing adds no communication: the volume per load is that of data-parallel training.

    Args:
      fresh: bool[T], the steps that load a fresh batch, as `ordering.echo.EchoPlan.fresh`; the
        first is one of them.

    Returns:
      The plan.

    Raises:
      ValueError: if there is no step, or the first is not fresh.

    Example:
      >>> import local_opt
      >>> local_opt.sync_every_load([True, False, False, True, False]).periods.tolist()
      [3, 2]
    """
    fresh = np.asarray(fresh)
    if fresh.dtype != bool or fresh.ndim != 1 or not len(fresh) or not fresh[0]:
        raise ValueError(
            f"fresh is {fresh.dtype}{list(fresh.shape)}: it must hold one bool per step, the first "
            "True."
        )
    return SyncPlan(np.flatnonzero(fresh), len(fresh), "once per load")


def check_whole(name, value, least, most=None):
    if not is_whole(value) or value < least or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"in {least} .. {most}"
        raise ValueError(f"{name} is {value!r}: it must be a whole number {bounds}.")
