"""What a loss asks of JAX is what it gets: modes, types, precisions, rematerialised bodies."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ordering
from ordering.gradients import interpret
from tests.cases import mostly_slow
from tests.sketched import KEY, SKETCH_KEY, assert_sketched, close

RNG = np.random.default_rng(4)
TABLE = jnp.asarray(RNG.normal(size=(100, 40)), jnp.float32)
IDS = np.array([[3, -1, -1, 99], [4, 5, -100, 140], [-7, 0, 120, 2]])


def with_key(loss):
    return lambda params, batch, key: loss(params, batch)


LOOK_UPS = {  # all modes in tests/conformance/indexing.py
    "clip": lambda w, i: jnp.take(w, i, axis=0, mode="clip"),
    "fill with a number": lambda w, i: jnp.take(w, i, axis=0, mode="fill", fill_value=3),
    "NaN, then a mask": lambda w, i: jnp.nan_to_num(w.at[i].get(mode="fill")),
}


@pytest.mark.parametrize("size", [64, 1024], ids=["sketched", "formed"])
@pytest.mark.parametrize("name", LOOK_UPS)
def test_look_ups_of_places_that_are_not_there(name, size):
    loss = with_key(lambda w, ids: jnp.tanh(LOOK_UPS[name](w, ids).sum(1)).sum(-1))
    (plan,) = ordering.sketch_plan(loss, TABLE, IDS, key=KEY, size=size)
    assert (plan.how, plan.why) == ("sketched" if size == 64 else "formed", "look-up")
    losses, mean, rows = assert_sketched(loss, TABLE, IDS, size=size)
    np.testing.assert_allclose(losses, loss(TABLE, IDS, KEY), rtol=1e-5)
    close(mean, jax.grad(lambda w: loss(w, IDS, KEY).mean())(TABLE))
    assert np.isfinite(rows).all() and np.abs(rows).max() > 0


def test_what_is_filled_with_nan_leaves_sketches_finite():
    """As gradients are: a row that is not there gets none."""
    loss = with_key(lambda w, i: jnp.square(w.at[i].get(mode="fill")).sum((-1, -2)))
    for size in (64, 1024):
        gradients = ordering.sketched_grads(loss, SKETCH_KEY, size=size)
        losses, mean, rows = gradients(TABLE, IDS, key=KEY)
        assert np.isnan(losses[1]) and np.isfinite(mean).all() and np.isfinite(rows).all()


HALF = jnp.bfloat16
WIDE = {"preferred_element_type": jnp.float32}
NUMBERS = ("NWC", "WIO", "NWC")


def recurrent(w, x):
    """A cell over time, as of a GRU: a narrow weight, wide data."""
    step = lambda h, x: (jnp.tanh(x + lax.dot_general(h, w, (((1,), (0,)), ((), ())))), None)  # noqa: E731
    return lax.scan(step, jnp.zeros(x.shape[::2]), x.transpose(1, 0, 2))[0]


def stacked(w, x):
    step = lambda x, w: (jnp.tanh(jnp.dot(x.astype(HALF), w, **WIDE)), None)  # noqa: E731
    return lax.scan(step, x, jnp.stack([w, w]))[0]


def layers(w, x):
    """Parameters [2, 24, 24]."""
    step = lambda x, w: (jnp.tanh(jnp.dot(x.astype(HALF), w, **WIDE)), None)  # noqa: E731
    return lax.scan(step, x, w)[0]


TYPES = {
    "a wide product": ((24, 24), lambda w, x: jnp.dot(x.astype(HALF), w, **WIDE)),
    "wide data": ((24, 24), lambda w, x: lax.dot_general(x, w, (((2,), (0,)), ((), ())))),
    "the weight first": (
        (24, 24),
        lambda w, x: lax.dot_general(w, x, (((1,), (2,)), ((), ())), **WIDE),
    ),
    "in a scan": ((24, 24), recurrent),
    "copied into a stack": ((24, 24), stacked),
    "a scanned stack": ((2, 24, 24), layers),
    "in a map": ((24, 24), lambda w, x: lax.map(lambda x: jnp.tanh(x @ w.T), x)),
    "in a checkpoint": (
        (24, 24),
        jax.checkpoint(lambda w, x: jnp.tanh(jnp.dot(x.astype(HALF), w, **WIDE))),
    ),
    "heads": (
        (3, 8, 24),
        lambda w, x: lax.dot_general(
            x.reshape(*x.shape[:2], 3, 8), w, (((3,), (1,)), ((2,), (0,)))
        ),
    ),
    "a convolution": (
        (3, 24, 12),
        lambda w, x: lax.conv_general_dilated(
            x.astype(HALF), w, (1,), "SAME", dimension_numbers=NUMBERS
        ),
    ),
}


ALL_TYPES = [*itertools.product(TYPES, (32, 1024))]


@pytest.mark.parametrize("name,size", mostly_slow(ALL_TYPES, quick=ALL_TYPES[::3]))
def test_mean_gradients_have_the_types_of_parameters(name, size):
    shape, function = TYPES[name]
    w = jnp.asarray(RNG.normal(size=shape) / 5, HALF)
    x = jnp.asarray(RNG.normal(size=(3, 4, 24)), jnp.float32)

    def loss(w, x):
        y = function(w["w"], x).astype(jnp.float32)
        return jnp.square(y.reshape(len(x), -1) if name != "the weight first" else y).sum()

    params = {"w": w, "b": jnp.zeros((40, 40))}  # so that not all are kept as they are
    of_units = lambda p, x: jax.vmap(lambda x: loss(p, x[None]))(x)  # noqa: E731
    gradients = ordering.sketched_grads(of_units, SKETCH_KEY, size=size)
    run = lambda p, x: (gradients(p, x), jax.grad(lambda p: of_units(p, x).mean())(p))  # noqa: E731
    (losses, mean, rows), expected = jax.jit(run)(params, x)
    assert (losses.dtype, rows.dtype) == (jnp.float32, jnp.float32)
    assert mean["w"].dtype == HALF
    actual, expected = (np.asarray(g["w"], np.float32) for g in (mean, expected))
    np.testing.assert_allclose(actual, expected, atol=0.03 * np.abs(expected).max())


def conv(x, w, **how):
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=NUMBERS, **how)


PRECISE = {
    "products": ((24, 40), lambda w, x: jnp.dot(x, w, precision="highest")),
    "the weight first": (
        (40, 24),
        lambda w, x: jnp.einsum("oi,nti->nto", w, x, precision="highest"),
    ),
    "two precisions": ((24, 40), lambda w, x: jnp.dot(x, w, precision=("high", "highest"))),
    "heads": (
        (3, 8, 24),
        lambda w, x: jnp.einsum(
            "nthd,hde->nthe", x.reshape(*x.shape[:2], 3, 8), w, precision="highest"
        ),
    ),
    "in a scan": (
        (2, 24, 24),
        lambda w, x: lax.scan(lambda x, w: (jnp.dot(x, w, precision="highest"), None), x, w)[0],
    ),
    "a convolution": ((3, 24, 12), lambda w, x: conv(x, w, precision="highest")),
}


@pytest.mark.parametrize("size", [16, 600], ids=["sketched", "formed"])
@pytest.mark.parametrize("name", PRECISE)
def test_every_product_has_the_precision_of_the_loss(name, size):
    shape, function = PRECISE[name]
    params = {"first": jnp.ones((24, 24)), "w": jnp.ones(shape)}

    def loss(p, x):
        x = jnp.tanh(jnp.dot(x, p["first"], precision="highest"))
        return function(p["w"], x).reshape(len(x), -1).sum(-1)

    gradients = ordering.sketched_grads(loss, SKETCH_KEY, size=size)
    jaxpr = jax.make_jaxpr(gradients)(params, jnp.ones((3, 4, 24))).jaxpr
    products = [e for e in within(jaxpr) if e.primitive.name in PRODUCTS]
    assert len(products) > 3
    assert not [e for e in products if e.params["precision"] is None]


PRODUCTS = ("dot_general", "conv_general_dilated")


def within(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from within(inner)


def scaled(x, w, t):
    return jnp.tanh(x @ w) * t


AGAIN, COMPILED = jax.checkpoint(scaled), jax.jit(scaled)


def two_blocks(block):
    def run(p, x):
        t = jnp.exp(p["t"])
        return block(block(x, p["a"], t), p["b"], t)

    return run


def inside_and_outside(p, x):
    size = jnp.sum(p["a"] ** 2)
    return AGAIN(x, p["b"], size) * size


def made_inside(p, x):
    """Every call of one program makes a number of its own."""
    block = jax.checkpoint(lambda x, w, t: x @ w * jnp.exp(t))
    return block(block(x, p["a"], p["t"]), p["b"], 2 * p["t"])


def in_a_loop(p, x):
    t = jnp.exp(p["t"])
    x = lax.scan(lambda x, _: (AGAIN(x, p["a"], t), None), x, None, length=2)[0]
    return AGAIN(x, p["b"], t)


SHARED = {
    "two rematerialised blocks": two_blocks(AGAIN),
    "one of them": lambda p, x: AGAIN(x, p["a"], jnp.exp(p["t"])) * jnp.exp(p["t"]),
    "two compiled blocks": two_blocks(COMPILED),
    "inside and outside": inside_and_outside,
    "made inside": made_inside,
    "in a loop": in_a_loop,
    "results of a block": lambda p, x: (
        x @ p["a"] * sum(jax.checkpoint(lambda w: (jnp.sum(w**2), jnp.exp(w[0, 0])))(p["b"]))
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_number_of_parameters_is_used_in_several_places(name):
    w = RNG.normal(size=(2, 20, 20)).astype(np.float32) / 5
    params = {"t": np.float32(0.3), "a": w[0], "b": w[1]}
    x = RNG.normal(size=(4, 20)).astype(np.float32)
    loss = with_key(lambda p, x: jnp.square(SHARED[name](p, x)).sum(-1))
    assert_sketched(loss, params, x, size=32)


@pytest.mark.parametrize("name", SHARED)
def test_no_tracer_leaves_its_trace(name):
    w = RNG.normal(size=(2, 20, 20)).astype(np.float32) / 5
    params = {"t": np.float32(0.3), "a": w[0], "b": w[1]}
    loss = lambda p, x: jnp.square(SHARED[name](p, x)).sum(-1)  # noqa: E731
    gradients = ordering.sketched_grads(loss, SKETCH_KEY, size=32)
    with jax.checking_leaks():
        jax.eval_shape(gradients, params, jnp.ones((4, 20)))


def test_other_names_of_primitives_are_refused(monkeypatch):
    """JAX has changed some before, and rules would be missed without a word."""
    interpret._check_names.__wrapped__()
    monkeypatch.setattr(interpret, "RULE", "custom_vjp_call_jaxpr")
    with pytest.raises(RuntimeError, match="custom_vjp_call.*are known here"):
        interpret._check_names.__wrapped__()


def looped(w, x, at):
    """Layers by their number, each by `at(w, i)`."""
    for i in range(len(w)):
        x = jnp.tanh(x @ at(w, i))
    return x


def by_fori(w, x):
    body = lambda i, x: jnp.tanh(x @ lax.dynamic_index_in_dim(w, i, 0, False))  # noqa: E731
    return lax.fori_loop(0, len(w), body, x)


def by_pairs(w, x, inner):
    return lax.scan(lambda x, two: (inner(two, x), None), x, w.reshape(2, -1, *w.shape[1:]))[0]


def scanned_layers(w, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def an_expert(w, x):
    """The slice depends on the example."""
    return x @ w[jnp.argmax(x[0, 0, :4])] * w[jnp.argmax(x[0, 0, :4])].mean()


def at_first(w, i):
    return w[i]


MOVED = {
    "layers by number": ((3, 24, 24), lambda w, x: looped(w, x, at_first)),
    "layers backwards": ((3, 24, 24), lambda w, x: looped(w, x, lambda w, i: w[-1 - i])),
    "one of the layers": ((3, 24, 24), lambda w, x: x @ w[1]),
    "a loop's index": ((3, 24, 24), by_fori),
    "one layer": ((1, 24, 24), lambda w, x: scanned_layers(w, x)),
    "pairs of layers": ((4, 24, 24), lambda w, x: by_pairs(
        w, x, lambda w, x: looped(w, x, at_first))),
    "scans in a scan": ((4, 24, 24), lambda w, x: by_pairs(w, x, scanned_layers)),
    "split": ((24, 36), lambda w, x: sum(jnp.tanh(x @ w) for w in jnp.split(w, 3, -1))),
    "split rows": ((48, 24), lambda w, x: sum(jnp.tanh(x @ w) for w in jnp.split(w, 2))),
    "every second column": ((24, 40), lambda w, x: x @ w[:, 1::2]),
    "part of a part": ((60, 40), lambda w, x: x @ w[::2, 2:30][3:27, ::-3]),
    "flipped": ((24, 40), lambda w, x: x @ w[::-1, ::-1]),
    "overlapping": ((24, 40), lambda w, x: x @ w[:, :30] + x @ w[:, 10:]),
    "part and whole": ((24, 40), lambda w, x: jnp.square(x @ w[:, :20]).sum() + x @ w),
    "heads of a part": ((24, 4, 20), lambda w, x: jnp.einsum("nti,ihd->nthd", x, w[:, 1:, ::2])),
    "times a number": ((24, 40), lambda w, x: x @ (w * 0.5)),
    "over a root": ((24, 40), lambda w, x: x @ (w / np.sqrt(24.0)).T.T),
    "minus": ((3, 24, 24), lambda w, x: lax.scan(lambda x, w: (x @ -(2 * w), None), x, w)[0]),
    "in a checkpoint": ((3, 24, 24), jax.checkpoint(
        lambda w, x: looped(w, x, lambda w, i: 3 * w[i]))),
    "rows of a vmap": ((50, 24), lambda w, x: jax.vmap(jax.vmap(lambda i: w[i]))(
        jnp.int32(9 * jnp.abs(x[:, :, 0])))),
    "rows beyond": ((50, 24), lambda w, x: jax.vmap(jax.vmap(lambda i: w[i - 5]))(
        jnp.int32(30 * jnp.abs(x[:, :, 0])))),
    "matrices of a vmap": ((5, 4, 24), lambda w, x: jax.vmap(jax.vmap(lambda i: w[i]))(
        jnp.int32(3 * jnp.abs(x[:, :, 0])))),
    "a penalty beside": ((24, 40), lambda w, x: x @ (w * 0.5) + jnp.square(3 * w[:, ::2]).sum()),
    "an expert": ((4, 24, 24), lambda w, x: x @ w[jnp.argmax(x[0, 0, :4])]),
    "an expert that is used otherwise": ((4, 24, 24), an_expert),
}  # fmt: skip
COPIED = ("an expert that is used otherwise",)


@pytest.mark.parametrize("size", [16, 200, 900], ids=["sketched", "formed", "small"])
@pytest.mark.parametrize("name", MOVED)
def test_parameters_that_moved_are_not_copied(name, size):
    shape, function = MOVED[name]
    params = {"w": RNG.normal(size=shape).astype(np.float32) / 5, "b": np.ones((40, 40))}
    params["b"] = params["b"].astype(np.float32)
    x = RNG.normal(size=(3, 4, 24)).astype(np.float32)
    loss = with_key(lambda p, x: jnp.square(function(p["w"], x)).reshape(len(x), -1).sum(-1))
    plan = ordering.sketch_plan(loss, params, x, key=KEY, size=size)
    assert (plan[1].how == "copied") == (name in COPIED), plan[1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="sketched_grads copies")
        assert_sketched(loss, params, x, size=size)
