"""Sketches, of formed gradients and of products: unbiased, accurate, read once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.gradients.linear import BLOCK, grouped_sums, hash_signs, table_of_sums
from ordering.gradients.linear import fold as fold_leaf
from tests import reference, tables

SEED = jnp.uint32(12345)
SKETCH_KEY, RNG = jax.random.key(7), np.random.default_rng(0)
fold = jax.jit(fold_leaf, static_argnums=2)
sums_of = jax.jit(grouped_sums, static_argnums=(2, 3))


SHAPES = [
    (7,),
    (300, 40),
    (41, 900),
    (3, 30_000),
    (70_000,),
    (40_960,),
    (90, 12, 64),
    (2, 3, 50, 800),
]
LARGE = [((41, 900), 1000), ((70_000,), 1000), ((7,), 20_000), ((90, 12, 64), 20_000)]


@pytest.mark.parametrize("shape,size", [*((shape, 64) for shape in SHAPES), *LARGE])
def test_fold_equals_the_reference(shape, size):
    """Leaves of one block and of many, with and without a shorter last one."""
    leaf = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    expected = reference.fold(leaf, int(SEED), size, max(BLOCK, size))
    np.testing.assert_allclose(fold(leaf, SEED, size), expected, atol=2e-5 * np.sqrt(leaf.size))


def test_accelerators_and_cpus_compute_the_same_sketch(monkeypatch):
    def first_default(*args, cpu, default):
        return default(*args)

    leaf = jax.random.normal(jax.random.key(0), (500, 90))
    on_cpu = fold(leaf, SEED, 128)
    monkeypatch.setattr(jax.lax, "platform_dependent", first_default)
    elsewhere = jax.jit(lambda leaf: fold_leaf(leaf, SEED, 128))(leaf)
    np.testing.assert_allclose(elsewhere, on_cpu, atol=1e-3)


KINDS = {
    "independent": lambda rng: rng.normal(size=(300, 200)),
    "rank one": lambda rng: np.abs(rng.normal(size=(300, 1))) @ rng.normal(size=(1, 200)),
    "few columns": lambda rng: rng.normal(size=(300, 200)) * (np.arange(200) < 20),
    "one block": lambda rng: rng.normal(size=(400,)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_inner_products_are_unbiased_and_as_accurate_as_promised(kind):
    """E <S g, S h> = <g, h> over keys, with variance at most 2 |g|^2 |h|^2 / k and a little."""
    rng, size, keys = np.random.default_rng(3), 128, 300
    g, h = (KINDS[kind](rng).astype(np.float32) for _ in range(2))
    seeds = jax.random.bits(jax.random.key(0), (keys,), jnp.uint32)
    both = jax.jit(jax.vmap(lambda s: jnp.vdot(fold(g, s, size), fold(h, s, size))))(seeds)
    norms = np.linalg.norm(g) * np.linalg.norm(h)
    error = (np.asarray(both, np.float64) - np.vdot(g, h)) / norms
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(keys)
    assert error.var() < 2.5 / size


def test_gradients_smaller_than_a_sketch_are_kept_and_give_the_same_orders():
    g = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(2)}
    result = ordering.make_sketch(jax.random.key(0), size=10)(g)
    assert result.tolist() == [1, 1, 0, 1, 2, 3, 4, 5, 0, 0]
    vectors = jax.random.normal(jax.random.key(1), (8, 20))
    order = ordering.pair_balance(8, units_per_step=2)
    to_sketch = ordering.make_sketch(jax.random.key(2), size=32)
    short = tables.with_methods(
        order,
        init=lambda self, key, params: order.init(key, jnp.zeros(32)),
        observe=lambda self, s, rows: order.observe(s, jax.vmap(to_sketch)(rows)),
    )
    exact, sketched = (tables.run_workers(o, vectors[None], 2) for o in (order, short))
    np.testing.assert_array_equal(exact, sketched)


def test_nothing_as_large_as_the_gradient_is_written(optimised):
    """On an accelerator one fusion reads the leaf; on a CPU blocks of it are added up."""
    leaf = jax.ShapeDtypeStruct((4000, 1000), jnp.float32)
    program = jax.jit(ordering.make_sketch(jax.random.key(0))).lower({"w": leaf}).compile()
    assert program.memory_analysis().temp_size_in_bytes < leaf.size / 4
    assert not re.search(r"= f32\[4000000\]\S* (copy|fusion)", program.as_text())


def outer_products(w, batch, key):
    """A loss whose gradients are x y^T, summed over the rows of x and y."""
    return jnp.sum((batch["x"] @ w) * batch["y"], (1, 2))


RANKS = {"one example of an MLP": 1, "a few words": 8, "a text": 256}


@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS)
def test_inner_products_are_unbiased_whatever_the_rank_and_nearly_as_accurate(rank):
    """E s_i . s_j = G_i . G_j over keys, with at most six times the variance of `make_sketch`."""
    rng, size, keys = np.random.default_rng(3), 256, 200
    x, y = (rng.normal(size=(2, rank, n)).astype(np.float32) for n in (300, 200))
    w, batch = jnp.zeros((300, 200)), {"x": x, "y": y}

    def rows(key):
        sketched = ordering.sketched_grads(outer_products, key, size=size)
        return sketched(w, batch, key=jax.random.key(0))[2]

    products = jax.jit(jax.vmap(rows))(jax.random.split(SKETCH_KEY, keys))
    formed = np.einsum("nta,ntb->nab", batch["x"], y).reshape(2, -1)
    norms = np.linalg.norm(formed, axis=1)
    error = np.einsum("kia,kja->kij", products, products) - formed @ formed.T
    error = (error / np.outer(norms, norms)).reshape(keys, -1)
    assert np.all(np.abs(error.mean(0)) < 4 * error.std(0) / np.sqrt(keys))
    assert np.all(error.var(0) < 6 * 2 / size)


def test_sketches_of_a_table_keep_how_frequent_its_rows_are():
    """All positions have about the same gradient, in which the first rows are the largest."""
    size, keys, frequent = 1024, 48, 1 / (1 + np.arange(2000.0))
    table = jnp.zeros((2000, 64))
    batch = {
        "features": np.float32(RNG.normal(size=(2, 1, 64)) + 0.01 * RNG.normal(size=(2, 64, 64))),
        "errors": np.float32(RNG.normal(size=(2, 2000)) * frequent),
    }

    def loss(w, batch, key):
        looked_up = w[jnp.zeros((len(batch["errors"]), 64), jnp.int32)]
        logits = (batch["features"] + looked_up) @ w.T
        return jnp.einsum("ntv,nv->n", logits, batch["errors"])

    def rows(key):
        return ordering.sketched_grads(loss, key, size=size)(table, batch, key=jax.random.key(0))[2]

    products = jax.jit(jax.vmap(rows))(jax.random.split(SKETCH_KEY, keys))
    formed = np.einsum("nv,ntc->nvc", batch["errors"], batch["features"]).reshape(2, -1)
    exact, norms = formed @ formed.T, np.linalg.norm(formed, axis=1)
    error = (np.einsum("kia,kja->kij", products, products) - exact) / np.outer(norms, norms)
    assert np.mean(np.square(error[:, 0, 1])) < 6 / size


@pytest.mark.parametrize("length, sums, groups", [(50, 3, 8), (300, 2, 128), (90, 5, 1)])
def test_sums_of_groups_equal_the_reference(length, sums, groups, monkeypatch):
    """Also as an accelerator computes them; and their products a TensorSketch of outer products."""
    x, y = (RNG.normal(size=(3, n)).astype(np.float32) for n in (length, 20))
    left, right = (
        np.asarray(hash_signs(jnp.uint32(n.shape[1]), jnp.arange(n.shape[1]))) for n in (x, y)
    )
    of_x = sums_of(x, left, sums, groups)
    expected = np.einsum("tk,kpm->tpm", x * left, reference.group_signs(length, sums, groups))
    np.testing.assert_allclose(of_x, expected, atol=1e-4)
    np.testing.assert_allclose(
        table_of_sums(left, sums, groups).reshape(length, sums, groups),
        sums_of(jnp.eye(length), left, sums, groups),
    )
    of_y = sums_of(y, right, sums, groups)
    actual = np.einsum("tpm,tqm->pqm", of_x, of_y) / np.sqrt(groups)
    product = reference.product_sketch(x.T @ y, left, right, (groups, sums, sums))
    np.testing.assert_allclose(actual, product, atol=1e-3)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    elsewhere = jax.jit(lambda x: grouped_sums(x, left, sums, groups))(x)
    np.testing.assert_allclose(elsewhere, of_x, atol=1e-4)
