"""Sketches, of formed gradients and of products: unbiased, accurate, read once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from benchmarks.sketch_errors import KINDS, errors_of
from ordering.gradients.examples import group_loss
from tests import tables
from tests.cases import mostly_slow
from tests.sketched import close, sketch_of

SKETCH_KEY, RNG = jax.random.key(7), np.random.default_rng(0)

SHAPES = [
    ((7_001,), 64),
    ((300, 40), 64),
    ((41, 900), 1000),
    ((3, 3_000), 64),
    ((90, 12, 64), 128),
    ((70, 3, 50), 16),
    ((2, 3, 50, 80), 64),
    ((25, 1, 25), 3),
    ((40, 30), 1),
]


def sketch(key, tree, size):
    return jax.jit(ordering.make_sketch(key, size=size))(tree)


@pytest.mark.parametrize("shape,size", SHAPES)
def test_sketches_equal_the_equation(shape, size, monkeypatch):
    """Of vectors, matrices and others, and small ones; also as accelerators compute them."""
    tree = {"a": RNG.normal(size=3), "g": RNG.normal(size=shape), "z": RNG.normal(size=(2, 2))}
    tree = jax.tree.map(np.float32, tree)
    expected = sketch_of(tree, SKETCH_KEY, size=size)(tree)
    close(sketch(SKETCH_KEY, tree, size), expected)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))
    close(sketch(jax.random.clone(SKETCH_KEY), tree, size), expected)


OF_ERRORS = {
    "768x1000": (768, 1000),
    "512x256": (512, 256),
    "512x1024": (512, 1024),
    "64x4096": (64, 4096),
    "1024x512": (1024, 512),
    "a vector": (20_000,),
    "a kernel": (3, 3, 64, 48),
}


@pytest.mark.parametrize("name", mostly_slow(OF_ERRORS, quick=("768x1000", "512x256")))
def test_sketches_of_structured_gradients_are_as_accurate_as_promised(name):
    """Unbiased, and within twice the error of gradients without structure."""
    for kind in KINDS:
        norms, products, cosine = errors_of(kind, OF_ERRORS[name], size=1024, keys=48)
        spread = np.std(norms) / np.sqrt(norms.size)
        assert abs(np.mean(norms)) < 4 * spread + 1e-5, kind
        assert np.sqrt(np.mean(norms**2)) < 2 * 0.049, kind
        assert np.sqrt(np.mean(products**2)) < 2 * 0.035 * np.sqrt(1 + cosine**2), kind


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


def language(w, texts, mask):
    x = w["table"][texts[:, :-1]]
    x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
    logits = jax.nn.log_softmax((x @ w["out"]).astype(jnp.float32))
    entropy = -jnp.take_along_axis(logits, texts[:, 1:, None], 2)[..., 0]
    return (entropy * mask).sum(1) / mask.sum(1)


def test_a_sketch_follows_key_model_and_size_alone():
    """Not how far a text is padded, nor the number of texts, nor groups, nor the precision."""
    shapes = {"table": (80, 32), "up": (32, 64), "down": (64, 32), "out": (32, 80)}
    w = {name: np.float32(0.3 * RNG.normal(size=shape)) for name, shape in shapes.items()}
    texts, size = RNG.integers(0, 80, (4, 5)), 128

    def rows(length=5, units=4, dtype=np.float32, loss=language, group=False):
        mask = np.zeros((units, length - 1), np.float32)
        mask[:, :4] = 1
        batch = np.pad(texts[:units], ((0, 0), (0, length - 5))), mask
        batch = [x[:, None] for x in batch] if group else batch
        loss = group_loss(loss) if group else loss
        sketched = ordering.sketched_grads(loss, jax.random.clone(SKETCH_KEY), size=size)
        return jax.jit(sketched)(jax.tree.map(lambda x: jnp.asarray(x, dtype), w), *batch)[2]

    def formed(dtype):
        of_type = jax.tree.map(lambda x: jnp.asarray(x, dtype), w)
        gradients = jax.jit(ordering.per_example_grads(language))(of_type, texts, np.ones((4, 4)))
        return jax.vmap(sketch_of(w, SKETCH_KEY, size=size))(gradients[2])

    close(rows(), formed(np.float32))
    others = [dict(length=n) for n in (6, 9, 17, 33, 65, 129)]
    others += [dict(units=1), dict(units=3), dict(group=True), dict(dtype=jnp.bfloat16)]
    for other in others:
        actual = np.asarray(rows(**other), np.float64)
        near = np.asarray(formed(other.get("dtype", np.float32)))[: len(actual)]
        norms = np.linalg.norm(actual, axis=1) * np.linalg.norm(near, axis=1)
        assert np.min(np.sum(actual * near, 1) / norms) > 0.999, other
