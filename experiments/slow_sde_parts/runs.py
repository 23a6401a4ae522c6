"""The runs: plain SGD of K workers who meet where a plan says, many repetitions at once.

Parameters are [P, G, R, K]: G rules by R repetitions by K workers, and the noises [N, R, K], for
all rules see the same.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import local_opt
from experiments.slow_sde_parts import theory
from experiments.slow_sde_parts.problems import Problem


class Rule(NamedTuple):
    """When workers meet: every floor(c / eta^power) steps."""

    label: str
    power: int
    coefficient: float
    beta: float  # lim eta H


RULES = {
    "parallel": Rule("parallel", 0, 1, 0.0),
    "constant": Rule("H = 4", 0, 4, 0.0),
    "inverse": Rule("H = 1 / η", 1, 1.0, 1.0),
    "qsr": Rule("QSR, H = 0.5 / η²", 2, 0.5, math.inf),
}
LARGEST = 0.25  # a rate, at which H = 8 in a round of QSR, and steps are far from diverging


def plan_of(rule: Rule, rate: float, slow_time: float) -> local_opt.SyncPlan:
    """The library's plan of S / eta^2 steps at a constant rate.

    Raises:
      ValueError: for a rate or a slow time out of range.
    """
    if not 0 < rate <= LARGEST:
        raise ValueError(
            f"the rate is {rate!r}: the theory is of small ones; pass some in 0 .. {LARGEST}."
        )
    if not 1 <= slow_time < math.inf:
        raise ValueError(
            f"slow time is {slow_time!r}: pass at least 1, two rounds of QSR, and no infinite run."
        )
    steps = round(slow_time / rate**2)
    if not rule.power:
        return local_opt.constant(int(rule.coefficient), total_steps=steps)
    # The margin keeps what should be a whole number from ending a float's width below it.
    alpha = rule.coefficient ** (1 / rule.power) * (1 + 1e-12)
    make = {1: functools.partial(local_opt.power_rule, power=1), 2: local_opt.qsr}[rule.power]
    return make(rate, total_steps=steps, alpha=alpha, h_base=1)


def worker_steps(problem: Problem, params, noises, rate, syncs):
    """One step of every worker, and then the mean of those who meet.

    Args:
      problem: whose loss it is.
      params: [P, G, R, K]; noises: [N, R, K].
      rate: eta.
      syncs: bool[G], whether the workers of a rule meet after this step.
    """
    gradient = jax.grad(problem.loss)
    for axis, over in ((-1, -1), (-1, -1), (1, None)):
        gradient = jax.vmap(gradient, in_axes=(axis, over), out_axes=axis)
    params = params - rate * gradient(params, noises)
    mean = jnp.mean(params, axis=3, keepdims=True)
    return jnp.where(syncs[None, :, None, None], mean, params)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _ends(problem, workers, repetitions, syncs, steps, rate, seed):
    """[G, R]: what is measured of the workers' mean, brought to the manifold without noise."""
    # The generator is the fast one, on a CPU: noises are most of the work otherwise.
    key = jax.random.fold_in(jax.random.key(seed, impl="unsafe_rbg"), steps)
    start = jnp.array(problem.start)[:, None, None, None]
    params = jnp.broadcast_to(start, (len(start), syncs.shape[1], repetitions, workers))

    def step(t, params):
        shape = problem.num_noises, repetitions, workers
        noises = jax.random.normal(jax.random.fold_in(key, t), shape)
        return worker_steps(problem, params, noises, rate, syncs[t])

    params = jax.lax.fori_loop(0, steps, step, params)
    mean = jnp.mean(params, axis=3, keepdims=True)
    silent, apart = jnp.zeros((problem.num_noises, repetitions, 1)), jnp.zeros(len(syncs[0]), bool)
    settle = jnp.int32(20 / rate)  # steps, in which a distance of curvature 0.5 shrinks to exp(-10)
    mean = jax.lax.fori_loop(
        0, settle, lambda t, p: worker_steps(problem, p, silent, rate, apart), mean
    )
    return problem.measure(mean[..., 0])


def measure_ends(
    problem: Problem,
    plans: Sequence[local_opt.SyncPlan],
    rate: float,
    *,
    workers: int,
    repetitions: int,
    seed: int,
    longest: int | None = None,
) -> np.ndarray:
    """float32[G, R]: what is measured where runs end.

    Args:
      problem: whose loss it is.
      plans: G plans of equally many steps; workers meet after the last step of all.
      rate: eta, constant.
      workers: K; repetitions: R; seed: of the noises.
      longest: steps for which a program is compiled that shorter runs share; the plans' if None.

    Raises:
      ValueError: for plans of different lengths.
    """
    steps = {plan.total_steps for plan in plans}
    if len(steps) != 1:
        raise ValueError(f"plans have {sorted(steps)} steps: make all for the same run.")
    (steps,) = steps
    syncs = np.zeros((max(longest or steps, steps), len(plans)), bool)
    for column, plan in zip(syncs.T, plans, strict=True):
        column[plan.ends - 1] = True
    found = _ends(problem, workers, repetitions, syncs, steps, rate, seed)
    return np.asarray(found)


def limit(problem: Problem, rule: Rule, slow_time: float, workers: int) -> float:
    """What the theory has at the end of a run as the rate goes to 0."""
    return float(theory.flow(problem, theory.in_the_limit, slow_time, workers, rule.beta)[-1])


def expected(problem: Problem, slow_time: float, workers: int, rate: float, period: float) -> float:
    """What the theory has at the end of a run at a rate, with rounds of `period` steps."""
    return float(theory.flow(problem, theory.at_a_rate, slow_time, workers, rate, period)[-1])


def curve(
    problem: Problem, rule: Rule, slow_time: float, workers: int, rates: Sequence[float]
) -> tuple[list[float], list[float]]:
    """(rates from 0 on, the theory at them), with periods that need not be whole, to be drawn."""
    ends = [limit(problem, rule, slow_time, workers)]
    for rate in rates:
        period = rule.coefficient / rate**rule.power
        ends.append(expected(problem, slow_time, workers, rate, period))
    return [0.0, *rates], ends
