"""Optimizers without their learning rate, and schedules of it: one row each."""

import jax
import optax

from experiments.tasks.base import Recipe


def _momentum(decay: float, momentum: float = 0.9) -> tuple:
    decays = [optax.add_decayed_weights(decay)] * bool(decay)
    return *decays, *[optax.trace(momentum)] * bool(momentum)


def _adamw(decay: float, momentum: float = 0.9) -> tuple:
    return optax.scale_by_adam(b1=momentum), *[optax.add_decayed_weights(decay)] * bool(decay)


# (weight decay, momentum) -> transformations; the learning rate is whoever's trains.
OPTIMIZERS = {"momentum": _momentum, "adamw": _adamw}


def scale_by_rate() -> optax.GradientTransformationExtraArgs:
    """u <- -rate u with the extra argument `rate`: one compiled step serves all schedules."""

    def update(updates, state, params=None, *, rate, **extra):
        del params, extra
        return jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def inner(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
    """The optimizer of one worker; its learning rate comes with every step, as `rate`."""
    own = OPTIMIZERS[recipe.optimizer](recipe.weight_decay, recipe.momentum)
    return optax.chain(*own, scale_by_rate())


def _staircase(steps, floor, every, factor, warmup):
    falls = range(every, steps, every)
    return optax.piecewise_constant_schedule(1.0, {t - warmup: factor for t in falls if t > warmup})


# (steps after the warmup, floor, ...) -> schedule, a factor of the peak rate.
SCHEDULES = {
    "constant": lambda steps, floor, *rest: optax.constant_schedule(1.0),
    "cosine": lambda steps, floor, *rest: optax.cosine_decay_schedule(1.0, steps, floor),
    "linear": lambda steps, floor, *rest: optax.linear_schedule(1.0, floor, steps),
    "step": _staircase,
}


def schedule(
    name: str,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    floor: float = 0.0,
    decay_steps: int = 1,
    decay_factor: float = 0.1,
) -> optax.Schedule:
    """The learning rate over a run as a factor of its peak: a linear warmup, then the named one.

    Args:
      name: of `SCHEDULES`.
      total_steps: T, the warmup included; warmup_steps: < T.
      floor: at the end of "cosine" and "linear".
      decay_steps, decay_factor: "step" multiplies by the factor every so many steps of the run.
    """
    rest = total_steps - warmup_steps
    after = SCHEDULES[name](rest, floor, decay_steps, decay_factor, warmup_steps)
    if not warmup_steps:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(0.0, 1.0, warmup_steps), after], [warmup_steps]
    )
