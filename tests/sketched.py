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
from ordering.gradients.backward import fold_small
from ordering.gradients.linear import fold, maps_of, of_slice
from ordering.gradients.scale import scaled
from ordering.trees import as_float32
from tests import reference

KEY, SKETCH_KEY = jax.random.key(3), jax.random.key(7)
RNG = np.random.default_rng(2)


def sketch_of(loss, params, batch, key, *, size):
    """`tree -> float32[k]`, the map of `ordering.sketched_grads(loss, key)`."""
    of_batch = jax.eval_shape(lambda: jax.random.key(0))
    plan = ordering.sketch_plan(loss, params, batch, key=of_batch, size=size)
    maps = maps_of(plan, key)

    def apply(tree):
        each = list(zip(plan, maps, map(as_float32, jax.tree.leaves(tree)), strict=True))
        small = [(of, g.reshape(-1)) for leaf, of, g in each if leaf.small]
        results = [_of_leaf(leaf, of, g, size) for leaf, of, g in each if not leaf.small]
        if small:
            results.append(
                fold_small(jnp.concatenate([g for _, g in small]), small[0][0].seed, size)
            )
        return sum(results)

    return apply


def _of_leaf(leaf, of, gradient, size):
    """The sum over all slices of a parameter that a scan loops over."""
    if not leaf.stack:
        return _of_matrix(leaf, of, gradient, size)
    slices = gradient.reshape(-1, *leaf.shape[leaf.stack :])
    return sum(_of_matrix(leaf, of_slice(of, i), g, size) for i, g in enumerate(slices))


def _of_matrix(leaf, of, gradient, size):
    if leaf.how != "sketched":
        return fold(gradient, of.seed, size)
    axes = [i - leaf.stack for i in (*leaf.rows, *leaf.cols)]
    axes += [i for i in range(gradient.ndim) if i not in axes]  # of size 1
    matrix = gradient.transpose(axes).reshape(of.left.size, of.right.size)
    groups, *sums = leaf.sizes
    left, right = (
        side.reshape(-1, 1, 1) * reference.group_signs(side.size, each, groups)
        for side, each in zip((of.left, of.right), sums, strict=True)
    )
    result = jnp.einsum("apm,ab,bqm->pqm", left, matrix, right).reshape(-1) / math.sqrt(groups)
    return jnp.pad(result, (0, size - result.size))


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
    to_sketch = sketch_of(loss, params, batch, SKETCH_KEY, size=size)

    @jax.jit
    def expected(rows):
        return jax.vmap(to_sketch)(rows if scale is None else scaled(rows, scale))

    close(result[2], expected(formed[2]))
    close(result[1], formed[1])
    np.testing.assert_allclose(result[0], formed[0], rtol=1e-5)
    return result
