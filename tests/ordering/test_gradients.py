"""Losses, mean gradients and rows equal those of a plain gradient."""

import functools
import warnings

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import batching

import models
import ordering
from ordering.gradients.scale import Factors
from tests.cases import mostly_slow
from tests.sketched import sketch_of

MODELS = {
    "softmax": (lambda: models.softmax_regression(num_features=6, num_classes=3, l2=0.1), (6,)),
    "mlp": (lambda: models.mlp(num_features=64, hidden=(32,), num_classes=3), (64,)),
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
    return jax.jit(gradients)(params, batch, key=key)


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
        run = jax.jit(lambda *args, key: gradients(*args, key=key)[1:])
        program = run.lower(params, batch, key=key).compile()
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
def test_losses_that_mix_examples_are_refused(name, key):
    """As batch normalisation does."""
    model, params, batch = problem("mlp", size=3)
    ordering.check_separable(model.loss, params, batch, key=key)
    loss = lambda p, b: MIXED[name](model.loss(p, b, key))  # noqa: E731
    with pytest.raises(ValueError, match="mixes"):
        ordering.check_separable(loss, params, batch)


def normal(x):
    return (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)


def entropy(logits, x):
    return -jax.nn.log_softmax(logits)[jnp.arange(len(x)), (x[:, 0] > 0).astype(int)]


def errors(p, x):
    return jnp.square(x @ p["in"]) * (x[:, :1] > 0)


NOT_SEPARABLE = {
    "a head of zeros": (
        lambda p, x: entropy(normal(x @ p["in"]) @ p["zero"], x),
        "example . .*mixes",
    ),
    "a branch of zero": (
        lambda p, x: entropy((x + p["zero"].sum() * normal(x)) @ p["in"], x),
        "example . .*mixes",
    ),
    "small losses": (lambda p, x: 1e-5 * entropy(normal(x @ p["in"]), x), "example . .*mixes"),
    "gradients alone": (
        lambda p, x: (
            p["zero"].sum() * x.sum(1)
            - jax.lax.stop_gradient(p["zero"].sum() * x.sum(1))
            + p["in"].sum() * x.mean()
            - jax.lax.stop_gradient(p["in"].sum() * x.mean())
            + x[:, 0]
        ),
        r"gradient of the loss for params\['in'\]",
    ),
    "a mean": (
        lambda p, x: entropy(normal(x @ p["in"]) @ p["zero"], x).mean(),
        "batch of 6.*mixes",
    ),
    "times by place": (
        lambda p, x: jnp.square(x @ p["in"] - (jnp.arange(len(x)) / len(x))[:, None]).mean(),
        "batch of 6.*places",
    ),
    "padding": (lambda p, x: entropy(x @ p["in"], x).sum() / (len(x) + 1), "batch of 6.*number"),
    "a sum": (lambda p, x: entropy(x @ p["in"], x).sum(), "their sum: return the mean"),
    "tokens of the batch": (
        lambda p, x: errors(p, x).sum() / (x[:, 0] > 0).sum(),
        "example . alone",
    ),
}


@pytest.mark.parametrize("name", NOT_SEPARABLE)
def test_losses_that_look_at_the_batch_are_refused_wherever_parameters_are(name):
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    params = {"in": jnp.ones((5, 3)) + jnp.arange(3.0)[None], "zero": jnp.zeros((3, 2))}
    loss, message = NOT_SEPARABLE[name]
    with pytest.raises(ValueError, match=message):
        ordering.check_separable(loss, params, x)


TREATED_ALONE = {
    "a mean": lambda p, x: entropy(x @ p["in"], x).mean(),
    "a mean, clipped": lambda p, x: errors(p, clip_gradient(0.1, x)).mean(),
    "clipped parameters": lambda p, x: x @ clip_gradient(0.1, p["in"][:, 0]),
    "bfloat16": lambda p, x: entropy((x.astype(jnp.bfloat16) @ p["in"].astype(jnp.bfloat16)), x),
    "at least one": lambda p, x: errors(p, x).sum(1) / jnp.maximum((x[:, :1] > 0).sum(1), 1),
    "exact fit": lambda p, x: errors(p, 0 * x).sum(1),
    "keys of examples": lambda p, x, keys: jax.vmap(jax.random.normal)(keys) * errors(p, x).sum(1),
}


@pytest.mark.parametrize("name", TREATED_ALONE)
def test_losses_that_treat_examples_alone_are_taken(name):
    x = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    keys = [jax.random.split(jax.random.key(0), 6)] if "keys" in name else []
    ordering.check_separable(TREATED_ALONE[name], {"in": jnp.ones((5, 3))}, x, *keys)


def test_a_batch_of_one_cannot_be_checked():
    with pytest.raises(ValueError, match="pass two or three"):
        ordering.check_separable(lambda w, x: x @ w, jnp.ones(5), jnp.ones((1, 5)))


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
    "a number": lambda w, x: x @ w * clip_gradient(0.05, jnp.square(w).mean()),
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
        return mean, rows, {name: make(w, x, key=key)[1:] for name, make in makers.items()}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sketched_grads copies")
        expected, rows, by_maker = run(w, x)
    for maker, (mean, rows_of_maker) in by_maker.items():
        close(mean, expected)
        if maker == "sketched":
            to_sketch = sketch_of(w, jax.random.key(1), size=64)
            close(rows_of_maker, jax.vmap(to_sketch)(rows))
        else:
            close(rows_of_maker.reshape(5, -1)[:, : w.size].reshape(rows.shape), rows)


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
    "groups": lambda loss, **aux: ordering.per_example_grads(
        ordering.group_loss(loss, **aux), **aux
    ),
    "sketched groups": lambda loss, **aux: ordering.sketched_grads(
        ordering.group_loss(loss, **aux), jax.random.key(1), size=64, **aux
    ),
}


