"""A few vectors at once in two passes over memory, for CPUs.

XLA turns one variadic reduction into one loop: all inner products of up to `MOST` vectors among
themselves and with r come out of a single read of them, straight from the gradients they are
derived from. A matrix product would read them once for each product and want them written first.
"""

import math

import jax
import jax.numpy as jnp

from ordering.rows import as_float32

MOST = 4
# Leaves from this size on are cut in up to PARTS parts, which a CPU works on in parallel.
PARTS, LONG = 8, 512


def view(leaf: jax.Array, like: jax.Array) -> jax.Array:
    """Reshapes [..., *like.shape] to [..., parts, length], without a copy.

    Vectors must have this shape before they are derived: a reshape between a vector and its two
    uses would make XLA write the vector to memory.
    """
    parts = math.gcd(PARTS, like.size) if like.size >= LONG else 1
    return leaf.reshape((*leaf.shape[: leaf.ndim - like.ndim], parts, like.size // parts))


def inner_products(vectors: list, total) -> jax.Array:
    """[b, G], float32[n, n + 1]: b_i = <z_i, r> and G_ij = <z_i, z_j>, for viewed z_i and r."""
    leaves = [jax.tree.leaves(tree) for tree in (total, *vectors)]
    filled = [columns for columns in zip(*leaves, strict=True) if columns[0].size]
    if not filled:
        raise ValueError(
            "all leaves of these gradients have size 0: there is nothing to balance. Pass "
            "parameters, or use random_reshuffling."
        )
    return sum(map(_products, filled))


def add(total, elements: list, derive, context, weights: jax.Array, taken: jax.Array):
    """r + sum of w_i z_i over the vectors that are taken; the others may hold inf and nan.

    Derives -z_i from the negated elements, which is exact: XLA would otherwise write z_i to memory
    once in order to use it in both passes.
    """
    for i, element in enumerate(elements):
        opposite = derive(*jax.tree.map(lambda x: -as_float32(x), (element, context)))
        total = jax.tree.map(
            lambda r, z, i=i: r - weights[i] * jnp.where(taken[i], z, 0.0), total, opposite
        )
    return total


def _products(columns):
    """The products of one leaf: columns r, z_1 .. z_n of shape [parts, length]."""
    columns = [as_float32(column) for column in columns]
    size, length = len(columns) - 1, columns[0].shape[1]
    pairs = [(i, j) for i in range(size) for j in range(i + 2)]  # G is symmetric: half of it
    # A single chain of additions waits for itself: few products are summed in several lanes.
    lanes = max(1, 4 // size) if length >= 64 else 1
    width = length // lanes

    def reduce(starts, width):
        terms = [
            columns[i + 1][:, k : k + width] * columns[j][:, k : k + width]
            for i, j in pairs
            for k in starts
        ]
        zeros = [jnp.float32(0)] * len(terms)
        sums = jax.lax.reduce(tuple(terms), tuple(zeros), _add_tuples, (1,))
        return jnp.sum(jnp.stack(sums).reshape(len(pairs), -1), axis=1)

    sums = reduce(range(0, lanes * width, width), width)
    if lanes * width < length:
        sums += reduce([lanes * width], length - lanes * width)
    place = {pair: k for k, pair in enumerate(pairs)}
    entry = [
        place[i, j] if j <= i + 1 else place[j - 1, i + 1]
        for i in range(size)
        for j in range(size + 1)
    ]
    return sums[jnp.array(entry)].reshape(size, size + 1)


def _add_tuples(left, right):
    return tuple(a + b for a, b in zip(left, right, strict=True))
