"""Schedules of the learning rate, one row each, which is all that `--schedule` needs.

    (recipe, steps after the warmup, loads of an epoch)
        -> step after the warmup -> a factor of the peak rate

JAX is imported where a schedule is made, after the flags.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optax

COOLING, CYCLES, LEAST = 0.4, 4, 0.05  # share of a run; at its end; of the peak rate


def schedule(recipe, total_steps: int, loads_per_epoch: int) -> "optax.Schedule":
    """The learning rate over a run as a factor of its peak: a linear warmup, then the named one."""
    import optax

    warmup = recipe.warmup_steps
    after = SCHEDULES[recipe.schedule](recipe, total_steps - warmup, loads_per_epoch)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, 1.0, warmup), after], [warmup])


def constant(recipe, steps, epoch):
    import optax

    return optax.constant_schedule(1.0)


def cosine(recipe, steps, epoch):
    import optax

    return optax.cosine_decay_schedule(1.0, steps, recipe.floor)


def linear(recipe, steps, epoch):
    import optax

    return optax.linear_schedule(1.0, recipe.floor, steps)


def _loads(epochs, epoch) -> int:
    return max(1, round(epochs * epoch))


def staircase(recipe, steps, epoch):
    """Falls count from the run's first step; within the warmup they take effect at its end."""
    import optax

    every, warmup = _loads(recipe.decay_every, epoch), recipe.warmup_steps
    falls = dict.fromkeys(range(every, warmup + steps, every), recipe.decay_factor)
    stairs = optax.piecewise_constant_schedule(1.0, falls)
    return lambda t: stairs(t + warmup)


def cycles(recipe, steps, epoch):
    """Constant, then linear to 0 over 40 %; of the last four times `every` each is a cosine."""
    import jax.numpy as jnp

    every = _loads(recipe.decay_every, epoch)
    last = max(0, steps - CYCLES * every)

    def at(t):
        rate = jnp.minimum(1.0, (steps - t) / (COOLING * steps))
        wave = (1 + jnp.cos(jnp.pi * ((t - last) % every) / every)) / 2
        cycle = LEAST + (jnp.maximum(rate, LEAST) - LEAST) * wave
        return jnp.where(t < last, rate, cycle)

    return at


SCHEDULES = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "step": staircase,
    "cycles": cycles,
}
