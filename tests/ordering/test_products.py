"""The projection of products in the backward pass: unbiased, and equal to its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.sketches.linear import grouped_sums, hash_signs, table_of_sums
from tests import reference

SKETCH_KEY, RNG = jax.random.key(7), np.random.default_rng(0)


def outer_products(w, batch, key):
    """A loss whose gradients are x y^T, summed over the rows of x and y."""
    return jnp.sum((batch["x"] @ w) * batch["y"], (1, 2))


RANKS = {"one example of an MLP": 1, "a few words": 8, "a text": 256}


@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS)
def test_inner_products_are_unbiased_whatever_the_rank_and_nearly_as_accurate(rank):
    """E s_i . s_j = G_i . G_j over keys, with at most six times the variance of `sketch`."""
    rng, size, keys = np.random.default_rng(3), 256, 200
    x, y = (rng.normal(size=(2, rank, n)).astype(np.float32) for n in (300, 200))
    w, batch = jnp.zeros((300, 200)), {"x": x, "y": y}

    def rows(key):
        sketched = ordering.sketched(outer_products, key, size=size)
        return sketched(w, batch, jax.random.key(0))[2].tree

    found = jax.jit(jax.vmap(rows))(jax.random.split(SKETCH_KEY, keys))
    formed = np.einsum("nta,ntb->nab", batch["x"], y).reshape(2, -1)
    norms = np.linalg.norm(formed, axis=1)
    error = np.einsum("kia,kja->kij", found, found) - formed @ formed.T
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
        return ordering.sketched(loss, key, size=size)(table, batch, jax.random.key(0))[2].tree

    found = jax.jit(jax.vmap(rows))(jax.random.split(SKETCH_KEY, keys))
    formed = np.einsum("nv,ntc->nvc", batch["errors"], batch["features"]).reshape(2, -1)
    exact, norms = formed @ formed.T, np.linalg.norm(formed, axis=1)
    error = (np.einsum("kia,kja->kij", found, found) - exact) / np.outer(norms, norms)
    assert np.mean(np.square(error[:, 0, 1])) < 6 / size


@pytest.mark.parametrize("length, sums, groups", [(7, 1, 4), (50, 3, 8), (300, 2, 64), (90, 5, 1)])
def test_sums_of_groups_equal_the_reference(length, sums, groups, monkeypatch):
    """Also as an accelerator computes them; and their products a TensorSketch of outer products."""
    x, y = (RNG.normal(size=(3, n)).astype(np.float32) for n in (length, 20))
    left, right = (hash_signs(jnp.uint32(n.shape[1]), jnp.arange(n.shape[1])) for n in (x, y))
    of_x = grouped_sums(x, left, sums, groups)
    expected = np.einsum(
        "tk,kpm->tpm", x * np.asarray(left), reference.group_signs(length, sums, groups)
    )
    np.testing.assert_allclose(of_x, expected, atol=1e-4)
    np.testing.assert_allclose(
        table_of_sums(left, sums, groups).reshape(length, sums, groups),
        grouped_sums(jnp.eye(length), left, sums, groups),
    )
    of_y = grouped_sums(y, right, sums, groups)
    found = np.einsum("tpm,tqm->pqm", of_x, of_y) / np.sqrt(groups)
    met = reference.product_sketch(x.T @ y, left, right, (groups, sums, sums))
    np.testing.assert_allclose(found, met, atol=1e-3)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    np.testing.assert_allclose(grouped_sums(x, left, sums, groups), of_x, atol=1e-4)
