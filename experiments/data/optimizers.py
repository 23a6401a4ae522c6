"""Optimizers without their learning rate, one row each, which is all that `--optimizer` needs.

JAX is imported where an optimizer is made, after the flags.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import optax

OTHERS = 0.1  # of Muon's rate, with which AdamW trains what is no matrix of a layer
VALLEY = (2 / 15, 1.0), (8 / 15, 1 / 8), (1.0, 0.93 / 0.8)  # share of a run, of the weight decay


def _decay(recipe) -> list:
    import optax

    return [optax.add_decayed_weights(recipe.weight_decay)] * bool(recipe.weight_decay)


def sgd(recipe) -> tuple:
    import optax

    return *_decay(recipe), *[optax.trace(recipe.momentum)] * bool(recipe.momentum)


def adamw(recipe) -> tuple:
    import optax

    return optax.scale_by_adam(b1=recipe.momentum), *_decay(recipe)


def muon(recipe, share=lambda at: 1.0) -> tuple:
    """Muon of the layers' matrices; AdamW of embeddings, and of vectors without weight decay.

    Matrices of an attention may have three axes: to or from heads of some width.

    Args:
      share: of the weight decay, at a share of the run.
    """
    import jax
    import optax
    from optax import contrib

    def kind(path, p):
        named = path[-1] == jax.tree_util.DictKey("kernel")
        return "muon" if named and p.ndim in (2, 3) else "adam"

    def axes(path, p):
        split = 2 if p.ndim == 3 and path[-2] == jax.tree_util.DictKey("out") else 1
        return contrib.MuonDimensionNumbers(tuple(range(split)), tuple(range(split, p.ndim)))

    dimensions = lambda tree: jax.tree_util.tree_map_with_path(axes, tree)  # noqa: E731
    matrices = contrib.muon(-1.0, beta=recipe.momentum, muon_weight_dimension_numbers=dimensions)

    def decayed(updates, state, params, *, at=None, **extra):
        del extra

        def of(u, p):
            return u + (recipe.weight_decay * share(at) * p).astype(u.dtype) if p.ndim > 1 else u

        return jax.tree.map(of, updates, params), state

    start = lambda params: optax.EmptyState()  # noqa: E731
    falling = optax.GradientTransformationExtraArgs(start, decayed)
    moment = optax.scale_by_rms(0.95)  # for scaled orders; it moves nothing
    watch = lambda g, state, params: (g, moment.update(g, state)[1])  # noqa: E731
    adam = optax.chain(
        optax.scale_by_adam(b1=0.8, b2=0.95, eps=1e-10),
        falling,
        optax.scale(OTHERS),
    )
    watched = optax.chain(optax.GradientTransformation(moment.init, watch), matrices, falling)
    label = lambda params: jax.tree_util.tree_map_with_path(kind, params)  # noqa: E731
    return (optax.partition({"muon": watched, "adam": adam}, label),)


def muon_valley(recipe) -> tuple:
    """Muon with a weight decay that is held, falls to an eighth, and rises to 7/6 of itself."""
    import jax.numpy as jnp

    places, shares = zip((0.0, 1.0), *VALLEY, strict=True)
    share = lambda at: jnp.interp(at, jnp.array(places), jnp.array(shares))  # noqa: E731
    return muon(recipe, share)


# Recipe -> transformations, which `inner` scales by the learning rate.
OPTIMIZERS = {"momentum": sgd, "adamw": adamw, "muon": muon, "muon_valley": muon_valley}


def inner(recipe) -> "optax.GradientTransformationExtraArgs":
    """The optimizer of one worker.

    Its learning rate comes with every step, as the extra argument `rate`, and so does the share of
    the run that is over, as `at`: one compiled step serves all schedules and lengths of runs.
    """
    import jax
    import optax

    def scale(updates, state, params=None, *, rate, **extra):
        del params, extra
        return jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates), state

    transforms = OPTIMIZERS[recipe.optimizer](recipe)
    start = lambda params: optax.EmptyState()  # noqa: E731
    return optax.chain(*transforms, optax.GradientTransformationExtraArgs(start, scale))
