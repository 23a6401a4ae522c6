"""The kernel equals the float64 reference: every rule, block size, structure and dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ordering
from ordering.pair_balance import subtract
from ordering.rows import split_pairs
from tests import reference, tables

BLOCKS = (1, 2, 3, 4, 5, 8, 64)


def signs_of(vectors, block_size, rule=None, state=(), total=None, **options):
    total = jnp.zeros(vectors.shape[1:]) if total is None else total
    return ordering.balance.balance_blocks(
        rule or ordering.greedy(),
        state,
        total,
        jnp.asarray(vectors),
        block_size=block_size,
        **options,
    )


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("size", [1, 7, 1000, 4099])
def test_blocks_equal_the_reference_exactly(block_size, size):
    vectors = tables.whole_numbers((13, size), seed=size, high=6)
    expected, total = reference.balance(vectors, np.zeros(size))
    _, found, signs, taken = signs_of(vectors, block_size)
    np.testing.assert_array_equal(signs, expected)
    np.testing.assert_array_equal(found, total)
    assert taken.all()


@pytest.mark.parametrize("block_size", BLOCKS)
def test_real_gradients_equal_the_reference(block_size):
    """Real numbers: float32 rounding may flip a sign only where |<r, z>| is about its error."""
    vectors = np.random.default_rng(0).normal(size=(60, 300)).astype(np.float32)
    expected, total = reference.balance(vectors, np.zeros(300))
    _, found, signs, _ = signs_of(vectors, block_size)
    np.testing.assert_array_equal(signs, expected)
    np.testing.assert_allclose(found, total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_any_structure_and_bfloat16(block_size):
    """Whole numbers up to 256 are exact in bfloat16; sums beyond that need the float32 sum."""
    flat = tables.whole_numbers((20, 2 * 3 + 5 + 1), high=200)
    tree = {"w": flat[:, :6].reshape(20, 2, 3), "b": [flat[:, 6:11], flat[:, 11]]}
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)
    total = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), tree)
    pairs = jax.tree.map(lambda g: split_pairs(g, 10), tree)
    _, found, signs, _ = ordering.balance.balance_blocks(
        ordering.greedy(), (), total, pairs, block_size=block_size, derive=subtract
    )
    expected, expected_total = reference.balance(flat[0::2] - flat[1::2], np.zeros(12))
    np.testing.assert_array_equal(signs, expected)
    np.testing.assert_array_equal(
        np.concatenate([found["w"].ravel(), found["b"][0], [found["b"][1]]]), expected_total
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(found))


# jax compiles for each: how many vectors, their size and the size of a block.
SHAPES = [(1, 1, 1), (2, 3, 4), (5, 9, 3), (7, 3, 1), (8, 1, 8), (11, 9, 4), (12, 3, 3), (12, 9, 8)]


@given(st.sampled_from(SHAPES), st.integers(0, 99))
def test_property_blocks_equal_the_reference(shape, seed):
    count, size, block_size = shape
    vectors = tables.whole_numbers((count, size), seed, high=2)  # many ties and zeros
    expected, _ = reference.balance(vectors, np.zeros(size))
    np.testing.assert_array_equal(signs_of(vectors, block_size)[2], expected)


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_self_balancing_walk(block_size, key):
    vectors = tables.whole_numbers((30, 5), high=3)
    rule = ordering.self_balancing_walk(bound=40.0)
    state = rule.init(key)
    coins = [float(jax.random.uniform(jax.random.fold_in(key, i))) for i in range(30)]
    expected, _ = reference.balance(vectors, np.zeros(5), reference.walk_sign(40.0, coins))
    state, _, signs, _ = signs_of(vectors, block_size, rule, state)
    np.testing.assert_array_equal(signs, expected)
    assert int(rule.next_epoch(state).count) == 30  # coins go on, they are not drawn twice


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_kernel_halving(block_size, key):
    vectors = tables.whole_numbers((30, 5), high=3)
    vectors[4] = 0
    rule = ordering.kernel_halving(num_epochs=7, num_pairs=30)
    state = rule.init(key)
    for epoch in range(3):
        epoch_key = jax.random.fold_in(key, epoch)
        coins = [
            float(jax.random.uniform(jax.random.fold_in(epoch_key, i), minval=-1.0, maxval=1.0))
            for i in range(30)
        ]
        sign = reference.halving_sign(7, 30, 0.5, epoch, coins)
        expected, _ = reference.balance(vectors, np.zeros(5), sign)
        state, _, signs, _ = signs_of(vectors, block_size, rule, state)
        np.testing.assert_array_equal(signs, expected)
        state = rule.next_epoch(state)


@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_vectors_that_are_not_finite_are_left_out(block_size, bad):
    vectors = tables.whole_numbers((12, 40), high=5)
    vectors[[3, 7], [0, 39]] = bad
    expected, expected_total = reference.balance(vectors, np.zeros(40))
    _, total, signs, taken = signs_of(vectors, block_size)
    np.testing.assert_array_equal(signs, expected)
    np.testing.assert_array_equal(total, expected_total)
    assert np.flatnonzero(~np.asarray(taken)).tolist() == [3, 7]


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_vectors_that_are_not_valid_are_left_out(block_size):
    vectors = tables.whole_numbers((9, 6))
    valid = np.arange(9) != 4
    expected, total = reference.balance(vectors[valid], np.zeros(6))
    _, found, signs, _ = signs_of(vectors, block_size, valid=jnp.asarray(valid))
    np.testing.assert_array_equal(np.asarray(signs)[valid], expected)
    np.testing.assert_array_equal(found, total)
    assert signs[4] == 1.0


def test_seam_without_gradients_equals_the_blocks():
    """Derived rows by linear algebra (no tree) equal derived rows from the gradients."""
    stacked = ordering.Rows.of({"a": jnp.asarray(tables.whole_numbers((7, 3)))})
    bare = stacked._replace(tree=None)
    vector, weights = {"a": jnp.array([1.0, -2.0, 3.0])}, jnp.arange(7.0)
    mean = {"a": jnp.array([1.0, 0.0, -1.0])}
    for derive, n in ((ordering.rows.differences, 3), (lambda r: ordering.rows.centre(r, mean), 7)):
        one, other = derive(stacked), derive(bare)
        assert one.size == other.size == n
        np.testing.assert_array_equal(one.dot(vector), other.dot(vector))
        np.testing.assert_array_equal(one.gram(), other.gram())
        np.testing.assert_array_equal(
            one.combine(weights[:n])["a"], other.combine(weights[:n])["a"]
        )


@pytest.mark.parametrize("name", tables.RULES)
def test_rules_keep_their_state_and_do_not_recompile(name, key):
    rule = tables.RULES[name]()
    state = rule.init(key)
    vectors = jnp.asarray(tables.whole_numbers((8, 4)))
    run = jax.jit(lambda s: signs_of(vectors, 4, rule, s)[0])
    after = rule.next_epoch(run(state))
    run(after)
    assert run._cache_size() == 1
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert set(np.unique(signs_of(vectors, 4, rule, state)[2])) <= {-1.0, 1.0}
