"""Losses, mean gradients and rows equal those of a plain gradient."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
import ordering
from ordering.sketches.scale import Factors

MODELS = {
    "softmax": (lambda: models.softmax_regression(num_features=6, num_classes=3, l2=0.1), (6,)),
    "mlp": (lambda: models.mlp(num_features=64, hidden=(32, 8), num_classes=3), (64,)),
}


SMALL = ordering.make_sketch(jax.random.key(1), size=64)


def problem(name, size=6):
    make, shape = MODELS[name]
    model = make()
    rng = np.random.default_rng(0)
    batch = {
        "x": jnp.asarray(rng.normal(size=(size, *shape)).astype(np.float32)),
        "y": jnp.asarray(rng.integers(0, 2, size).astype(np.int32)),
    }
    params = jax.tree.map(lambda p: p + 0.01, model.init(jax.random.key(0)))
    return model, params, batch


def plain(model, params, batch, key):
    value_and_grad = jax.value_and_grad(lambda p: jnp.mean(model.loss(p, batch, key)))
    return jax.jit(value_and_grad)(params)


def compiled(gradients, params, batch, key):
    """Losses, mean gradient and rows."""
    return jax.jit(gradients)(params, batch, key)


def close(left, right):
    """Equal to float32 rounding of the largest entry of each leaf."""

    def leaf(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(b))))

    jax.tree.map(leaf, left, right)


@pytest.mark.parametrize("name", MODELS)
def test_means_and_rows_are_gradients_of_the_batch_and_of_its_units(name, key):
    model, params, batch = problem(name)
    loss, expected = plain(model, params, batch, key)
    losses, mean, rows = compiled(ordering.per_example_grads(model.loss), params, batch, key)
    np.testing.assert_allclose(losses.mean(), loss, rtol=1e-5)
    close(mean, expected)
    one = plain(model, params, jax.tree.map(lambda x: x[2:3], batch), key)[1]
    close(jax.tree.map(lambda g: g[2], rows), one)
    losses, mean, rows = compiled(ordering.microbatch_grads(model.loss), params, batch, key)
    np.testing.assert_allclose(losses, [loss], rtol=1e-6)
    close(mean, expected)
    close(rows, jax.tree.map(lambda g: g[None], mean))


def test_sketches_in_turn_take_the_memory_of_one_gradient(optimised, key):
    model = models.mlp(num_features=64, hidden=(512, 64), num_classes=3)
    params, batch = model.init(jax.random.key(0)), problem("mlp", size=32)[2]
    gradient = 4 * ordering.trees.tree_size(params)

    def temporary(in_turn):
        gradients = ordering.per_example_grads(model.loss, to_sketch=SMALL, in_turn=in_turn)
        run = jax.jit(lambda *args: (gradients(*args)[1], gradients(*args)[2]))
        program = run.lower(params, batch, key).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(False) > 32 * gradient
    assert temporary(True) < 3 * gradient


MIXED = {
    "what comes before": lambda losses: jnp.cumsum(losses),
    "the largest": lambda losses: losses + losses.max(),
    "the number": lambda losses: losses * len(losses),
    "the last, doubled": lambda losses: losses.at[-1].multiply(len(losses)),
}


@pytest.mark.parametrize("name", MIXED)
def test_losses_that_mix_examples_are_told(name, key):
    """As batch normalisation does."""
    model, params, batch = problem("mlp", size=3)
    ordering.check_separable(model.loss, params, batch, key)
    loss = lambda p, b: MIXED[name](model.loss(p, b, key))  # noqa: E731
    with pytest.raises(ValueError, match="the model mixes the examples"):
        ordering.check_separable(loss, params, batch)


@jax.custom_vjp
def clip_gradient(bound, x):
    return x


clip_gradient.defvjp(lambda bound, x: (x, bound), lambda bound, g: (None, g.clip(-bound, bound)))

NOT_LINEAR = {
    "data": lambda w, x: jnp.square(clip_gradient(0.3, x @ w)),
    "parameters": lambda w, x: jnp.square(x @ clip_gradient(5.0, w)),
    "both": lambda w, x: jnp.square(clip_gradient(0.3, x @ clip_gradient(2.0, w))),
    "in a loop": lambda w, x: jax.lax.fori_loop(
        0, 2, lambda _, y: clip_gradient(0.3, y * 1.5), x @ w
    ),
    "a sign": lambda w, x: jnp.square(straight_through(x @ w)),
    "a penalty": lambda w, x: x @ w + clip_gradient(0.2, jnp.square(w)).sum(),
}


@jax.custom_vjp
def straight_through(x):
    return jnp.sign(x)


straight_through.defvjp(lambda x: (jnp.sign(x), x), lambda x, g: (jnp.sign(g) * (x < 1),))


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_mean_gradients_by_rules_that_are_not_linear_are_those_of_the_mean_loss(name, key):
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((90, 50), (5, 90)))
    loss = lambda w, x, key: NOT_LINEAR[name](w, x).sum(-1)  # noqa: E731
    makers = {
        "side by side": ordering.per_example_grads(loss),
        "in turn": ordering.per_example_grads(loss, in_turn=True),
        "small": ordering.sketched_grads(loss, jax.random.key(1), size=8192),
        "sketched": ordering.sketched_grads(loss, jax.random.key(1), size=64),
    }

    @jax.jit
    def run(w, x):
        mean = jax.grad(lambda w: loss(w, x, key).mean())(w)
        part = jax.grad(lambda w, x: loss(w, x, key).mean() / 5)  # of one example in the mean
        rows = 5 * jnp.stack([part(w, x[i : i + 1]) for i in range(5)])
        return mean, rows, {name: make(w, x, key)[1:] for name, make in makers.items()}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sketched copies")
        expected, rows, found = run(w, x)
    for maker, (mean, own) in found.items():
        close(mean, expected)
        if maker != "sketched":
            close(own.reshape(5, -1)[:, : w.size].reshape(rows.shape), rows)


def with_aux(model):
    """A loss that returns auxiliary data, such as correct answers or a layer's moments."""

    def loss(params, batch, key):
        losses = model.loss(params, batch, key)
        return losses, {"twice": 2 * losses, "count": jnp.float32(batch["y"].shape[0])}

    return loss


