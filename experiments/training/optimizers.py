"""Optimizers without their learning rate, and schedules of it: one row each."""

import jax
import optax

from experiments.tasks.base import Recipe


def _momentum(decay: float, momentum: float) -> tuple:
    decays = [optax.add_decayed_weights(decay)] * bool(decay)
    return *decays, *[optax.trace(momentum)] * bool(momentum)


def _adamw(decay: float, momentum: float) -> tuple:
    return optax.scale_by_adam(b1=momentum), *[optax.add_decayed_weights(decay)] * bool(decay)


# (weight decay, momentum) -> transformations; the learning rate is whoever's trains.
OPTIMIZERS = {"momentum": _momentum, "adamw": _adamw}


def inner(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
    """The optimizer of one worker.

    Its learning rate comes with every step, as the extra argument `rate`: one compiled step serves
    all schedules.
    """

    def scale(updates, state, params=None, *, rate, **extra):
        del params, extra
        return jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates), state

    own = OPTIMIZERS[recipe.optimizer](recipe.weight_decay, recipe.momentum)
    start = lambda params: optax.EmptyState()  # noqa: E731
    return optax.chain(*own, optax.GradientTransformationExtraArgs(start, scale))


def _staircase(recipe, steps, every):
    warmup, falls = recipe.warmup_steps, range(every, steps, every)
    factors = {t - warmup: recipe.decay_factor for t in falls if t > warmup}
    return optax.piecewise_constant_schedule(1.0, factors)


# (recipe, steps after the warmup, loads of `decay_every`) -> schedule, a factor of the peak rate.
SCHEDULES = {
    "constant": lambda recipe, *_: optax.constant_schedule(1.0),
    "cosine": lambda recipe, steps, _: optax.cosine_decay_schedule(1.0, steps, recipe.floor),
    "linear": lambda recipe, steps, _: optax.linear_schedule(1.0, recipe.floor, steps),
    "step": _staircase,
}


def schedule(recipe: Recipe, total_steps: int, loads_per_epoch: int) -> optax.Schedule:
    """The learning rate over a run as a factor of its peak: a linear warmup, then the named one."""
    warmup, every = recipe.warmup_steps, max(1, round(recipe.decay_every * loads_per_epoch))
    after = SCHEDULES[recipe.schedule](recipe, total_steps - warmup, every)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, 1.0, warmup), after], [warmup])
