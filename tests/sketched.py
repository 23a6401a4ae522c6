"""The sketches that a backward pass computes, from formed gradients: slow, but simple.

And what their tests share.
"""

import functools
import math

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

import ordering
from ordering.gradients import linear
from ordering.gradients.scale import scaled
from ordering.trees import as_float32
from tests import reference

KEY, SKETCH_KEY = jax.random.key(3), jax.random.key(7)
RNG = np.random.default_rng(2)


def sketch_of(params, key, *, size):
    """`tree -> float32[k]`, the sketch of gradients of these parameters, from its equation."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(params)]
    with jax.ensure_compile_time_eval():  # numbers, also where a caller is compiled
        seeds = np.asarray(jax.random.bits(jax.random.clone(key), (len(shapes) + 1,), np.uint32))
    is_small = [math.prod(shape) <= 4 * size for shape in shapes]
    small = sum(math.prod(shape) for shape, one in zip(shapes, is_small, strict=True) if one)

    def of(seed, shape):
        matrix = linear.matrix_of(shape)
        sizes = linear.sizes_of(*matrix, size)
        u, v = reference.sketch_sides(seed, matrix, sizes)

        def apply(leaf):
            flat = leaf.reshape(-1)
            whole = jnp.pad(flat, (0, math.prod(matrix) - flat.size)).reshape(matrix)
            sums = jnp.einsum("ab,afp,bfq->fpq", whole, u, v, precision="highest").reshape(-1)
            return jnp.pad(sums / math.sqrt(sizes.groups), (0, size - sums.size))

        return apply

    each = [None if one else of(s, n) for s, n, one in zip(seeds, shapes, is_small, strict=False)]
    of_small = of(seeds[-1], (small,)) if small else None

    def apply(tree):
        leaves = [*map(as_float32, jax.tree.leaves(tree))]
        sums = [one(leaf) for one, leaf in zip(each, leaves, strict=True) if one]
        if of_small:
            small = [g.reshape(-1) for g, one in zip(leaves, is_small, strict=True) if one]
            sums.append(of_small(jnp.concatenate(small)))
        return sum(sums)

    return apply


def scale_like(params, plan):
    """A scale from random moments, some of them small."""
    nu = jax.tree.map(lambda p: np.float32(RNG.lognormal(0, 2, p.shape)), params)
    scale = functools.partial(ordering.second_moment_scale, optax.scale_by_rms(), leaves=plan)
    return jax.jit(scale)(optax.ScaleByRmsState(nu), params)


def close(actual, expected):
    """To 1e-5 of the largest entry of a tree."""
    actual, expected = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (actual, expected)
    )
    atol = 1e-5 * np.max(np.abs(expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def parts_of(gradients):
    return lambda params, batch: gradients(params, batch, key=jax.random.clone(KEY))


def assert_sketched(loss, params, batch, size=64, scale=None):
    """The results equal gradients that were formed, scaled, and sketched by the same map."""

    gradients = ordering.sketched_grads(loss, SKETCH_KEY, size=size)
    makers = (functools.partial(gradients, scale=scale), ordering.per_example_grads(loss))
    result, formed = (jax.jit(parts_of(maker))(params, batch) for maker in makers)
    to_sketch = sketch_of(params, SKETCH_KEY, size=size)

    @jax.jit
    def expected(rows):
        return jax.vmap(to_sketch)(rows if scale is None else scaled(rows, scale))

    close(result[2], expected(formed[2]))
    close(result[1], formed[1])
    np.testing.assert_allclose(result[0], formed[0], rtol=1e-5)
    return result