def whole_batch(model):
    return lambda params, batch, key: jnp.mean(model.loss(params, batch, key))


GROUP = 2
MAKERS = {
    "in turn": lambda loss, **aux: ordering.per_example_grads(loss, in_turn=True, **aux),
    "in turn, to sketches": lambda loss, **aux: ordering.per_example_grads(
        loss, to_sketch=SMALL, in_turn=True, **aux
    ),
    "per_example": lambda loss, **aux: ordering.per_example_grads(loss, **aux),
    "microbatch": lambda loss, **aux: ordering.microbatch_grads(loss, **aux),
    "sketched": lambda loss, **aux: ordering.sketched_grads(
        loss, jax.random.key(1), size=64, **aux
    ),
    "sketched whole": lambda loss, **aux: ordering.sketched_grads(loss, jax.random.key(1), **aux),
    "groups": lambda loss, **aux: ordering.per_example_grads(ordering.group_loss(loss, **aux),
    **aux), "sketched groups": lambda loss, **aux: ordering.sketched_grads(
        ordering.group_loss(loss, **aux), jax.random.key(1), size=64, **aux
    ),
}  # fmt: skip


@pytest.mark.parametrize("maker", MAKERS)
def test_a_loss_may_return_auxiliary_data_or_the_mean_of_its_batch(maker, key):
    model, params, batch = problem("mlp")
    if "groups" in maker:
        batch = jax.tree.map(lambda x: x.reshape(-1, GROUP, *x.shape[1:]), batch)
    make = MAKERS[maker]
    losses, mean, rows = compiled(make(model.loss), params, batch, key)
    (same, aux), *others = compiled(
        make(with_aux(model), has_aux=True), params, batch, jax.random.clone(key)
    )
    jax.tree.map(np.testing.assert_array_equal, (losses, mean, rows), (same, *others))
    if maker == "microbatch":
        assert aux["count"] == 6
        np.testing.assert_allclose(jnp.mean(aux["twice"]), 2 * losses[0], rtol=1e-6)
    else:
        units = 1 if "groups" not in maker else GROUP
        assert aux["count"].ravel().tolist() == [units] * len(losses)
        twice = aux["twice"].reshape(len(losses), -1).mean(1)
        np.testing.assert_allclose(twice, 2 * losses, rtol=1e-6)
    of_mean = compiled(make(whole_batch(model)), params, batch, jax.random.clone(key))
    close(of_mean, (losses, mean, rows))