OFTEN = ("in turn, to sketches", "per_example", "microbatch", "sketched groups")


@pytest.mark.parametrize("maker", mostly_slow(MAKERS, quick=OFTEN))
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


@pytest.mark.parametrize("maker", mostly_slow(MAKERS, quick=OFTEN))
def test_a_loss_that_draws_nothing_takes_no_key(maker, key):
    w, x, one, rows = drawing_nothing()
    of_loss = rows.mean(0)
    if "groups" in maker:
        x, rows = x.reshape(-1, GROUP, 90), rows.reshape(-1, GROUP, 90, 8).mean(1)
    gradients, keyed = MAKERS[maker](one), MAKERS[maker](lambda w, x, key: one(w, x))
    losses, mean, actual_rows = jax.jit(lambda w, x: gradients(w, x))(w, x)
    same((losses, mean, actual_rows), jax.jit(lambda w, x, key: keyed(w, x, key=key))(w, x, key))
    close(mean, of_loss)
    if maker == "microbatch":
        same(actual_rows[0], mean)
    elif maker == "in turn, to sketches":
        close(actual_rows, jax.vmap(SMALL)(rows))
    elif not maker.startswith("sketched") or maker == "sketched whole":
        close(actual_rows.reshape(len(rows), -1)[:, : w.size].reshape(rows.shape), rows)
    if maker.startswith("sketched"):
        scale = Factors(jnp.full((90, 1), 2.0), jnp.ones((1, 8)))
        close(jax.jit(lambda w, x: gradients(w, x, scale=scale))(w, x)[2], 2 * actual_rows)
    with pytest.raises(ValueError, match=f"^with a key, {TAKES_NONE}"):
        gradients(w, x, key=key)
    with pytest.raises(ValueError, match=f"^without a key, {TAKES_ONE}"):
        keyed(w, x)


def test_checks_of_a_loss_that_draws_nothing_take_no_key(key):
    w, x, loss, _ = drawing_nothing()
    keyed = lambda w, x, key: loss(w, x)  # noqa: E731
    of_leaves = functools.partial(ordering.sketch_plan, size=64)
    assert of_leaves(loss, w, x) == of_leaves(keyed, w, x, key=key)
    for check in (of_leaves, ordering.check_separable):
        check(loss, w, x)
        with pytest.raises(ValueError, match=f"^with a key, {TAKES_NONE}"):
            check(loss, w, x, key=key)
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


SEPARABLE = {
    "x and y": lambda w, x, y: jnp.square(x @ w - y),
    "trees": lambda w, x, y: jnp.square(x["x"] @ w - y["y"][0]),
    "a key": lambda w, x, y, key: jnp.square(x @ w - y) * jax.random.uniform(key),
    "a key by name": lambda w, x, y, *, key: jnp.square(x @ w - y) * jax.random.uniform(key),
}
OF_BATCHES = [name for name in MAKERS if "groups" not in name]


@pytest.mark.parametrize("name", SEPARABLE)
def test_a_loss_may_take_any_number_of_arguments(name, key):
    loss, rng = SEPARABLE[name], np.random.default_rng(0)
    w, x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((90,), (4, 90), (4,)))
    batch = ({"x": x}, {"y": (y,)}) if name == "trees" else (x, y)
    given = {"key": key} if "key" in name else {}
    ordering.check_separable(loss, w, *batch, **given)
    assert len(ordering.sketch_plan(loss, w, *batch, **given)) == 1
    for maker in OF_BATCHES if name == "a key by name" else ("per_example", "sketched"):
        run = jax.jit(MAKERS[maker](loss))
        _, mean, _ = run(w, *batch, **given)
        if not given:
            close(mean, jax.grad(lambda w: loss(w, *batch).mean())(w))
        groups = jax.tree.map(lambda v: v.reshape(2, 2, *v.shape[1:]), batch)
        of_groups = ordering.group_loss(loss)(w, *groups, **given)
        assert of_groups.shape == (2,)
        if not given:
            close(of_groups, loss(w, *batch).reshape(2, 2).mean(1))


WRONG_CALLS = {
    "the key as a batch": (
        lambda g, w, x, key: g(w, x, key),
        r"batch\[1\] is a key.*: pass it as key=",
    ),
    "one too many": (lambda g, w, x, key: g(w, x, x), r"a function of \(params, batch\[0\], batch"),
    "no batch": (lambda g, w, x, key: g(w), "the batch must be arrays"),
}


