"""The table of what experiments compare when input is slow: a new arm is one row."""

from collections.abc import Callable
from typing import NamedTuple

import jax

import local_opt
import ordering
from experiments.echo_policies import POLICIES


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
    policy: Callable[[Setting], ordering.echo.EchoPlan | ordering.echo.online.Measured]
    sync: Callable[[Setting], local_opt.SyncPlan] | None = None
    rounds: Callable = local_opt.local_rounds
    rate_factor: Callable[[Setting], float] = lambda s: 1
    proximal: float = 0


def _arm(policy: str, *rest) -> Arm:
    return Arm(*POLICIES[policy][:2], *rest)


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
    "none": _arm("none", _every_step, PARALLEL),
    "larger_lr": Arm(
        "no echo, lr × e", POLICIES["none"].make, _every_step, PARALLEL, lambda s: s.factor
    ),
    "accumulate": Arm("gradient accumulation", POLICIES["none"].make, _every_factor, PARALLEL),
    "local": Arm("local steps, no echo", POLICIES["none"].make, _every_factor),
    "fixed": _arm("fixed"),
    "bernoulli": _arm("bernoulli"),
    "bernoulli_linear": _arm("bernoulli_linear"),
    "bernoulli_multistep": _arm("bernoulli_multistep"),
    "bernoulli_cosine": _arm("bernoulli_cosine"),
    "algorithm2": Arm("Bernoulli, coins for syncs too", POLICIES["bernoulli"].make, _coins),
    "diffusion": _arm("diffusion"),
    "diffusion_linear": _arm("diffusion_linear"),
    "diffusion_multistep": _arm("diffusion_multistep"),
    "diffusion_cosine": _arm("diffusion_cosine"),
    "diffusion_every": Arm(
        "error diffusion, sync every step", POLICIES["diffusion"].make, _every_step, PARALLEL
    ),
    "measured": _arm("measured"),
    "proximal": Arm("fixed factor, proximal", POLICIES["fixed"].make, proximal=1),
    "proximal_strong": Arm("fixed factor, proximal, 10 λ", POLICIES["fixed"].make, proximal=10),
}
