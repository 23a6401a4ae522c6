"""Averages of the weights over a run's steps, which its evaluations measure beside the weights.

    m_t = m_{t-1} + s_t (x_t - m_{t-1}),    s_1 = 1

with the weights x_t after t steps and their syncs. A row of AVERAGES gives the shares s_t. They are
the same on all workers, so that the mean of the workers' averages is the average of their mean.
Step t + 1 adds x_t, as only then it is known, and an evaluation after t steps adds it to a copy.
"""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import optax

LATE = 4  # epochs of "swa"


def _epoch(t, steps: int, epochs: float, total: int):
    """The mean of an epoch's steps so far."""
    del epochs, total
    return 1 / ((t - 1) % steps + 1)


def _ema(t, steps: int, epochs: float, total: int):
    """An exponential moving average, debiased, whose time constant is in epochs."""
    del total
    decay = -1 / (epochs * steps)
    return jnp.expm1(decay) / jnp.expm1(decay * t)


def _swa(t, steps: int, epochs: float, total: int):
    """The mean of the weights at the last four epochs' ends, weighed by 1, 2, 3 and 4."""
    del epochs
    first = max(1, total // steps - LATE + 1) * steps  # the end of the first of them
    late = (t - first) // steps + 1
    return jnp.where(t <= first, 1.0, jnp.where(t % steps == 0, 2 / (late + 1), 0.0))


# (t >= 1, steps of an epoch, time constant in epochs, steps of the run) -> s_t. An epoch has as
# many steps as loads: with echoing it is as many steps, which take fewer loads.
AVERAGES = {"epoch": _epoch, "ema": _ema, "swa": _swa}


def zeros(names: Iterable[str], params) -> dict:
    """{name: m_0}, in float32 at least; {} if no average is asked for."""
    wide = lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))  # noqa: E731
    return {name: jax.tree.map(wide, params) for name in names}


def update(*, steps: int, epochs: float, total: int) -> Callable:
    """`({name: m_{t-1}}, x_t, t) -> {name: m_t}`; at t = 0 it is x_0.

    Args:
      steps: of an epoch, its loads; epochs: the time constant of "ema"; total: steps of the run.
    """

    def add(means, params, t):
        def of(name, mean):
            share = AVERAGES[name](jnp.maximum(t, 1), steps, epochs, total)
            return optax.incremental_update(params, mean, share)

        return {name: of(name, mean) for name, mean in means.items()}

    return add
