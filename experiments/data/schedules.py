"""Schedules of the learning rate, one row each: how a schedule is made, and which fields it reads.

A row is all that `--schedule` needs; JAX is imported where a schedule is made, after the flags.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import optax

COOLING, CYCLES, LEAST = 0.4, 4, 0.05  # share of a run; at its end; of the peak rate


class Schedule(NamedTuple):
    """A row of `SCHEDULES`."""

    # (recipe, steps after the warmup, loads of `decay_every`) -> a factor of the peak rate
    make: Callable
    reads: tuple[str, ...] = ()  # fields of a recipe that change it


def schedule(recipe, total_steps: int, loads_per_epoch: int) -> "optax.Schedule":
    """The learning rate over a run as a factor of its peak: a linear warmup, then the named one."""
    import optax

    warmup, every = recipe.warmup_steps, max(1, round(recipe.decay_every * loads_per_epoch))
    after = SCHEDULES[recipe.schedule].make(recipe, total_steps - warmup, every)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, 1.0, warmup), after], [warmup])


def constant(recipe, steps, every):
    import optax

    del recipe, steps, every
    return optax.constant_schedule(1.0)


def cosine(recipe, steps, every):
    import optax

    del every
    return optax.cosine_decay_schedule(1.0, steps, recipe.floor)


def linear(recipe, steps, every):
    import optax

    del every
    return optax.linear_schedule(1.0, recipe.floor, steps)


def staircase(recipe, steps, every):
    """Falls count from the run's first step; within the warmup they take effect at its end."""
    import optax

    warmup = recipe.warmup_steps
    falls = dict.fromkeys(range(every, warmup + steps, every), recipe.decay_factor)
    stairs = optax.piecewise_constant_schedule(1.0, falls)
    return lambda t: stairs(t + warmup)


def cycles(recipe, steps, every):
    """Constant, then linear to 0 over 40 %; of the last four times `every` each is a cosine."""
    import jax.numpy as jnp

    del recipe
    last = max(0, steps - CYCLES * every)

    def at(t):
        rate = jnp.minimum(1.0, (steps - t) / (COOLING * steps))
        wave = (1 + jnp.cos(jnp.pi * ((t - last) % every) / every)) / 2
        cycle = LEAST + (jnp.maximum(rate, LEAST) - LEAST) * wave
        return jnp.where(t < last, rate, cycle)

    return at


SCHEDULES = {
    "constant": Schedule(constant),
    "cosine": Schedule(cosine, ("floor",)),
    "linear": Schedule(linear, ("floor",)),
    "step": Schedule(staircase, ("decay_every", "decay_factor")),
    "cycles": Schedule(cycles, ("decay_every",)),
}
