"""Exact sequential signs from inner products: the kernel behind every balanced order.

For a block of vectors Z, float32[n, D], and the running sum r, the sequential algorithm

    for i in 1..n:  s_i = sign(<r, z_i>);  r += s_i z_i

needs only b = Z r and G = Z Z^T: sign b_i, then b += s_i G_i; at the end r += s^T Z. Two passes
over Z replace n dependent passes over r. Vectors with a non-finite norm take + and are not added,
so the running sum stays finite.
"""

import jax
import jax.numpy as jnp

from ordering import rows as rows_lib
from ordering.signs import SignRule

# Up to this many vectors all inner products of a block are one fused reduction over D: on a CPU
# the vectors are then read once, straight from the gradients, instead of once for each product.
FUSED_BLOCK = 6
# The fused reduction is cut in this many parts, for a CPU runs the parts in parallel.
FUSED_PARTS = 8


def default_block_size(num_parameters: int, backend: str | None = None) -> int:
    """The number of vectors per block that was fastest where it was measured.

    Args:
      num_parameters: D, entries of one gradient (on this device).
      backend: "cpu", "gpu" or "tpu"; by default the one that JAX uses.

    Returns:
      n >= 1. On a CPU: 16 up to 4,096 parameters (loop overhead counts), else 4 (memory traffic
      counts, and a fused block reads each gradient twice), measured by
      `python -m experiments.bench_balance --sweep`. On accelerators 64, which is a matrix product
      wide enough for the hardware and not yet measured here.

    Example:
      >>> import ordering
      >>> ordering.default_block_size(10**6, backend="cpu")
      4
    """
    if (backend or jax.default_backend()) != "cpu":
        return 64
    return 16 if num_parameters <= 4096 else 4


def balance(rule: SignRule, rule_state, total, rows: rows_lib.Rows, *, valid=None, reduce=None):
    """Signs one block of vectors, exactly as one after the other.

    Args:
      rule: the sign rule; rule_state: its state.
      total: tree, float32, the running sum r.
      rows: the vectors z_1 .. z_n.
      valid: bool[n]; vectors that are not valid take +, are not added and are not counted by the
        rule. All by default.
      reduce: function of float32[n, n + 1] that completes partial inner products, for vectors
        that are sharded over devices (a psum). None by default.

    Returns:
      (rule_state, r + sum of s_i z_i, signs float32[n] in {-1, +1}, taken bool[n]): the vectors
      taken are those that are valid and finite.
    """
    products = _inner_products(rows, total)
    if reduce is not None:
        products = reduce(products)
    taken = jnp.isfinite(jnp.diagonal(products, offset=1))
    if valid is not None:
        taken = taken & valid
    rule_state, signs = _sequential_signs(rule, rule_state, products, taken)
    return rule_state, add_weighted(total, rows, signs, taken), signs, taken