@pytest.mark.parametrize("maker", MAKERS)
def test_gradients_keep_the_signature_name_and_docstring_of_the_loss(maker, key):
    def squares(weights, examples, key):
        """Half the squares."""
        return 0.5 * jnp.square(examples @ weights)

    gradients = MAKERS[maker](squares)
    more = ["scale"] if maker.startswith("sketched") else []
    assert [*inspect.signature(gradients).parameters] == ["weights", "examples", "key", *more]
    assert (gradients.__name__, gradients.__doc__) == ("squares", "Half the squares.")
    weights, examples = jnp.ones(128), jnp.ones((4, 2, 128) if "groups" in maker else (4, 128))
    expected = compiled(gradients, weights, examples, key)[1]
    mean = functools.wraps(gradients)(lambda *args, **named: gradients(*args, **named)[1])
    donating = jax.jit(mean, donate_argnames="weights")
    close(donating(weights=weights, examples=examples, key=jax.random.clone(key)), expected)
    assert weights.is_deleted()


@pytest.mark.parametrize("maker", MAKERS)
def test_a_loss_that_draws_nothing_takes_no_key(maker, key):
    w, x, one, rows = drawing_nothing()
    of_loss = rows.mean(0)
    if "groups" in maker:
        x, rows = x.reshape(-1, GROUP, 90), rows.reshape(-1, GROUP, 90, 8).mean(1)
    gradients, keyed = MAKERS[maker](one), MAKERS[maker](lambda w, x, key: one(w, x))
    losses, mean, found = jax.jit(lambda w, x: gradients(w, x))(w, x)
    same((losses, mean, found), jax.jit(lambda w, x, key: keyed(w, x, key))(w, x, key))
    close(mean, of_loss)
    if maker == "microbatch":
        same(found[0], mean)
    elif maker == "in turn, to sketches":
        close(found, jax.vmap(SMALL)(rows))
    elif not maker.startswith("sketched") or maker == "sketched whole":
        close(found.reshape(len(rows), -1)[:, : w.size].reshape(rows.shape), rows)
    if maker.startswith("sketched"):
        scale = Factors(jnp.full((90, 1), 2.0), jnp.ones((1, 8)))
        close(jax.jit(lambda w, x: gradients(w, x, scale=scale))(w, x)[2], 2 * found)
    with pytest.raises(ValueError, match=f"^with a key, {TAKES_NONE}"):
        gradients(w, x, key)
    with pytest.raises(ValueError, match=f"^without a key, {TAKES_ONE}"):
        keyed(w, x)


def test_checks_of_a_loss_that_draws_nothing_take_no_key(key):
    w, x, loss, _ = drawing_nothing()
    keyed = lambda w, x, key: loss(w, x)  # noqa: E731
    of_leaves = functools.partial(ordering.sketch_plan, size=64)
    assert of_leaves(loss, w, x) == of_leaves(keyed, w, x, key)
    for check in (of_leaves, ordering.check_separable):
        check(loss, params=w, batch=x)
        with pytest.raises(ValueError, match=f"^with a key, {TAKES_NONE}"):
            check(loss, w, x, key)
        with pytest.raises(ValueError, match=f"^without a key, {TAKES_ONE}"):
            check(keyed, w, x)


TAKES_NONE = r"the loss is <lambda>: pass a function of \(params, batch, key\)"
TAKES_ONE = r"the loss is <lambda>: pass a function of \(params, batch\)"
same = functools.partial(jax.tree.map, np.testing.assert_array_equal)


def drawing_nothing():
    """Parameters, examples, a loss of both, and the gradient of each example."""
    rng = np.random.default_rng(0)
    w, x = (rng.normal(size=shape).astype(np.float32) for shape in ((90, 8), (6, 90)))
    loss = lambda w, x: jnp.tanh(0.1 * x @ w).sum(-1)  # noqa: E731
    return w, x, loss, jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(w, x)
