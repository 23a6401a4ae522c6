"""Trees of the gradients of units, which orders use only through inner products.

The gradients g_1 .. g_n of a step's n units are a tree with leaves [n, ...], in the sequence in
which the units were visited. All arithmetic is float32, whatever the gradients are.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, PyTree

FEW = 16  # gradients that are added up one by one
LANES = 128  # numbers in a TPU's vector unit
NO_NUMBERS = "OSUMm"  # NumPy's kinds of objects, texts and dates, which JAX does not take
REAL = (jnp.floating, jnp.integer, jnp.bool_)
STACK = (
    "Stack one gradient per unit, for instance with jax.vmap(jax.grad(loss)); for the gradient of "
    "a single unit pass jax.tree.map(lambda g: g[None], gradient)."
)


def check_gradients(tree: PyTree, what: str = "gradients of units", act: str = STACK) -> int:
    """n, for a tree of real leaves [n, ...]; else raises ValueError with the advice `act`."""
    size = leading_size(tree, what, act)
    for leaf in jax.tree.leaves(tree):
        check_real(leaf)
    return size


def check_sketches(tree: PyTree) -> None:
    """Raises ValueError unless the results of `to_sketch` are sketches."""
    act = "Let it return float32[k] for a gradient, like the result of ordering.make_sketch."
    check_gradients(tree, "what to_sketch returns", act)


def dot(gradients: PyTree, vector: PyTree) -> Float32[Array, "n"]:
    """The inner products <g_i, vector>."""

    def products(g, v):
        if is_split((g, v)):
            return _split_products(g, v, 0)
        return _matmul(_matrix(g), as_float32(v).reshape(-1))

    return _sum_leaves(products, gradients, vector)


def gram(gradients: PyTree) -> Float32[Array, "n n"]:
    """The inner products <g_i, g_j>."""

    def products(g):
        return _split_products(g, g, 1) if is_split(g) else _matmul(_matrix(g), _matrix(g).T)

    return _sum_leaves(products, gradients)


def combine(gradients: PyTree, weights: Float32[Array, "n"]) -> PyTree:
    """The sum of w_i g_i, in float32."""

    def weighted(g):
        if is_split(g):
            return jnp.tensordot(weights, as_float32(g), 1, precision="highest")
        return _matmul(weights, _matrix(g)).reshape(g.shape[1:])

    return jax.tree.map(weighted, gradients)


def mean_of(gradients: Float[Array, "n ..."]) -> Float[Array, "..."]:
    """The mean over the leading axis, added up in float32 or a wider type."""
    floats = as_wide(gradients)
    # On a CPU additions are fused with what forms the gradients. A reduction is not, and takes
    # longer than forming them.
    few = len(floats) <= FEW
    total = functools.reduce(jnp.add, floats) if few else jnp.sum(floats, axis=0)
    return (total / len(floats)).astype(gradients.dtype)


def leading_size(tree: PyTree, what: str, act: str) -> int:
    """The size of the leading axis of all leaves; raises ValueError without such an axis or unit.

    The message says `what` the tree is and how to `act`.
    """
    leaves = jax.tree.leaves(tree)
    for dtype in (getattr(leaf, "dtype", None) for leaf in leaves):
        if isinstance(dtype, np.dtype) and dtype.kind in NO_NUMBERS:
            raise ValueError(f"{what} has an array of dtype {dtype}: pass arrays of numbers.")
    shapes = [getattr(leaf, "shape", ()) for leaf in leaves]
    sizes = {shape[0] if shape else 0 for shape in shapes}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(
            f"{what} must be arrays with a common leading axis of at least one unit, and have the "
            f"shapes {shapes}. {act}"
        )
    return sizes.pop()


def check_real(leaf: ArrayLike, *kinds: type) -> None:
    """Raises ValueError unless an array holds real numbers (of one of these kinds)."""
    dtype = getattr(leaf, "dtype", np.dtype(object))
    if not any(jnp.issubdtype(dtype, kind) for kind in kinds or REAL):
        raise ValueError(
            f"an array of params or gradients has the dtype {dtype}: gradients are arrays of real "
            "numbers. Pass real and imaginary parts as two arrays, and the rest outside params."
        )


def differences(gradients: PyTree) -> PyTree:
    """The pair differences g_1 - g_2, g_3 - g_4, ..., in float32; an odd last unit is left out."""
    return jax.tree.map(lambda g: subtract_pairs(split_pairs(g, len(g) // 2)), gradients)


def split_pairs(leaf: Float[Array, "n ..."], pairs: int) -> Float[Array, "P 2 ..."]:
    """Reshapes [n, ...] to [pairs, 2, ...]; without a copy when n is 2 * pairs."""
    return leaf[: 2 * pairs].reshape((pairs, 2, *leaf.shape[1:]))


def subtract(pair: Float[Array, "2 ..."]) -> Float32[Array, "..."]:
    """The float32 difference [...] of a leaf [2, ...]."""
    return as_float32(pair[0]) - as_float32(pair[1])


subtract_pairs = jax.vmap(subtract)


def as_float32(leaf: Array) -> Float32[Array, "..."]:
    check_real(leaf)
    return leaf.astype(jnp.float32)


def as_wide(leaf: Array) -> Array:
    """In float32, or the type of the leaf if it is wider."""
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def zeros_like(params: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
    """A float32 tree of zeros in the shape of `params`, with `leading` axes in front."""

    def zeros(p):
        if isinstance(p, jax.Array) and is_split(p):  # split as well, by its type
            return jnp.broadcast_to(jnp.zeros_like(p, jnp.float32), leading + p.shape)
        return jnp.zeros(leading + jnp.shape(p), jnp.float32)

    return jax.tree.map(zeros, params)


def is_split(tree: PyTree[ArrayLike]) -> bool:
    """Whether some arrays are split over explicit axes of a mesh, as their types say."""
    return any(any(jax.typeof(leaf).sharding.spec) for leaf in jax.tree.leaves(tree))


def tree_size(tree: PyTree) -> int:
    """D, the number of entries of one gradient."""
    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        if not hasattr(leaf, "shape") and not isinstance(leaf, int | float | complex):
            raise ValueError(f"params holds a {type(leaf).__name__}: pass a tree of arrays.")
    return sum(jnp.size(leaf) for leaf in leaves)


def flat(gradients: PyTree) -> Float[Array, "n D"]:
    """Gradients of units as one matrix [n, D], leaf after leaf."""
    leaves = jax.tree.leaves(gradients)
    return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def finite_units(gradients: PyTree) -> Bool[Array, "n"]:
    """bool[n]: which units have a gradient without inf or nan; balanced orders skip the others."""

    def finite(leaf):  # one maximum, which nan passes through, is faster than `all` on a CPU
        return jnp.isfinite(jnp.max(jnp.abs(leaf.reshape(len(leaf), -1)), axis=1, initial=0))

    return jax.tree.reduce(jnp.logical_and, jax.tree.map(finite, gradients))


def _sum_leaves(function, *trees):
    return jax.tree.reduce(operator.add, jax.tree.map(function, *trees))


def _split_products(g, other, lead):
    """Inner products over axes that are split, which a reshape to a matrix would gather."""
    axes = tuple(range(1, g.ndim)), tuple(range(lead, other.ndim))
    types = [jax.typeof(x).sharding for x in (g, other)]
    split = next(kind for kind in types if any(kind.spec))
    return jax.lax.dot_general(
        as_float32(g),
        as_float32(other),
        (axes, ((), ())),
        precision="highest",
        out_sharding=NamedSharding(split.mesh, PartitionSpec()),
    )


def _matrix(leaf):
    return as_float32(leaf).reshape(leaf.shape[0], -1)


_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
