"""Rows: the gradients of a step's units, which orders use only through inner products.

Stacked per-example gradients, microbatch gradients, sketches and matrix-free products all have this
interface. All arithmetic is float32, whatever the gradients are.
"""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Float32, PyTree

FEW = 16  # gradients that are added up one by one
REAL = (jnp.floating, jnp.integer, jnp.bool_)


class Rows(NamedTuple):
    """The gradients of n units, g_1 .. g_n, in the order in which they were visited.

    A unit is what an order permutes: one example, or a group that is visited together.

    Attributes:
      size: n, a Python int.
      dot: `tree -> float32[n]`, the inner products <g_i, tree>.
      combine: `float32[n] -> tree`, the sum of w_i g_i, in float32.
      gram: `() -> float32[n, n]`, the inner products <g_i, g_j>.
      tree: the gradients themselves, leaves [n, ...], or None where they do not exist.
      workers: None for the rows of one worker; W for the rows of all workers, sliced
        over them (see `ordering.exchange.exchange`).
    """

    size: int
    dot: Callable[[PyTree], Float32[Array, "n"]]
    combine: Callable[[Float32[Array, "n"]], PyTree]
    gram: Callable[[], Float32[Array, "n n"]]
    tree: PyTree | None = None
    workers: int | None = None

    @classmethod
    def of(cls, tree: PyTree) -> "Rows":
        """Rows of gradients that are stacked along a leading axis.

        Args:
          tree: pytree of floating leaves [n, ...], n >= 1.

        Returns:
          `Rows` over the n gradients.

        Raises:
          ValueError: if the tree is empty, its leaves disagree about n, or are not real numbers.

        Examples:
          >>> import jax.numpy as jnp, ordering
          >>> rows = ordering.Rows.of({"w": jnp.eye(3)})
          >>> rows.dot({"w": jnp.array([1., 2., 3.])}).tolist()
          [1.0, 2.0, 3.0]
        """
        act = "Stack one gradient per unit, for instance with jax.vmap(jax.grad(loss))."
        size = leading_size(tree, "rows", act)
        for leaf in jax.tree.leaves(tree):
            check_real(leaf)
        return cls(
            size=size,
            dot=lambda vector: _sum_leaves(_dot_leaf, tree, vector),
            combine=lambda weights: jax.tree.map(lambda leaf: _combine_leaf(weights, leaf), tree),
            gram=lambda: _sum_leaves(_gram_leaf, tree),
            tree=tree,
        )

    @classmethod
    def of_gradient(cls, gradient: PyTree) -> "Rows":
        """Rows of a single unit: the worker's whole microbatch, whose gradient this is.

        For loops that already compute a gradient. The order then has one unit per step.

        Args:
          gradient: pytree of floating leaves.

        Returns:
          `Rows` of size 1.

        Raises:
          ValueError: if the tree is empty.

        Examples:
          >>> import jax.numpy as jnp, ordering
          >>> ordering.Rows.of_gradient({"w": jnp.ones(3)}).tree["w"].shape
          (1, 3)
        """

        def alone(leaf):
            leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
            check_real(leaf)
            return jnp.asarray(leaf)[None]

        return cls.of(jax.tree.map(alone, gradient))


def mean_of(gradients: Float[Array, "n ..."]) -> Float[Array, "..."]:
    """The mean over the leading axis, added up in float32."""
    found = as_float32(gradients)
    # On a CPU additions are fused with what forms the gradients. A reduction is not, and takes
    # longer than forming them.
    few = len(found) <= FEW
    total = functools.reduce(jnp.add, found) if few else jnp.sum(found, axis=0)
    return (total / len(found)).astype(gradients.dtype)


def leading_size(tree: PyTree, what: str, act: str) -> int:
    """The size of the leading axis of all leaves; raises ValueError without such an axis or unit.

    The message says `what` the tree is and how to `act`.
    """
    shapes = [getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(tree)]
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


def centre(rows: Rows, mean: PyTree) -> Rows:
    """Rows of g_i - mean, a float32 tree like one gradient."""

    def combine(weights):
        shift = jnp.sum(weights)
        return jax.tree.map(lambda g, m: g - shift * m, rows.combine(weights), mean)

    def gram():
        cross = rows.dot(mean)
        return rows.gram() - cross[:, None] - cross[None, :] + tree_dot(mean, mean)

    return Rows(rows.size, lambda v: rows.dot(v) - tree_dot(mean, v), combine, gram)


def differences(rows: Rows) -> Rows:
    """Rows of the pair differences g_1 - g_2, g_3 - g_4, ...; an odd last row is left out."""
    pairs = rows.size // 2
    if rows.tree is not None:
        return Rows.of(jax.tree.map(lambda g: subtract_pairs(split_pairs(g, pairs)), rows.tree))
    signs = jnp.zeros((pairs, rows.size)).at[jnp.arange(pairs), 2 * jnp.arange(pairs)].set(1.0)
    signs = signs.at[jnp.arange(pairs), 2 * jnp.arange(pairs) + 1].set(-1.0)
    return Rows(
        size=pairs,
        dot=lambda vector: signs @ rows.dot(vector),
        combine=lambda weights: rows.combine(weights @ signs),
        gram=lambda: signs @ rows.gram() @ signs.T,
    )


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


def tree_dot(left: PyTree, right: PyTree) -> Float32[Array, ""]:
    """The float32 inner product of two trees."""
    return _sum_leaves(lambda a, b: jnp.vdot(as_float32(a), as_float32(b)), left, right)


def zeros_like(params: PyTree, leading: tuple[int, ...] = ()) -> PyTree:
    """A float32 tree of zeros in the shape of `params`, with `leading` axes in front."""
    return jax.tree.map(lambda p: jnp.zeros(leading + jnp.shape(p), jnp.float32), params)


def tree_size(tree: PyTree) -> int:
    """D, the number of entries of one gradient."""
    leaves = jax.tree.leaves(tree)
    for leaf in leaves:
        if not hasattr(leaf, "shape") and not isinstance(leaf, int | float | complex):
            raise ValueError(f"params holds a {type(leaf).__name__}: pass a tree of arrays.")
    return sum(jnp.size(leaf) for leaf in leaves)


def flat(rows: Rows) -> Float[Array, "n D"]:
    """Stacked rows as one matrix [n, D], leaf after leaf."""
    leaves = jax.tree.leaves(rows.tree)
    return jnp.concatenate([leaf.reshape(rows.size, -1) for leaf in leaves], axis=1)


def finite_units(rows: Rows) -> Bool[Array, "n"]:
    """bool[n]: which units have a gradient without inf or nan; balanced orders skip the others."""
    if rows.tree is None:
        return jnp.isfinite(jnp.diagonal(rows.gram()))

    def finite(leaf):  # one maximum, which nan passes through, is faster than `all` on a CPU
        return jnp.isfinite(jnp.max(jnp.abs(leaf.reshape(rows.size, -1)), axis=1, initial=0))

    return jax.tree.reduce(jnp.logical_and, jax.tree.map(finite, rows.tree))


def _sum_leaves(function, *trees):
    return jax.tree.reduce(operator.add, jax.tree.map(function, *trees))


def _matrix(leaf):
    return as_float32(leaf).reshape(leaf.shape[0], -1)


_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _dot_leaf(leaf, vector):
    return _matmul(_matrix(leaf), as_float32(vector).reshape(-1))


def _gram_leaf(leaf):
    matrix = _matrix(leaf)
    return _matmul(matrix, matrix.T)


def _combine_leaf(weights, leaf):
    return _matmul(weights, _matrix(leaf)).reshape(leaf.shape[1:])