@pytest.mark.parametrize("call,message", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_calls_with_other_arguments_say_what_to_pass(call, message, key):
    loss = lambda w, x: x @ w  # noqa: E731
    with pytest.raises(ValueError, match=message):
        call(ordering.per_example_grads(loss), jnp.ones(3), jnp.ones((2, 3)), key)


def experts(w, x):
    """A mixture of experts: the first tokens go to one, the others to the other."""
    first = (x[..., 0] > 0).sum()
    sizes = jnp.stack([first, x[..., 0].size - first]).astype(jnp.int32)
    y = jax.lax.ragged_dot(x.reshape(-1, x.shape[-1]), w, sizes)
    return jnp.tanh(y).reshape(len(x), -1).sum(-1)


def test_what_jax_cannot_compute_side_by_side_is_refused_with_in_turn():
    w, x = jnp.ones((2, 40, 30)), jax.random.normal(jax.random.key(0), (3, 4, 40))
    for maker in ("per_example", "sketched"):
        with pytest.raises(ValueError, match="ragged_dot.*in_turn=True"):
            MAKERS[maker](experts)(w, x)
    _, mean, rows = MAKERS["in turn"](experts)(w, x)
    close(rows[1], jax.grad(lambda w: experts(w, x[1:2])[0])(w))
    close(rows.mean(0), mean)
    assert MAKERS["in turn, to sketches"](experts)(w, x)[2].shape == (3, 64)


def test_an_operation_without_a_derivative_is_refused_by_jax_itself():
    """In turn it has none either."""
    rounded = jax.extend.core.Primitive("rounded")
    rounded.def_abstract_eval(lambda x: x)
    batching.primitive_batchers[rounded] = lambda xs, axes: (rounded.bind(*xs), *axes)
    loss = lambda w, x: rounded.bind(x @ w).sum(-1)  # noqa: E731
    for maker in OF_BATCHES:
        with pytest.raises(NotImplementedError, match="Differentiation rule for 'rounded'"):
            MAKERS[maker](loss)(jnp.ones((90, 8)), jnp.ones((3, 90)))


def test_parameters_that_are_a_whole_model_are_refused_with_the_line_to_write():
    params = {"layers": [jnp.ones((90, 8)), jax.nn.relu]}
    for maker in OF_BATCHES:
        with pytest.raises(ValueError, match=r"params\['layers'\]\[1\] is a function.*partition"):
            MAKERS[maker](lambda w, x: x @ w)(params, jnp.ones((3, 90)))


@pytest.mark.parametrize("maker", OF_BATCHES)
def test_keys_are_used_once(maker):
    w, x = jnp.ones((90, 8)), jnp.ones((3, 90))
    loss = lambda w, x, key: jnp.square(clip_gradient(3.0, dropped(w, x, key))).sum(-1)  # noqa: E731
    with jax.debug_key_reuse(True):
        for gradients in (MAKERS[maker](loss), jax.jit(MAKERS[maker](loss))):
            gradients(w, x, key=jax.random.key(0))


@pytest.mark.parametrize("maker", OF_BATCHES)
def test_mean_gradients_in_float64_are_exact(maker):
    """They are what the optimizer applies, also beyond the range of float32."""
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        w, x = (jnp.asarray(rng.normal(size=s)) for s in ((90, 8), (6, 90)))
        loss = lambda w, x: 1e40 * jnp.tanh(0.1 * x @ w).sum(-1)  # noqa: E731
        mean = jax.jit(MAKERS[maker](loss))(w, x)[1]
        np.testing.assert_allclose(mean, jax.grad(lambda w: loss(w, x).mean())(w), rtol=1e-12)


def dropped(w, x, key):
    return (x * jax.random.bernoulli(key, 0.5, x.shape)) @ w


DRAWS = {
    "a key": (dropped, {"key": jax.random.key(0)}),
    "a key of its own": (lambda w, x: dropped(w, x, jax.random.key(1)), {}),
    "noise": (
        lambda w, x, key: x @ w + jax.random.normal(key, (len(x),)),
        {"key": jax.random.key(0)},
    ),
    "legacy": (lambda w, x: dropped(w, x, jax.random.PRNGKey(1)), {}),
}


@pytest.mark.parametrize("loss,given", DRAWS.values(), ids=DRAWS)
def test_a_mask_by_the_shape_of_the_batch_is_no_batch_norm(loss, given):
    w, x = jnp.ones(40), np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
    with pytest.raises(ValueError, match="key="):
        ordering.check_separable(loss, w, x, **given)


def test_auxiliary_data_are_those_of_batches_of_one_example():
    def loss(w, x):
        return x @ w, {"each": 2 * x @ w, "all": x.sum(), "rows": x}

    w, x = jnp.ones(100), jnp.ones((4, 100))
    for maker in ("per_example", "in turn", "sketched"):
        (_, aux), *_ = MAKERS[maker](loss, has_aux=True)(w, x)
        assert jax.tree.map(jnp.shape, aux) == {"each": (4, 1), "all": (4,), "rows": (4, 1, 100)}
