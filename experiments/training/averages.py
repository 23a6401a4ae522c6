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


def _epoch(t, steps: int, epochs: float):
    """The mean of an epoch's steps so far."""
    del epochs
    return 1 / ((t - 1) % steps + 1)


def _ema(t, steps: int, epochs: float):
    """An exponential moving average, debiased, whose time constant is in epochs."""
    decay = -1 / (epochs * steps)
    return jnp.expm1(decay) / jnp.expm1(decay * t)


# (t >= 1, steps of an epoch, time constant in epochs) -> s_t. An epoch has as many steps as loads:
# with echoing it is as many steps, which take fewer loads.
AVERAGES = {"epoch": _epoch, "ema": _ema}


def zeros(names: Iterable[str], params) -> dict:
    """{name: m_0}, in float32 at least; {} if no average is asked for."""
    wide = lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))  # noqa: E731
    return {name: jax.tree.map(wide, params) for name in names}


def update(*, steps: int, epochs: float) -> Callable:
    """`({name: m_{t-1}}, x_t, t) -> {name: m_t}`; at t = 0 it is x_0.

    Args:
      steps: of an epoch, its loads; epochs: the time constant of "ema".
    """

    def add(means, params, t):
        def of(name, mean):
            share = AVERAGES[name](jnp.maximum(t, 1), steps, epochs)
            return optax.incremental_update(params, mean, share)

        return {name: of(name, mean) for name, mean in means.items()}

    return add
