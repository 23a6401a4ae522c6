"""Averages of the weights over a run's steps, which its evaluations measure beside the weights.

    m_t = m_{t-1} + s_t (x_t - m_{t-1}),    s_1 = 1

with the weights x_t after t steps and their syncs. A row of AVERAGES gives the shares s_t. They are
the same on all workers, so that the mean of the workers' averages is the average of their mean.
Step t + 1 adds x_t, as only then it is known, and an evaluation after t steps adds it to a copy.
The words of `--average` are those of the table; JAX is imported after the flags.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

LATE = 4  # epochs of "swa"


def _epoch(t, steps: int, total: int):
    """The mean of an epoch's steps so far."""
    del total
    return 1 / ((t - 1) % steps + 1)


def _ema(t, steps: int, total: int, *, epochs: float):
    """An exponential moving average, debiased, whose time constant is in epochs."""
    import jax.numpy as jnp

    del total
    decay = -1 / (epochs * steps)
    return jnp.expm1(decay) / jnp.expm1(decay * t)


def _swa(t, steps: int, total: int):
    """The mean of the weights at the last four epochs' ends, weighed by 1, 2, 3 and 4."""
    import jax.numpy as jnp

    late = t // steps - jnp.maximum(0, total // steps - LATE)  # 1 at the end of the first of them
    return jnp.where(late < 1, 1.0, jnp.where(t % steps == 0, 2 / (late + 1), 0.0))


def _emas(recipe):
    return {f"ema_{e:g}": functools.partial(_ema, epochs=e) for e in recipe.ema_epochs}


# Recipe -> {name: (t >= 1, steps of an epoch, steps of the run) -> s_t}. An epoch has
# as many steps as loads: with echoing it is as many steps, which take fewer loads.
AVERAGES = {
    "epoch": lambda recipe: {"epoch": _epoch},
    "ema": _emas,
    "swa": lambda recipe: {"swa": _swa},
}


class Averages(NamedTuple):
    """The averages of a run of T steps."""

    init: Callable  # x_0 -> {name: m_0}, in float32 at least; {} if none is asked for
    update: Callable  # ({name: m_{t-1}}, x_t, t, T) -> {name: m_t}; at t = 0 it is x_0


def averages_of(recipe, *, steps: int) -> Averages:
    """Those that a recipe asks for, of epochs of this many loads."""
    import jax
    import jax.numpy as jnp
    import optax

    shares = {}
    for name in recipe.average:
        shares |= AVERAGES[name](recipe)

    def init(params):
        wide = lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32))  # noqa: E731
        return {name: jax.tree.map(wide, params) for name in shares}

    def update(means, params, t, total):
        def of(name, mean):
            share = shares[name](jnp.maximum(t, 1), steps, total)
            return optax.incremental_update(params, mean, share)

        return {name: of(name, mean) for name, mean in means.items()}

    return Averages(init, update)
