"""Orders of what the optimizer applies: scales from its state, scaled rows, scaled sketches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ordering
from ordering.gradients.linear import SketchLeaf
from ordering.gradients.scale import whole_scale
from tests import reference
from tests.cases import mostly_slow

KEY, SKETCH_KEY = jax.random.key(3), jax.random.key(7)
assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5)
RNG = np.random.default_rng(0)
PARAMS = {"b": jnp.ones(3), "w": jnp.ones((4, 3))}
FACTORED = [
    SketchLeaf("b", (3,), "formed", ""),
    SketchLeaf("w", (4, 3), "sketched", "", 0, (0,), (1,)),
]
ADAM, RMS = optax.adam(1e-3), optax.scale_by_rms()


def stepped(optimizer, params=PARAMS, steps=3):
    """(state, second moments of Adam) after a few random gradients."""
    state, adam = optimizer.init(params), ADAM.init(params)
    step = jax.jit(lambda g, s, a: (optimizer.update(g, s, params)[1], ADAM.update(g, a)[1]))
    for key in jax.random.split(jax.random.key(1), steps):
        keys = jax.tree.unflatten(
            jax.tree.structure(params), jax.random.split(key, len(jax.tree.leaves(params)))
        )
        grads = jax.tree.map(lambda k, p: jax.random.normal(k, p.shape), keys, params)
        state, adam = step(grads, state, adam)
    return state, [np.asarray(v, np.float64) for v in jax.tree.leaves(adam[0].nu)]


def scale_of(optimizer, state, params, **how):
    """`second_moment_scale` as one program."""
    of = functools.partial(ordering.second_moment_scale, optimizer, **how)
    return jax.jit(of)(state, params)


OPTIMIZERS = {
    "adam": ADAM,
    "injected": optax.inject_hyperparams(optax.adamw)(1e-3),
    "rms": optax.scale_by_rms(0.999),
    "partitioned": optax.partition(
        {"one": optax.adam(1e-3), "two": optax.adamw(1e-2)}, {"b": "one", "w": "two"}
    ),
    "two masks": optax.chain(
        optax.masked(optax.adam(1e-3), {"b": True, "w": False}),
        optax.masked(optax.adam(1e-3), {"b": False, "w": True}),
    ),
}


OFTEN = ("injected", "partitioned", "two masks")


@pytest.mark.parametrize("name", mostly_slow(OPTIMIZERS, quick=OFTEN))
def test_a_scale_equals_the_reference(name):
    state, moments = stepped(OPTIMIZERS[name])
    for power in (0.25, 0.5):
        actual = scale_of(OPTIMIZERS[name], state, PARAMS, eps=0.1, power=power)
        wanted = reference.scale(moments, 0.1, power)
        for mine, expected in zip(jax.tree.leaves(actual), wanted, strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5)
    factored = whole_scale(
        scale_of(OPTIMIZERS[name], state, PARAMS, leaves=FACTORED, eps=0.1),
        PARAMS,
    )
    mean = sum(v.sum() for v in moments) / sum(v.size for v in moments)
    np.testing.assert_allclose(factored["b"], actual["b"], rtol=1e-6)
    expected = reference.factored_scale(moments[1], mean, 0.1)
    np.testing.assert_allclose(factored["w"], expected, rtol=1e-5)


def test_a_scale_before_the_first_step_is_one():
    for leaves in (None, FACTORED):
        scale = scale_of(ADAM, ADAM.init(PARAMS), PARAMS, leaves=leaves)
        assert all((x == 1).all() for x in jax.tree.leaves(scale))


@pytest.mark.parametrize("value,leaves", [(np.nan, None), (np.inf, FACTORED)])
def test_a_scale_is_one_where_a_moment_is_not_finite(leaves, value):
    state = optax.ScaleByRmsState({"b": jnp.ones(PARAMS["b"].shape), "w": PARAMS["w"] ** 2})
    broken = state._replace(nu={**state.nu, "w": state.nu["w"].at[0].set(value)})
    assert any((x != 1).any() for x in jax.tree.leaves(scale_of(ADAM, state, PARAMS)))
    scale = scale_of(ADAM, broken, PARAMS, leaves=leaves)
    assert all((x == 1).all() for x in jax.tree.leaves(scale))


def test_parameters_without_numbers_change_no_scale():
    alone = jnp.array([1.0, 4.0, 9.0])
    both = {"empty": jnp.ones((0, 2)), "w": alone}
    scale = scale_of(RMS, optax.ScaleByRmsState(both), both)
    assert_close(scale["w"], scale_of(RMS, optax.ScaleByRmsState(alone), alone))


def test_parameters_may_be_called_like_the_moment():
    params = {"nu": {"w": jnp.ones(3)}, "w": jnp.ones(3)}
    state, moments = stepped(ADAM, params)
    result = jax.tree.leaves(scale_of(ADAM, state, params, eps=0.1))
    jax.tree.map(assert_close, result, reference.scale(moments, 0.1))


def test_rows_of_a_look_up_table_get_equal_scales():
    """As if all had its mean, also where it is used as the transposed table first."""
    table = jnp.ones((90, 70))

    def loss(w, x, key):
        return jnp.square(jnp.square(x["features"] @ w.T) @ w + w[x["token"]]).sum(-1)

    batch = {"features": jnp.ones((3, 70)), "token": jnp.arange(3)}
    leaves = ordering.sketch_plan(loss, table, batch, key=jax.random.clone(KEY), size=64)
    assert (leaves[0].why, leaves[0].rows) == ("product, look-up", (0,))
    v = RNG.uniform(0.01, 4, size=table.shape).astype(np.float32)
    actual = scale_of(RMS, optax.ScaleByRmsState(v), table, leaves=leaves, eps=0.1)
    expected = reference.factored_scale(np.tile(v.mean(0), (90, 1)), v.mean(), 0.1)
    np.testing.assert_allclose(whole_scale(actual, table), expected, rtol=1e-5)
    gradients = ordering.sketched_grads(loss, SKETCH_KEY, size=64)
    rows = jax.eval_shape(gradients, table, batch, key=KEY, scale=actual)[2]
    assert rows.shape == (3, 64)


@pytest.mark.parametrize("leaves", [None, FACTORED])
def test_workers_with_their_own_moments_get_one_scale(leaves):
    """That of the mean of their moments."""
    nu = {"b": jnp.arange(6.0).reshape(2, 3), "w": jnp.arange(24.0).reshape(2, 4, 3)}
    of = lambda nu, axis=None: scale_of(  # noqa: E731
        RMS, optax.ScaleByRmsState(nu), PARAMS, leaves=leaves, axis_name=axis
    )
    actual = jax.vmap(lambda nu: of(nu, "worker"), axis_name="worker")(nu)
    expected = of(jax.tree.map(lambda v: v.mean(0), nu))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, [b, b], rtol=1e-6), actual, expected)


def test_optimizers_without_a_second_moment_must_keep_one_beside():
    with pytest.raises(ValueError, match="params.* optax.scale_by_rms"):
        scale_of(optax.lion(1e-3), optax.lion(1e-3).init(PARAMS), PARAMS)


def product(w, batch, key):
    return jnp.sum((batch["x"] @ w) * batch["y"], (1, 2))


def test_a_scaled_step_has_the_products_of_the_plain_one():
    """And with a scale of ones its bits."""
    x, y = (RNG.normal(size=(2, 64, n)).astype(np.float32) for n in (300, 200))
    w, batch = jnp.zeros((300, 200)), {"x": x, "y": y}
    leaves = ordering.sketch_plan(product, w, batch, key=KEY, size=128)
    ones = scale_of(ADAM, ADAM.init(w), w, leaves=leaves)
    gradients = ordering.sketched_grads(product, SKETCH_KEY, size=128)
    run = lambda scale=None: gradients(w, batch, key=jax.random.clone(KEY), scale=scale)[1:]  # noqa: E731
    plain, scaled = jax.jit(run).lower().compile(), jax.jit(run).lower(ones).compile()
    dots = [program.as_text().count(" dot(") for program in (plain, scaled)]
    assert dots[0] == dots[1] > 0
    flops = [program.cost_analysis()["flops"] for program in (plain, scaled)]
    assert flops[0] <= flops[1] <= 1.01 * flops[0]
    jax.tree.map(np.testing.assert_array_equal, scaled(ones), plain())


LATE = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(0.1)], [100])
FROZEN = {"b": True, "w": False}


def test_a_scale_that_does_not_fit_is_refused():
    w, batch = jnp.zeros((60, 40)), {"x": jnp.ones((2, 3, 60)), "y": jnp.ones((2, 3, 40))}
    gradients = ordering.sketched_grads(product, SKETCH_KEY, size=128)
    with pytest.raises(ValueError, match="second_moment_scale"):
        gradients(w, batch, key=jax.random.clone(KEY), scale=w)
    with pytest.raises(ValueError, match="scale is real.60. .*real.60, 40."):
        gradients(w, batch, key=jax.random.clone(KEY), scale=w[:, 0])


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.amsgrad(0.1),
        optax.sm3(0.1),
        optax.rmsprop(0.1, centered=True),
        optax.adamax(0.1),
        optax.adamaxw(0.1),
        optax.chain(optax.clip(1.0), optax.amsgrad(0.1)),
        optax.chain(optax.adamax(0.1), optax.masked(optax.set_to_zero(), FROZEN)),
        optax.amsgrad(LATE),
        optax.MultiSteps(optax.adamax(0.1), 4).gradient_transformation(),
        optax.adam(0.1, eps=1.0),
        optax.chain(optax.scale_by_adam(), optax.clip(1e-3)),
    ],
    ids=["amsgrad", "sm3", "centred", "adamax", "adamaxw", "chained"]
    + ["frozen", "late", "in every fourth step", "eps", "clipped"],
)
def test_optimizers_that_divide_by_something_else_are_refused(optimizer):
    with pytest.raises(ValueError, match="params|`nu`"):
        scale_of(optimizer, optimizer.init(PARAMS), PARAMS)


BY_THE_ROOT = "adam adamw adabelief lamb nadam nadamw radam rmsprop yogi".split()


@pytest.mark.parametrize("name", mostly_slow(BY_THE_ROOT, quick=("yogi",)))
def test_optimizers_that_divide_by_the_root_are_taken(name):
    optimizer = getattr(optax, name)(optax.cosine_decay_schedule(0.1, 1000))
    for each in (optimizer, optax.chain(optax.clip_by_global_norm(1.0), optimizer)):
        state = stepped(each, steps=1)[0]
        scale = scale_of(each, state, PARAMS)
        assert any((x != 1).any() for x in jax.tree.leaves(scale))


OFTEN_ZERO = {
    "frozen behind": optax.chain(ADAM, optax.masked(optax.set_to_zero(), FROZEN)),
    "frozen before": optax.chain(optax.transforms.freeze(FROZEN), ADAM),
    "in every fourth step": optax.MultiSteps(ADAM, 4).gradient_transformation(),
    "momentum behind": optax.rmsprop(1e-3, momentum=0.9),
    "a rate that ends": optax.adam(optax.cosine_decay_schedule(1e-3, 10)),
    "a rate that begins late": optax.adam(LATE),
    "weights that are averaged": optax.contrib.schedule_free_adamw(1e-3),
}


@pytest.mark.parametrize("name", OFTEN_ZERO)
def test_optimizers_whose_updates_are_zero_or_go_on_are_taken(name):
    optimizer = OFTEN_ZERO[name]
    ordering.second_moment_scale(optimizer, optimizer.init(PARAMS), PARAMS)
