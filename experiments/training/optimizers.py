"""Optimizers without their learning rate, and schedules of it: one row each."""

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from experiments.tasks.base import Recipe

OTHERS = 0.1  # of Muon's rate, with which AdamW trains what is no matrix of a layer
VALLEY = (2 / 15, 1.0), (8 / 15, 1 / 8), (1.0, 0.93 / 0.8)  # share of a run, of the weight decay
COOLING, CYCLES, LEAST = 0.4, 4, 0.05  # share of a run; at its end; of the peak rate


def _momentum(decay, momentum: float, steps: int | None) -> tuple:
    decays = [optax.add_decayed_weights(decay)] * bool(decay)
    return *decays, *[optax.trace(momentum)] * bool(momentum)


def _adamw(decay, momentum: float, steps: int | None) -> tuple:
    return optax.scale_by_adam(b1=momentum), *[optax.add_decayed_weights(decay)] * bool(decay)


def _muon(decay, momentum: float, steps: int | None) -> tuple:
    """Muon of the layers' matrices; AdamW of embeddings, and of vectors without weight decay.

    Matrices of an attention may have three axes: to or from heads of some width.
    """

    def kind(path, p):
        named = path[-1] == jax.tree_util.DictKey("kernel")
        return "muon" if named and p.ndim in (2, 3) else "adam"

    def axes(path, p):
        split = 2 if p.ndim == 3 and path[-2] == jax.tree_util.DictKey("out") else 1
        return contrib.MuonDimensionNumbers(tuple(range(split)), tuple(range(split, p.ndim)))

    dimensions = lambda tree: jax.tree_util.tree_map_with_path(axes, tree)  # noqa: E731
    muon = contrib.muon(
        -1.0, beta=momentum, weight_decay=decay, muon_weight_dimension_numbers=dimensions
    )
    moment = optax.scale_by_rms(0.95)  # for scaled orders; it moves nothing
    watch = lambda g, state, params: (g, moment.update(g, state)[1])  # noqa: E731
    adam = optax.chain(
        optax.scale_by_adam(b1=0.8, b2=0.95, eps=1e-10),
        optax.add_decayed_weights(decay, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.scale(OTHERS),
    )
    watched = optax.chain(optax.GradientTransformation(moment.init, watch), muon)
    label = lambda params: jax.tree_util.tree_map_with_path(kind, params)  # noqa: E731
    return (optax.partition({"muon": watched, "adam": adam}, label),)


def _muon_valley(decay: float, momentum: float, steps: int | None) -> tuple:
    """Muon with a weight decay that is held, falls to an eighth, and rises to 7/6 of itself."""
    at, shares = zip((0.0, 1.0), *VALLEY, strict=True)
    now = lambda t: jnp.interp(t / steps, jnp.array(at), jnp.array(shares))  # noqa: E731
    return _muon(lambda t: decay * now(t), momentum, steps)


# (weight decay, momentum, steps) -> transformations; the learning rate is whoever's trains.
OPTIMIZERS = {
    "momentum": _momentum, "adamw": _adamw, "muon": _muon, "muon_valley": _muon_valley,
}  # fmt: skip


def inner(recipe: Recipe, steps: int | None = None) -> optax.GradientTransformationExtraArgs:
    """The optimizer of one worker, in a run of so many steps.

    Its learning rate comes with every step, as the extra argument `rate`: one compiled step serves
    all schedules.
    """

    def scale(updates, state, params=None, *, rate, **extra):
        del params, extra
        return jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates), state

    own = OPTIMIZERS[recipe.optimizer](recipe.weight_decay, recipe.momentum, steps)
    start = lambda params: optax.EmptyState()  # noqa: E731
    return optax.chain(*own, optax.GradientTransformationExtraArgs(start, scale))


def _staircase(recipe, steps, every):
    warmup, falls = recipe.warmup_steps, range(every, steps, every)
    factors = {t - warmup: recipe.decay_factor for t in falls if t > warmup}
    return optax.piecewise_constant_schedule(1.0, factors)


def _cycles(recipe, steps, every):
    """Constant, then linear to 0 over 40 %; of the last four times `every` each is a cosine."""
    last = max(0, steps - CYCLES * every)

    def at(t):
        rate = jnp.minimum(1.0, (steps - t) / (COOLING * steps))
        wave = (1 + jnp.cos(jnp.pi * ((t - last) % every) / every)) / 2
        cycle = LEAST + (jnp.maximum(rate, LEAST) - LEAST) * wave
        return jnp.where(t < last, rate, cycle)

    return at


# (recipe, steps after the warmup, loads of `decay_every`) -> schedule, a factor of the peak rate.
SCHEDULES = {
    "constant": lambda recipe, *_: optax.constant_schedule(1.0),
    "cosine": lambda recipe, steps, _: optax.cosine_decay_schedule(1.0, steps, recipe.floor),
    "linear": lambda recipe, steps, _: optax.linear_schedule(1.0, recipe.floor, steps),
    "step": _staircase,
    "cycles": _cycles,
}


def schedule(recipe: Recipe, total_steps: int, loads_per_epoch: int) -> optax.Schedule:
    """The learning rate over a run as a factor of its peak: a linear warmup, then the named one."""
    warmup, every = recipe.warmup_steps, max(1, round(recipe.decay_every * loads_per_epoch))
    after = SCHEDULES[recipe.schedule](recipe, total_steps - warmup, every)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, 1.0, warmup), after], [warmup])