def balance_blocks(
    rule: SignRule, rule_state, total, tree, *, block_size, derive, valid=None, reduce=None
):
    """Signs the vectors `derive(tree)`, block by block; the same signs for every block size.

    Args:
      rule, rule_state, total, valid, reduce: as in `balance`.
      tree: leaves [n, ...]; `derive` maps any block of it, leaves [m, ...], to m vectors. It runs
        inside the loop over blocks, so that pair differences are never written to memory.
      block_size: vectors per block, >= 1; 1 is the plain sequential scan.

    Returns:
      (rule_state, running sum, signs float32[n], taken bool[n]), as in `balance`.
    """
    size = jax.tree.leaves(tree)[0].shape[0]
    valid = jnp.ones(size, bool) if valid is None else valid
    block_size = min(block_size, size)
    whole = size // block_size * block_size

    def step(carry, block):
        block_tree, block_valid = block
        rows = rows_lib.stacked(derive(block_tree))
        *carry, signs, taken = balance(rule, *carry, rows, valid=block_valid, reduce=reduce)
        return tuple(carry), (signs, taken)

    def cut(leaf):
        return leaf[:whole].reshape((whole // block_size, block_size, *leaf.shape[1:]))

    carry, blocks = (rule_state, total), (tree, valid)
    if whole == block_size:  # no loop: the block fuses with what computes it
        carry, out = step(carry, jax.tree.map(lambda leaf: leaf[:whole], blocks))
    else:
        carry, out = jax.lax.scan(step, carry, jax.tree.map(cut, blocks))
        out = jax.tree.map(lambda leaf: leaf.reshape(whole), out)
    if whole < size:
        carry, rest = step(carry, jax.tree.map(lambda leaf: leaf[whole:], blocks))
        out = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, rest)
    return *carry, *out


def _sequential_signs(rule, rule_state, products, taken):
    """The scan over n scalars: products is [b, G], float32[n, n + 1]."""
    size = products.shape[0]

    def step(carry, vector):
        rule_state, dots = carry
        index, gram_row, is_taken = vector
        new_state, sign = rule.sign(rule_state, dots[index], gram_row[index])
        rule_state = jax.tree.map(
            lambda new, old: new if _is_key(new) else jnp.where(is_taken, new, old),
            new_state,
            rule_state,
        )
        sign = jnp.where(is_taken, sign, 1.0)
        return (rule_state, dots + jnp.where(is_taken, sign * gram_row, 0.0)), sign

    (rule_state, _), signs = jax.lax.scan(
        step,
        (rule_state, products[:, 0]),
        (jnp.arange(size), products[:, 1:], taken),
        unroll=min(size, 16),
    )
    return rule_state, signs


def _is_key(leaf):
    """Rules keep their key and count instead, so a vector that is not taken leaves it alone."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _inner_products(rows, total):
    """[b, G], float32[n, n + 1], with b = Z r and G = Z Z^T."""
    if rows.tree is not None and rows.size <= FUSED_BLOCK:
        leaves = zip(jax.tree.leaves(rows.tree), jax.tree.leaves(total), strict=True)
        return sum(_fused_products(leaf, vector) for leaf, vector in leaves)
    return jnp.concatenate([rows.dot(total)[:, None], rows.gram()], axis=1)


def _fused_products(leaf, vector):
    size = leaf.shape[0]
    vectors = [rows_lib.as_float32(leaf[i]).reshape(-1) for i in range(size)]
    columns = [vector.reshape(-1), *vectors]
    pairs = [(i, j) for i in range(size) for j in range(i + 2)]
    length = vector.size // FUSED_PARTS * FUSED_PARTS

    def reduce(parts, start, stop):
        cut = [c[start:stop].reshape(parts, -1) for c in columns]
        products = tuple(cut[i + 1] * cut[j] for i, j in pairs)
        zeros = tuple(jnp.float32(0) for _ in pairs)
        sums = jax.lax.reduce(products, zeros, _add_tuples, (1,))
        return jnp.stack([jnp.sum(s) for s in sums])

    flat = jnp.zeros(len(pairs), jnp.float32)
    if length:
        flat += reduce(FUSED_PARTS, 0, length)
    if length < vector.size:
        flat += reduce(1, length, vector.size)
    place = {(i, j): k for k, (i, j) in enumerate(pairs)}
    # Column 0 is b; the Gram matrix behind it is symmetric, so only its lower half was summed.
    entry = [
        place[i, j] if j <= i + 1 else place[j - 1, i + 1]
        for i in range(size)
        for j in range(size + 1)
    ]
    return flat[jnp.array(entry)].reshape(size, size + 1)


def _add_tuples(left, right):
    return tuple(a + b for a, b in zip(left, right, strict=True))


def add_weighted(total, rows: rows_lib.Rows, weights, taken):
    """total + sum of w_i z_i over the vectors that are taken; 0 * nan never enters the sum."""
    weights = jnp.where(taken, weights, 0.0)
    if rows.tree is None:
        new_total = jax.tree.map(jnp.add, total, rows.combine(weights))
        # A row that is not finite cannot be left out of a product: leave out the whole block.
        finite = jnp.isfinite(rows_lib.tree_dot(new_total, new_total))
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new_total, total)
    if rows.size <= FUSED_BLOCK:
        return jax.tree.map(
            lambda r, z: (
                r
                + sum(
                    weights[i] * jnp.where(taken[i], rows_lib.as_float32(z[i]), 0.0)
                    for i in range(rows.size)
                )
            ),
            total,
            rows.tree,
        )

    def keep_taken(z):
        return jnp.where(taken.reshape((-1,) + (1,) * (z.ndim - 1)), z, 0)

    clean = rows_lib.stacked(jax.tree.map(keep_taken, rows.tree))
    return jax.tree.map(jnp.add, total, clean.combine(weights))
