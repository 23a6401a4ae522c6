"""The table of echo policies: a new one is one row."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import optax

import ordering


class Setting(NamedTuple):
    """What a policy may need to know about a run."""

    factor: int  # e, the echo factor, or that which a falling p ends at
    total_steps: int
    horizon: int  # steps over which a falling p reaches 1 / e
    key: jax.Array  # of all coins of a run, shared by its workers


class Policy(NamedTuple):
    label: str
    make: Callable[[Setting], ordering.echo.EchoPlan | ordering.echo.online.Measured]
    timed: bool = False  # True: decides while the run goes on, by how fast its input is


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


def _bernoulli(shape: str) -> Callable:
    return lambda s: ordering.echo.bernoulli(
        _p(s, shape), total_steps=s.total_steps, key=jax.random.fold_in(s.key, 0)
    )


def _error_diffusion(shape: str) -> Callable:
    return lambda s: ordering.echo.error_diffusion(_p(s, shape), total_steps=s.total_steps)


def _measured(s: Setting) -> ordering.echo.online.Measured:
    return ordering.echo.measured(total_steps=s.total_steps, max_factor=4 * s.factor)


POLICIES = {
    "none": Policy("no echo", lambda s: ordering.echo.fixed(1, total_steps=s.total_steps)),
    "fixed": Policy(
        "fixed factor", lambda s: ordering.echo.fixed(s.factor, total_steps=s.total_steps)
    ),
    "bernoulli": Policy("Bernoulli", _bernoulli("constant")),
    "bernoulli_linear": Policy("Bernoulli, linear p", _bernoulli("linear")),
    "bernoulli_multistep": Policy("Bernoulli, multi-step p", _bernoulli("multi-step")),
    "bernoulli_cosine": Policy("Bernoulli, cosine p", _bernoulli("cosine")),
    "diffusion": Policy("error diffusion", _error_diffusion("constant")),
    "diffusion_linear": Policy("error diffusion, linear p", _error_diffusion("linear")),
    "diffusion_multistep": Policy("error diffusion, multi-step p", _error_diffusion("multi-step")),
    "diffusion_cosine": Policy("error diffusion, cosine p", _error_diffusion("cosine")),
    "measured": Policy("measured", _measured, timed=True),
}
