"""Exact sequential signs from inner products: the kernel behind every balanced order.

For a block of vectors Z, float32[n, D], and the running sum r, the sequential algorithm

    for i in 1..n:  s_i = sign(<r, z_i>);  r += s_i z_i

needs only b = Z r and G = Z Z^T: sign b_i, then b += s_i G_i; at the end r += s^T Z. Two passes
over Z replace n dependent passes over r. Vectors with a non-finite norm take + and are not added,
so the running sum stays finite.
"""

import jax
import jax.numpy as jnp

from ordering import fused
from ordering import rows as rows_lib
from ordering.machine_forms import platform
from ordering.signs import SignRule
from syncopate.plans import specs as specs_lib


def default_block_size(num_parameters: int, backend: str | None = None) -> int:
    """The number of vectors per block that was fastest where it was measured.

    Args:
      num_parameters: D, entries of one gradient (on this device).
      backend: "cpu", "gpu" or "tpu"; by default that of the mesh that is traced for, whose devices
        need not be there, else the one that JAX uses.

    Returns:
      n >= 1. On a CPU 1 up to 64 entries, where a plain scan fits in registers, else 4, which is
      the fused block that reads every gradient twice and no more: measured by
      `python -m experiments.bench --part=balance --rows=sweep`. On accelerators 64, wide enough for
      a matrix unit; not measured yet.

    Example:
      >>> import ordering
      >>> ordering.balance.default_block_size(10**6, backend="cpu")
      4
    """
    if (backend or platform()) != "cpu":
        return 64
    return 1 if num_parameters <= 64 else 4


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

    Example:
      >>> import jax.numpy as jnp, ordering
      >>> rows = ordering.Rows.of(jnp.array([[1.0], [1.0], [3.0]]))
      >>> ordering.balance.balance(ordering.greedy(), (), jnp.zeros(1), rows)[2].tolist()
      [1.0, -1.0, 1.0]
    """
    products = jnp.concatenate([rows.dot(total)[:, None], rows.gram()], axis=1)
    rule_state, signs, taken = _sequential_signs(rule, rule_state, products, valid, reduce)
    return rule_state, add_weighted(total, rows, signs, taken), signs, taken


def balance_blocks(
    rule: SignRule,
    rule_state,
    total,
    tree,
    *,
    block_size: int,
    derive=lambda element, context: element,
    context=None,
    valid=None,
    reduce=None,
):
    """Signs vectors block by block: the same signs for every block size.

    Args:
      rule, rule_state, total, valid, reduce: as in `balance`.
      tree: leaves [n, ...].
      derive: `(element, context) -> z_i`, linear and entry by entry, from an element of the tree
        and a tree like r. It runs inside the loop over blocks, so that pair differences and
        centred gradients need not be written to memory. By default the elements are the vectors.
      context: what `derive` gets besides; None or a tree like r.
      block_size: vectors per block, >= 1; 1 is the plain sequential scan.

    Returns:
      (rule_state, running sum, signs float32[n], taken bool[n]), as in `balance`.

    Example:
      >>> import jax.numpy as jnp, ordering
      >>> vectors = jnp.array([[1.0], [1.0], [3.0]])
      >>> ordering.balance.balance_blocks(
      ...     ordering.greedy(), (), jnp.zeros(1), vectors, block_size=2)[2].tolist()
      [1.0, -1.0, 1.0]
    """
    size = jax.tree.leaves(tree)[0].shape[0]
    valid = jnp.ones(size, bool) if valid is None else valid
    given = total
    tree, total = (jax.tree.map(fused.view, x, given) for x in (tree, total))
    if context is not None:
        context = jax.tree.map(fused.view, context, given)
    block_size = min(block_size, size)
    whole = size // block_size * block_size

    def step(carry, block):
        elements, block_valid = block
        state, total = carry
        count = block_valid.size
        if count > fused.MOST:
            rows = rows_lib.Rows.of(jax.vmap(lambda e: derive(e, context))(elements))
            *carry, signs, taken = balance(
                rule, state, total, rows, valid=block_valid, reduce=reduce
            )
            return tuple(carry), (signs, taken)
        elements = [jax.tree.map(lambda x, i=i: x[i], elements) for i in range(count)]
        products = fused.inner_products([derive(e, context) for e in elements], total)
        state, signs, taken = _sequential_signs(rule, state, products, block_valid, reduce)
        total = fused.add(total, elements, derive, context, signs, taken)
        return (state, total), (signs, taken)

    def cut(leaf):
        return leaf[:whole].reshape((whole // block_size, block_size, *leaf.shape[1:]))

    blocks = tree, valid
    carry = specs_lib.varying(rule_state, valid), specs_lib.varying(total, tree, valid)
    if whole == block_size:  # no loop: the block fuses with what computes it
        carry, out = step(carry, jax.tree.map(lambda leaf: leaf[:whole], blocks))
    else:
        carry, out = jax.lax.scan(step, carry, jax.tree.map(cut, blocks))
        out = jax.tree.map(lambda leaf: leaf.reshape(whole), out)
    if whole < size:
        carry, rest = step(carry, jax.tree.map(lambda leaf: leaf[whole:], blocks))
        out = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, rest)
    rule_state, total = carry
    return rule_state, jax.tree.map(lambda x, r: x.reshape(r.shape), total, given), *out


def _sequential_signs(rule, rule_state, products, valid, reduce):
    """The scan over n scalars, from products [b, G]: (rule_state, signs[n], taken[n])."""
    if reduce is not None:
        products = reduce(products)
    taken = jnp.isfinite(jnp.diagonal(products, offset=1))
    if valid is not None:
        taken = taken & valid

    places = jnp.arange(taken.size)

    def step(carry, vector):
        rule_state, dots, signs = carry
        index, gram_row, is_taken = vector
        here = places == index  # a masked sum: an accelerator would take a kernel for one entry
        dot, norm = (jnp.sum(jnp.where(here, x, 0.0)) for x in (dots, gram_row))
        new_state, sign = rule.sign(rule_state, dot, norm)
        rule_state = jax.tree.map(
            lambda new, old: new if _is_key(new) else jnp.where(is_taken, new, old),
            new_state,
            rule_state,
        )
        sign = jnp.where(is_taken, sign, 1.0)
        dots = dots + jnp.where(is_taken, sign * gram_row, 0.0)
        return (rule_state, dots, jnp.where(here, sign, signs)), None

    carry = specs_lib.varying((rule_state, products[:, 0], jnp.ones(taken.size)), products, taken)
    (rule_state, _, signs), _ = jax.lax.scan(step, carry, (places, products[:, 1:], taken))
    return rule_state, signs, taken


def _is_key(leaf):
    """Rules keep their key and count instead, so a vector that is not taken leaves it alone."""
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def add_weighted(total, rows: rows_lib.Rows, weights, taken):
    """total + sum of w_i z_i over the vectors that are taken; 0 * nan never enters the sum."""
    weights = jnp.where(taken, weights, 0.0)
    if rows.tree is None:
        new_total = jax.tree.map(jnp.add, total, rows.combine(weights))
        # A row that is not finite cannot be left out of a product: leave out the whole block.
        finite = jnp.isfinite(rows_lib.tree_dot(new_total, new_total))
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new_total, total)

    def keep_taken(z):
        return jnp.where(taken.reshape((-1,) + (1,) * (z.ndim - 1)), z, 0)

    clean = rows_lib.Rows.of(jax.tree.map(keep_taken, rows.tree))
    return jax.tree.map(jnp.add, total, clean.combine(weights))
