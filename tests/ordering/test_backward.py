"""Sketches from the backward pass equal those of formed gradients, for any library's loss."""

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

import models
import ordering
from ordering.gradients.examples import group_loss
from ordering.gradients.interpret import Handler, interpret
from ordering.gradients.rules import RULES
from tests.cases import mostly_slow
from tests.sketched import (
    KEY,
    SKETCH_KEY,
    assert_sketched,
    close,
    parts_of,
    scale_like,
    sketch_of,
)

N = 3
RNG = np.random.default_rng(0)


def images(*shape):
    return {"x": RNG.normal(size=(N, *shape)).astype(np.float32), "y": np.arange(N, dtype=np.int32)}


def tokens(length=12, words=48):
    x, y = RNG.integers(0, words, (2, N, length)).astype(np.int32)
    return {"x": x, "y": y}


MODELS = {
    "mlp": (lambda: models.mlp(num_features=64, num_classes=10), images(64)),
    "gpt2": (
        lambda: models.gpt2(vocab_size=48, context=16, width=32, depth=1, heads=2),
        tokens(),
    ),
    "lstm": (lambda: models.lstm(vocab_size=48, width=32), tokens()),
    # Depthwise convolutions, and losses that mix the examples of a unit.
    "mobilenet_v2": (
        lambda: models.mobilenet_v2(num_classes=4, stages=((1, 8, 1, 1), (4, 16, 2, 2))),
        {"x": images(4, 32, 32, 3)["x"], "y": RNG.integers(0, 4, (N, 4)).astype(np.int32)},
    ),
}
# The others take seconds to compile; the tests below have their parts.
QUICK = ("mlp",)


def sketched_by(loss, params, batch):
    return jax.jit(parts_of(ordering.sketched_grads(loss, SKETCH_KEY, size=64)))(params, batch)


@pytest.mark.parametrize("name", mostly_slow(MODELS, quick=QUICK))
def test_sketches_of_every_model_equal_those_of_formed_gradients(name):
    make, batch = MODELS[name]
    model = make()
    loss = group_loss(model.loss) if batch["x"].ndim == 5 else model.loss
    assert_sketched(loss, model.init(jax.random.key(0)), batch)


def layered(params, batch, key):
    """What libraries do with parameters, and some uses that are not supported."""
    x = batch["x"] @ params["first"] + params["table"][batch["i"]]
    x = jnp.einsum("nd,dhk->nhk", x, params["heads"])
    x = jnp.einsum("nhk,hkd->nd", x, params["project"])
    x = x + jax.checkpoint(lambda w, x: jnp.sin(x @ w))(params["remat"], x)
    x = x + jax.jit(lambda w, x: jnp.tanh(x @ w.T))(params["jit"], x)
    x = x + x @ params["squared"] ** 2  # not a product with the parameter itself
    x = x + jnp.split(x @ params["sliced"][:, :16], 2, -1)[0] @ params["sliced"][:8]
    x = jax.lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: x - x @ w, params["branch"])
    step = lambda x, _: (jnp.tanh(x @ params["recurrent"]), None)  # noqa: E731
    x = jax.lax.scan(step, x, None, length=3)[0]
    return jnp.sum(jnp.square(x), -1)


