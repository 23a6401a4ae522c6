"""Exact sequential signs: the kernel behind every balanced order.

    for i in 1..n:  s_i = sign(<r, z_i>);  r += s_i z_i

On a CPU this is a plain scan, which reads every vector about as often as NumPy's loop does. Else,
and where every product is a sum over devices, vectors go in blocks Z, float32[n, D]: the signs need
only b = Z r and G = Z Z^T (sign b_i, then b += s_i G_i), and at the end r += s^T Z. Two passes over
Z replace n dependent passes over r. A vector whose product with r is not finite takes + and is not
added, so the running sum stays finite.
"""

import functools
import operator

import jax
import jax.numpy as jnp

from ordering import rows as rows_lib
from ordering.signs import SignRule
from syncopate import mesh

BLOCK = 64  # vectors: wide enough for a matrix unit, and one sum over devices for all of them


def block_size_of(axes=()) -> int:
    """Vectors per block: 1, the plain scan, on a CPU, but `BLOCK` where products are summed.

    A sum over axes of `jax.vmap` costs nothing.
    """
    over_devices = set(axes) & set(jax.sharding.get_abstract_mesh().manual_axes)
    return BLOCK if over_devices or mesh.platform() != "cpu" else 1


def balance(rule: SignRule, rule_state, total, rows: rows_lib.Rows, *, valid, axes=()):
    """Signs one block of vectors, exactly as one after the other.

    Args:
      total: the running sum r; rows: the vectors z_1 .. z_n.
      valid: bool[n]; the others take +, are not added and are not counted by the rule.
      axes: over which vectors are sharded; products are summed over them.

    Returns:
      (rule_state, r + sum of s_i z_i, signs float32[n] in {-1, +1}, taken bool[n]): the vectors
      taken are those that are valid and finite.
    """
    products = _added(jnp.concatenate([rows.dot(total)[:, None], rows.gram()], axis=1), axes)
    places = jnp.arange(rows.size)

    def step(carry, vector):
        rule_state, dots, signs = carry
        index, gram_row, is_valid = vector
        here = places == index  # a masked sum: an accelerator would take a kernel for one entry
        dot, norm2 = (jnp.sum(jnp.where(here, x, 0.0)) for x in (dots, gram_row))
        rule_state, sign, is_taken = _sign(rule, rule_state, dot, norm2, is_valid)
        dots = dots + jnp.where(is_taken, sign * gram_row, 0.0)
        return (rule_state, dots, jnp.where(here & is_taken, sign, signs)), None

    carry = rule_state, products[:, 0], jnp.zeros(rows.size)  # 0 stays where it is not taken
    carry = mesh.varying(carry, products, valid)
    (rule_state, _, signs), _ = jax.lax.scan(step, carry, (places, products[:, 1:], valid))
    taken = signs != 0
    signs = jnp.where(taken, signs, 1.0)
    return rule_state, add_weighted(total, rows, signs, taken), signs, taken


def balance_blocks(
    rule: SignRule,
    rule_state,
    total,
    tree,
    *,
    derive=None,
    valid=None,
    axes=(),
    block_size: int | None = None,
):
    """Signs vectors that are there, block by block: the same signs for every block size.

    Args:
      tree: leaves [n, ...]; the rest as in `balance`, which says what is returned.
      derive: `element -> z_i`. It runs inside the loop, so that pair differences and centred
        gradients need not be written to memory. By default the elements are the vectors.
      block_size: vectors per block; 1 is the plain scan. By default `block_size_of(axes)`.
    """
    if not rows_lib.tree_size(total):
        raise ValueError(
            "all leaves of these gradients have size 0: there is nothing to balance. Pass "
            "parameters, or use random_reshuffling."
        )
    derive = derive or (lambda element: element)
    size = jax.tree.leaves(tree)[0].shape[0]
    valid = jnp.ones(size, bool) if valid is None else valid
    block_size = min(block_size or block_size_of(axes), size)
    whole = size // block_size * block_size

    def of_block(carry, block):
        elements, block_valid = block
        rows = rows_lib.Rows.of(jax.vmap(derive)(elements))
        *found, signs, taken = balance(rule, *carry, rows, valid=block_valid, axes=axes)
        return mesh.alike(tuple(found), carry), (signs, taken)

    def of_one(carry, vector):
        element, is_valid = vector
        found, out = _balance_one(rule, *carry, derive(element), is_valid, axes)
        return mesh.alike(found, carry), out

    def cut(leaf):
        return leaf[:whole].reshape((whole // block_size, block_size, *leaf.shape[1:]))

    carry = mesh.varying(rule_state, valid), mesh.varying(total, tree, valid)
    if size == 1:  # no loop: the vector, or the block, fuses with what computes it
        carry, out = of_one(carry, jax.tree.map(lambda leaf: leaf[0], (tree, valid)))
        return *carry, *(x[None] for x in out)
    if block_size == 1:
        # Inside of a shard_map that does not check types sums lose theirs, and a carry must not.
        carry = carry[0], jax.tree.map(lambda x: jnp.where(True, x, x), carry[1])
        carry, out = jax.lax.scan(of_one, carry, (tree, valid))
        return *carry, *out
    if whole == block_size:
        carry, out = of_block(carry, jax.tree.map(lambda leaf: leaf[:whole], (tree, valid)))
    else:
        carry, out = jax.lax.scan(of_block, carry, jax.tree.map(cut, (tree, valid)))
        out = jax.tree.map(lambda leaf: leaf.reshape(whole), out)
    if whole < size:
        carry, rest = of_block(carry, jax.tree.map(lambda leaf: leaf[whole:], (tree, valid)))
        out = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, rest)
    return *carry, *out


def _balance_one(rule, rule_state, total, vector, valid, axes):
    """((rule_state, running sum), (sign, taken)) of one vector."""
    # The norm is left out by the compiler where the rule does not look at it.
    dot, norm2 = (_added(_product(vector, other), axes) for other in (total, vector))
    rule_state, sign, taken = _sign(rule, rule_state, dot, norm2, valid)
    total = jax.tree.map(lambda r, z: r + jnp.where(taken, sign * z, 0.0), total, vector)
    return (rule_state, total), (sign, taken)


def _product(vector, other):
    """Their inner product, of one worker."""
    if mesh.platform() == "cpu":
        # A CPU sums in order, one entry after the other, but multiplies matrices by many at once.
        # The barrier keeps the sum over simulated workers from becoming a part of this one.
        products = jax.tree.map(functools.partial(jnp.vdot, precision="highest"), vector, other)
        return jax.lax.optimization_barrier(jax.tree.reduce(operator.add, products))
    # A product of matrices would want the vector written down first.
    products = jax.tree.map(lambda z, x: jnp.sum(z * x), vector, other)
    return jax.tree.reduce(operator.add, products)


def _sign(rule, rule_state, dot, norm2, valid):
    """(rule_state, sign, taken); a rule does not see a vector that is not taken."""
    taken = valid & jnp.isfinite(dot)
    new_state, sign = rule.sign(rule_state, dot, norm2)
    # Rules keep their key and count instead.
    is_key = lambda leaf: jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    rule_state = jax.tree.map(
        lambda new, old: new if is_key(new) else jnp.where(taken, new, old), new_state, rule_state
    )
    return rule_state, jnp.where(taken, sign, 1.0), taken


def _added(products, axes):
    return jax.lax.psum(products, axes) if axes else products


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
