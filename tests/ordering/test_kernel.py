"""The kernel equals the float64 reference: every rule, block size, structure and dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.signs import BLOCK, Greedy, balance_blocks, block_size_of
from ordering.trees import split_pairs, subtract
from tests import reference, tables

BLOCKS = (1, 4, 5, 64)  # a scan, whole blocks, a shorter last block, one block


def signs_of(vectors, block_size, rule=None, state=(), **options):
    run = functools.partial(balance_blocks, rule or Greedy(), block_size=block_size)
    return jax.jit(run)(state, jnp.zeros(vectors.shape[1:]), jnp.asarray(vectors), **options)


@pytest.mark.parametrize("block_size", BLOCKS)
def test_blocks_equal_the_reference_exactly(block_size):
    """Whole numbers, with ties; some vectors are not valid or not finite."""
    vectors = tables.whole_numbers((12, 1001), seed=1, high=6)
    vectors[[0, 8, 11]] = 0
    vectors[[3, 5, 7], [0, 100, 1000]] = np.nan, np.inf, -np.inf
    valid = np.arange(12) != 9
    expected, total = reference.balance(vectors[valid], np.zeros(1001))
    _, running_sum, signs, taken = signs_of(vectors, block_size, valid=jnp.asarray(valid))
    np.testing.assert_array_equal(np.asarray(signs)[valid], expected)
    np.testing.assert_array_equal(running_sum, total)
    assert np.flatnonzero(~np.asarray(taken)).tolist() == [3, 5, 7, 9]
    assert (np.asarray(signs)[[3, 5, 7, 9]] == 1).all()


@pytest.mark.parametrize("block_size", [1, 4])
def test_any_structure_and_bfloat16(block_size):
    """Whole numbers up to 256 are exact in bfloat16; sums beyond that need the float32 sum."""
    flat = tables.whole_numbers((20, 2 * 3 + 5 + 1), high=200)
    tree = {"w": flat[:, :6].reshape(20, 2, 3), "b": [flat[:, 6:11], flat[:, 11]]}
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)
    total = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), tree)
    pairs = jax.tree.map(lambda g: split_pairs(g, 10), tree)
    run = functools.partial(balance_blocks, Greedy(), block_size=block_size)
    derive = functools.partial(jax.tree.map, subtract)
    _, sums, signs, _ = jax.jit(functools.partial(run, derive=derive))((), total, pairs)
    expected, expected_total = reference.balance(flat[0::2] - flat[1::2], np.zeros(12))
    np.testing.assert_array_equal(signs, expected)
    np.testing.assert_array_equal(
        np.concatenate([sums["w"].ravel(), sums["b"][0], [sums["b"][1]]]), expected_total
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(sums))


@pytest.mark.parametrize("rule", ["walk", "halving"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_random_rules_equal_the_reference(block_size, rule, key):
    vectors = tables.whole_numbers((30, 5), high=3)
    vectors[4] = 0
    rows = np.insert(vectors, [2, 9], np.nan, axis=0)  # which use no coin
    made = {
        "walk": ordering.baselines.self_balancing_walk(bound=40.0),
        "halving": ordering.baselines.kernel_halving(num_epochs=7, num_pairs=30),
    }[rule]
    state = made.init(key)
    run = jax.jit(lambda state: signs_of(rows, block_size, made, state))
    for epoch in range(3):
        if rule == "walk":  # each coin is used once, also across epochs
            keys, low = [jax.random.fold_in(key, 30 * epoch + i) for i in range(30)], 0.0
        else:
            keys, low = [], -1.0
            for i in range(30):
                keys.append(jax.random.fold_in(jax.random.fold_in(key, epoch), i))
        coins = [float(jax.random.uniform(each, minval=low)) for each in keys]
        sign = reference.walk_sign(40.0, coins)
        if rule == "halving":
            sign = reference.halving_sign(7, 30, 0.5, epoch, coins)
        expected, _ = reference.balance(vectors, np.zeros(5), sign)
        state, _, signs, taken = run(state)
        np.testing.assert_array_equal(signs[taken], expected)
        state = made.next_epoch(state)
    assert run._cache_size() == 1, "rules keep the structure and types of their state"


def test_a_norm_that_overflows_does_not_affect_later_vectors(key):
    """Kernel halving leaves its scale as it was."""
    rule = ordering.baselines.kernel_halving(num_epochs=2, num_pairs=8)
    vectors = tables.whole_numbers((8, 3), high=3) * np.float32(1e-3)
    vectors[0] = 1e25, 0, 0
    vectors[1:, 0] = 0
    state, _, signs, _ = signs_of(vectors, 1, rule, rule.init(key))
    assert np.isfinite(state.scale) and state.scale > 0 and np.isfinite(signs).all()


def test_vectors_are_signed_in_blocks_if_products_are_summed_over_devices():
    """Simulated workers on a CPU use the plain scan; a mesh uses one sum for a whole block."""
    totals = []

    def worker(x):
        totals.append(block_size_of(("worker",)))
        return x

    jax.vmap(worker, axis_name="worker")(jnp.zeros((2, 1)))
    tables.shard_map_workers(worker)(jnp.zeros((8, 1)))
    assert totals == [1, BLOCK]
    order = ordering.cd_grab(8, units_per_step=4)
    keys = jax.random.split(jax.random.key(0), 8)
    state = tables.vmap_workers(lambda key: order.init(key, jnp.zeros(3)))(keys)
    observe = lambda state, g: order.observe(state, g)  # noqa: E731
    program = jax.jit(tables.shard_map_workers(observe)).lower(state, jnp.zeros((8, 4, 3)))
    assert program.as_text().count('"stablehlo.all_reduce"') == 1, "of all 16 pairs"
