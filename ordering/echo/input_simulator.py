"""The time of a run with echoing, predicted from the pace of its input and its steps."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from ordering.echo.plans import EchoPlan, Measured, check_policy
from syncopate import plans

# A batch that is late by fewer steps than this is on time: R steps of t_load / R seconds take as
# long as a load only up to rounding.
ROUNDING = 1e-6


class EchoForecast(NamedTuple):
    """The predicted pace of a run; see `echo_forecast`."""

    loads: int
    total_seconds: float
    stall_seconds: float
    slowdown: float
    plan: EchoPlan


def echo_forecast(
    policy: EchoPlan | Measured,
    *,
    load_seconds: Float[ArrayLike, "*n"] | Sequence[float],
    step_seconds: float,
    depth: int = 2,
) -> EchoForecast:
    """Predicts the seconds that a run takes if it loads by a policy through `load_ahead`.

    F_j = max(F_j-1, S_j-depth-1) + L_j;  S_j = max(F_j, S_j-1 + uses_j-1 t_step), where load j ends
    at F_j and is first used at S_j. The thread loads while the queue has a place, and holds one
    batch more. `measured` finds a batch ready in a step that starts at F_j or later.

    Assumptions: fresh and echoed steps take the same time, whatever the thread does meanwhile, and
    the thread loads one batch at a time. For W workers that agree on every step, pass the loads of
    the slowest one.

    Args:
      policy: of the run; `measured` decides by the simulated times.
      load_seconds: L > 0, seconds to read a batch and move it to the device: a number, or float[n],
        seconds of each load, with n >= loads (n >= T for `measured`).
      step_seconds: t_step > 0, seconds of a step whose batch is on the device.
      depth: >= 1, as in `load_ahead`.

    Returns:
      A record of `loads`, their number; `total_seconds`, from the first step, when load 0 is
      ready; `stall_seconds`, those in which steps wait for batches; `slowdown`,
      total / (T t_step), 1 without stalls; and `plan`, the simulated `EchoPlan`.

    Raises:
      ValueError: for values out of range, or too few of load_seconds.

    Examples:
      >>> import jax, ordering  # loads of four steps' time: R = 4
      >>> pace = dict(load_seconds=0.008, step_seconds=0.002, depth=1)
      >>> every = ordering.echo.fixed(1, total_steps=1000)
      >>> round(ordering.echo.echo_forecast(every, **pace).slowdown, 3)
      3.997
      >>> spread = ordering.echo.error_diffusion(0.25, total_steps=1000)
      >>> ordering.echo.echo_forecast(spread, **pace).slowdown
      1.0
      >>> coins = ordering.echo.bernoulli(0.25, total_steps=10**5, key=jax.random.key(0))
      >>> round(ordering.echo.echo_forecast(coins, **pace).slowdown, 2)
      1.17

    References:
      Choi, Passos, Shallue, Dahl, Faster Neural Network Training with Data Echoing, 2019 (time per
      load is the larger of t_load and uses t_step), https://arxiv.org/abs/1907.05550
    """
    check_policy(policy)
    plans.check_total_steps(policy.total_steps, plans.MOST_VALUES)
    plans.check_number("step_seconds", step_seconds, "(0, inf)")
    plans.check_whole("depth", depth, 1)
    step_seconds = float(step_seconds)
    each = _each_load(load_seconds, policy)
    fresh, stall = _simulate(policy, (each / step_seconds).tolist(), int(depth))
    plan = policy if isinstance(policy, EchoPlan) else EchoPlan(fresh, "measured, simulated")
    total, steps = (plan.total_steps + stall) * step_seconds, plan.total_steps
    return EchoForecast(plan.loads, total, stall * step_seconds, 1 + stall / steps, plan)


def _each_load(load_seconds, policy):
    """float64[n], the seconds of every load that the policy may need."""
    most = policy.loads if isinstance(policy, EchoPlan) else policy.total_steps
    each, _ = plans.as_array(load_seconds)
    real = each.dtype.kind in "iuf"
    if each.ndim > 1 or not (real and (np.isfinite(each) & (each > 0)).all()):
        raise ValueError(
            f"load_seconds is {load_seconds!r}: pass a positive, finite number, or a list of them."
        )
    if each.ndim and len(each) < most:
        raise ValueError(
            f"load_seconds has {len(each)} values and the run up to {most} loads: pass a number, "
            f"or draw enough, as by np.random.default_rng(0).choice(load_seconds, {most})."
        )
    return each if each.ndim else np.full(most, each)


def _simulate(policy, each, depth):
    """The decisions, bool[T], and the stall. All times are in steps, in which whole R are exact."""
    fresh = np.empty(policy.total_steps, bool)
    each.append(math.inf)  # the load after the last, which is never used
    starts = []  # S_j
    finished = stall = 0.0  # F of the next load; F_0 = 0 starts the clock
    uses = 0
    for step in range(policy.total_steps):
        late = finished - (step + stall)
        ready = late <= ROUNDING
        fresh[step] = policy.decide(
            step, loads=len(starts), uses=uses, ready=lambda ready=ready: ready
        )
        if fresh[step]:
            stall += 0.0 if ready else late
            starts.append(step + stall)
            uses, freed = 0, len(starts) - depth - 1  # the load whose place the next one takes
            begin = max(finished, starts[freed]) if freed >= 0 else finished
            finished = begin + each[len(starts)]
        uses += 1
    return fresh, stall
