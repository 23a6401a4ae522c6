"""Sketches of losses in which all units share a term, such as a penalty on the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from tests.cases import mostly_slow
from tests.sketched import KEY, SKETCH_KEY, assert_sketched, close, parts_of, scale_like

RNG = np.random.default_rng(1)
N, SIZE = 4, 64
PARAMS = {
    "in": RNG.normal(size=(20, 24)).astype(np.float32) / 5,
    "stack": RNG.normal(size=(3, 24, 24)).astype(np.float32) / 5,
    "out": RNG.normal(size=(24, 12)).astype(np.float32) / 5,
    "log_t": np.float32(0.3),
    "bias": RNG.normal(size=(12,)).astype(np.float32) / 5,
}
BATCH = {"x": RNG.normal(size=(N, 20)).astype(np.float32), "y": RNG.integers(0, 12, N)}


def layers(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def fit(p, batch):
    logits = layers(p["stack"], batch["x"] @ p["in"]) @ p["out"] + p["bias"][None]
    return -jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch["y"]]


def squares(p):
    return sum(jnp.sum(jnp.square(w)) for w in jax.tree.leaves(p))


def spectral(w):
    """The largest singular value, by five steps from a fixed vector."""
    v = jnp.ones(w.shape[1])
    for _ in range(5):
        u = w @ v
        u = u / jnp.linalg.norm(u)
        v = w.T @ u
        v = v / jnp.linalg.norm(v)
    u, v = jax.lax.stop_gradient((u, v))
    return u @ w @ v


def of_layers(w):
    """A penalty in a scan over the layers' parameters."""
    return jax.lax.scan(lambda total, w: (total + jnp.sum(w**4), jnp.abs(w).sum()), 0.0, w)


LOSSES = {
    "L2": lambda p, b: fit(p, b) + 0.1 * squares(p),
    "leaf by leaf": lambda p, b: sum(
        (0.1 * jnp.sum(w**2) for w in jax.tree.leaves(p)), start=fit(p, b)
    ),
    "times a weight of the unit": lambda p, b: b["x"][:, 0] * (fit(p, b) + 0.1 * squares(p)),
    "spectral": lambda p, b: fit(p, b) + spectral(p["out"]),
    "scan": lambda p, b: fit(p, b) + of_layers(p["stack"])[0] + of_layers(p["stack"])[1].sum(),
    "a copy": lambda p, b: (
        fit(p, b) + squares(jax.tree.map(lambda w: w - jax.lax.stop_gradient(0.9 * w), p))
    ),
    "a teacher": lambda p, b: fit(p, b) * jnp.exp(-fit(jax.lax.stop_gradient(p), b)),
    "no gradient": lambda p, b: fit(p, b) + jax.lax.stop_gradient(squares(p)),
    "zero": lambda p, b: fit(p, b) + 0 * squares(p),
    "a temperature": lambda p, b: fit(p, b) * jnp.exp(-p["log_t"]) + p["log_t"],
    "jit": lambda p, b: jax.jit(lambda p: fit(p, b) + 0.1 * squares(p))(p),
    "remat": lambda p, b: jax.checkpoint(lambda p: fit(p, b) + 0.1 * squares(p))(p),
    "a phase": lambda p, b: jnp.real(jnp.exp(1j * p["log_t"]) * (fit(p, b) + 1j)),
    "no rows": lambda p, b: fit(p, b) + (b["x"][:, None][:, :0] @ p["in"]).sum((1, 2)),
    "penalty alone": lambda p, b: 0.1 * squares(p),
}


def with_key(loss):
    return lambda params, batch, key: loss(params, batch)


OFTEN = ("L2", "scan", "remat")  # others are like them


@pytest.mark.parametrize("scaled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", mostly_slow(LOSSES, quick=OFTEN))
def test_sketches_of_penalised_losses_are_those_of_gradients_without_a_copy(name, scaled):
    loss = with_key(LOSSES[name])
    plan = ordering.sketch_plan(loss, PARAMS, BATCH, key=KEY, size=SIZE)
    large = [leaf for leaf in plan if leaf.shape not in ((), (12,))]
    assert {leaf.how for leaf in large} <= {"sketched", "shared"}, plan
    assert_sketched(loss, PARAMS, BATCH, scale=scale_like(PARAMS, plan) if scaled else None)


def test_copies_of_large_parameters_are_warned_of():
    large = RNG.normal(size=(20, 24 * 40)).astype(np.float32) / 5
    derived = lambda w: (w / jnp.linalg.norm(w)).reshape(20, 40, 24).sum(1)  # noqa: E731
    loss = with_key(lambda p, b: fit(p | {"in": derived(p["in"])}, b))
    params = PARAMS | {"in": large}
    run = parts_of(ordering.sketched_grads(loss, SKETCH_KEY, size=SIZE))
    numbers = sum(np.size(w) for w in params.values())
    ratio = f"{N * large.size / numbers:.3g} times"
    with pytest.warns(UserWarning, match=rf"\['in'\].*each of {N} units.* {ratio}") as caught:
        _, mean, _ = jax.jit(run)(params, BATCH)
    assert len(caught) == 1
    close(mean, jax.jit(jax.grad(lambda p: loss(p, BATCH, KEY).mean()))(params))


def test_a_term_that_all_units_share_cancels_in_differences_of_pairs():
    small = ordering.sketched_grads(with_key(LOSSES["L2"]), SKETCH_KEY, size=SIZE)
    plain = ordering.sketched_grads(with_key(LOSSES["no gradient"]), SKETCH_KEY, size=SIZE)
    rows, without = (jax.jit(parts_of(maker))(PARAMS, BATCH)[2] for maker in (small, plain))
    close(rows[0] - rows[1], without[0] - without[1])
    assert float(jnp.max(jnp.abs(rows - without))) > 0.1
