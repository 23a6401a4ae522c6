"""The table of what experiments compare when input is slow: a new arm is one row."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

import local_opt
import ordering


class Setting(NamedTuple):
    """What an arm may need to know about a run."""

    speed: float  # R = t_load / t_step
    total_steps: int
    horizon: int  # steps over which a falling p reaches its least value
    key: jax.Array  # of all coins of a run, shared by its workers

    @property
    def factor(self) -> int:
        """e, the echo factor to compare at: the free one, R, and 2 where no echo is free."""
        return max(2, round(self.speed))


class Arm(NamedTuple):
    """Fields:
    label: for people.
    policy: when to load.
    sync: the SyncPlan, or None: one sync per load, before the next.
    rounds: what a step and a sync do.
    rate_factor: of the learning rates that are tried.
    proximal: strength, in units of the recipe's lambda, of the pull back to the parameters at the
      load; 0 for none.
    """

    label: str
    policy: Callable[[Setting], ordering.EchoPlan | ordering.Measured]
    sync: Callable[[Setting], local_opt.SyncPlan] | None = None
    rounds: Callable = local_opt.local_rounds
    rate_factor: Callable[[Setting], float] = lambda s: 1
    proximal: float = 0


# p from 1 to 1 / e over the horizon; the first of them is at its end from the start.
SCHEDULES = {
    "constant": lambda least, horizon: least,
    "linear": lambda least, horizon: optax.linear_schedule(1.0, least, horizon),
    "multi-step": lambda least, horizon: optax.piecewise_constant_schedule(
        1.0, {horizon // 3: least**0.5, 2 * horizon // 3: least**0.5}
    ),
    "cosine": lambda least, horizon: optax.cosine_decay_schedule(1.0, horizon, alpha=least),
}


def _p(s: Setting, shape: str):
    return SCHEDULES[shape](1 / s.factor, s.horizon)


def _no_echo(s: Setting) -> ordering.EchoPlan:
    return ordering.fixed(1, total_steps=s.total_steps)


def _fixed(s: Setting) -> ordering.EchoPlan:
    return ordering.fixed(s.factor, total_steps=s.total_steps)


def _bernoulli(shape: str) -> Callable:
    return lambda s: ordering.bernoulli(
        _p(s, shape), total_steps=s.total_steps, key=jax.random.fold_in(s.key, 0)
    )


def _error_diffusion(shape: str) -> Callable:
    return lambda s: ordering.error_diffusion(_p(s, shape), total_steps=s.total_steps)


def _measured(s: Setting) -> ordering.Measured:
    return ordering.measured(total_steps=s.total_steps, max_factor=4 * s.factor)


def _every_step(s: Setting) -> local_opt.SyncPlan:
    return local_opt.every_step(s.total_steps)


def _every_factor(s: Setting) -> local_opt.SyncPlan:
    return local_opt.constant(s.factor, total_steps=s.total_steps)


def _coins(s: Setting) -> local_opt.SyncPlan:
    return local_opt.bernoulli(
        1 / s.factor, total_steps=s.total_steps, key=jax.random.fold_in(s.key, 1)
    )


PARALLEL = local_opt.accumulated_rounds  # with a sync in every step

ARMS = {
    "none": Arm("no echo", _no_echo, _every_step, PARALLEL),
    "larger_lr": Arm("no echo, lr × e", _no_echo, _every_step, PARALLEL, lambda s: s.factor),
    "accumulate": Arm("gradient accumulation", _no_echo, _every_factor, PARALLEL),
    "local": Arm("local steps, no echo", _no_echo, _every_factor),
    "fixed": Arm("fixed factor", _fixed),
    "bernoulli": Arm("Bernoulli", _bernoulli("constant")),
    "bernoulli_linear": Arm("Bernoulli, linear p", _bernoulli("linear")),
    "bernoulli_multistep": Arm("Bernoulli, multi-step p", _bernoulli("multi-step")),
    "bernoulli_cosine": Arm("Bernoulli, cosine p", _bernoulli("cosine")),
    "algorithm2": Arm("Bernoulli, coins for syncs too", _bernoulli("constant"), _coins),
    "diffusion": Arm("error diffusion", _error_diffusion("constant")),
    "diffusion_linear": Arm("error diffusion, linear p", _error_diffusion("linear")),
    "diffusion_multistep": Arm("error diffusion, multi-step p", _error_diffusion("multi-step")),
    "diffusion_cosine": Arm("error diffusion, cosine p", _error_diffusion("cosine")),
    "diffusion_every": Arm(
        "error diffusion, sync every step", _error_diffusion("constant"), _every_step, PARALLEL
    ),
    "measured": Arm("measured", _measured),
    "proximal": Arm("fixed factor, proximal", _fixed, proximal=1),
    "proximal_strong": Arm("fixed factor, proximal, 10 λ", _fixed, proximal=10),
}