def layered_params():
    shapes = {
        "first": (20, 24),
        "heads": (24, 2, 12),
        "project": (2, 12, 24),
        "remat": (24, 24),
        "jit": (24, 24),
        "squared": (24, 24),
        "sliced": (24, 24),
        "branch": (24, 24),
        "recurrent": (24, 24),
        "unused": (24, 24),
        "table": (30, 24),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: 0.2 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def layered_batch(*shape):
    return {"x": RNG.normal(size=(*shape, 20)).astype(np.float32), "i": RNG.integers(0, 30, shape)}


def test_gradients_of_unsupported_uses_are_formed_and_listed():
    params, batch = layered_params(), layered_batch(N)
    plan = ordering.sketch_plan(layered, params, batch, key=KEY, size=64)
    how = {leaf.name[2:-2]: (leaf.how, leaf.why) for leaf in plan}
    names = {"first", "heads", "project", "remat", "jit", "recurrent", "table", "sliced"}
    assert {name for name, (kind, _) in how.items() if kind == "sketched"} == names
    assert how["squared"] == ("copied", "integer_pow")
    assert how["branch"] == ("copied", "cond")
    assert how["unused"] == ("shared", "unused")
    assert_sketched(layered, params, batch, scale=scale_like(params, plan))


def test_parameters_without_numbers_change_no_sketch():
    """Alone in a loss, and beside others."""
    x, w = np.ones((N, 20), np.float32), jnp.ones((20, 24))
    plain = lambda p, b, key: jnp.square(b @ p["w"]).sum(-1)  # noqa: E731
    loss = lambda p, b, key: plain(p, b, key) + (b[:, :0] @ p["e"] + p["e"].sum()).sum(-1)  # noqa: E731
    both = sketched_by(loss, {"w": w, "e": w[:0]}, x)
    alone = sketched_by(plain, {"w": w}, x)
    assert both[1]["e"].shape == (0, 24)
    close((both[1]["w"], both[0]), (alone[1]["w"], alone[0]))
    norms = np.linalg.norm(both[2], axis=1) / np.linalg.norm(alone[2], axis=1)
    np.testing.assert_allclose(norms, norms[0], rtol=1e-5)


def test_under_vmap_over_workers_and_with_a_large_sketch():
    """Small parameters are formed; every worker has its own model."""
    params, batch = layered_params(), layered_batch(2, N)
    run = parts_of(ordering.sketched_grads(layered, SKETCH_KEY, size=1024))
    first = jax.tree.map(lambda x: x[0], batch)
    expected = assert_sketched(layered, params, first, size=1024)
    stacked = jax.tree.map(lambda p: jnp.stack([p, p]), params)
    each = jax.jit(jax.vmap(run))(stacked, batch)
    close(jax.tree.map(lambda x: x[0], each), expected)


@pytest.mark.parametrize("in_turn", [False, True])
def test_under_shard_map_with_and_without_checked_types(in_turn):
    model, batch = MODELS["mlp"][0](), MODELS["mlp"][1]
    params, results, spec = model.init(jax.random.key(0)), [], jax.P("worker")
    mesh = jax.make_mesh(
        (N,), ("worker",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:N]
    )
    maker = ordering.sketched_grads(model.loss, SKETCH_KEY, size=64)
    if in_turn:
        to_sketch = ordering.make_sketch(SKETCH_KEY, size=64)
        maker = ordering.per_example_grads(model.loss, to_sketch=to_sketch, in_turn=True)
    of_one = parts_of(maker)
    for checked in (False, True):

        def run(params, batch, checked=checked):
            if checked:  # else the gradient is added up over the workers
                params = jax.lax.pcast(params, "worker", to="varying")
            losses, mean, rows = of_one(params, batch)
            return losses, jax.lax.pmean(mean, "worker"), rows

        mapped = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(jax.P(), spec),
            out_specs=(spec, jax.P(), spec),
            check_vma=checked,
        )
        results.append(jax.jit(mapped)(params, batch))
    close(*results)
    close(results[0][1], jax.jit(of_one)(params, batch)[1])


def test_bfloat16_products_have_float32_sketches():
    def loss(w, batch, key):
        return jnp.sum(jnp.tanh(batch.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)), -1)

    w, batch = (RNG.normal(size=shape).astype(np.float32) for shape in ((60, 50), (N, 60)))
    _, mean, rows = sketched_by(loss, w, batch)
    assert mean.dtype == rows.dtype == jnp.float32
    formed = jax.jit(parts_of(ordering.per_example_grads(loss)))(w, batch)[2]
    expected = jax.jit(jax.vmap(sketch_of(w, SKETCH_KEY, size=64)))(formed)
    assert np.linalg.norm(rows - expected) < 0.02 * np.linalg.norm(expected)


LOOK_UPS = {
    "labels": lambda x, i: jnp.take_along_axis(x, i, axis=-1),
    "a middle axis": lambda x, i: jnp.take_along_axis(x, i, axis=1),
    "the first axis": lambda x, i: jnp.take(x, i[0, :, 0] * 0, axis=0),
    "an axis of size 1 last": lambda x, i: jnp.take_along_axis(x[..., :1], i * 0, axis=-1),
    "rows": lambda x, i: x[0, i[0, :, 0]],
}


@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_in_data_have_no_axis_of_size_one(name):
    """With one, a TPU scatters in the backward pass of a loss of labels, and keeps all of it."""
    x, i = jnp.arange(20.0).reshape(1, 4, 5), jnp.array([[[3], [0], [2], [1]]])
    closed = jax.make_jaxpr(LOOK_UPS[name])(x, i)
    run = lambda x, i: interpret(closed, (), (x, i), Handler(RULES))[0]  # noqa: E731
    np.testing.assert_array_equal(jax.jit(run)(x, i), LOOK_UPS[name](x, i))
    for equation in equations(jax.make_jaxpr(run)(x, i).jaxpr):
        if equation.primitive.name == "gather":
            sizes = equation.outvars[0].aval.shape
            axes = equation.params["dimension_numbers"].offset_dims
            assert all(sizes[axis] > 1 for axis in axes), equation


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        if "jaxpr" in equation.params:
            yield from equations(equation.params["jaxpr"].jaxpr)
