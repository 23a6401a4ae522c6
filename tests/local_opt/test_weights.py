"""Means weigh workers as the reference does, and read nothing of those that do not count."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import local_opt
from local_opt import presets
from tests import reference
from tests.cases import mostly_slow
from tests.problems import (
    COMPRESSORS,
    NESTEROV,
    RATE,
    SGD,
    W,
    assert_workers_bitwise_equal,
    copies,
    distance,
    on_mesh,
    vmap,
)
from tests.shards import placed

RNG = np.random.default_rng(5)
X = {"a": RNG.normal(size=(W, 3)).astype(np.float32), "b": RNG.normal(size=W).astype(np.float32)}
WAYS = {
    "plain": {},
    "mean": {"sync_opt_state": "mean"},
    "outer": {"outer": NESTEROV, "drift": True},
    "int8": {"compress": COMPRESSORS["int8"]},
    "top_k": {"compress": COMPRESSORS["top_k"], "sync_opt_state": "mean"},
    "control": {"correction": local_opt.corrections.scaffold()},
    "proximal": {"correction": local_opt.corrections.fedprox(0.1)},
}
RUN = {"vmap": vmap, "mesh": on_mesh}


@functools.cache
def a_sync(way, run):
    """Compiled: changes of parameters, weights -> parameters and state after a sync."""
    rounds = local_opt.local_rounds(SGD, **WAYS[way])

    def one(change, weight):
        start = jax.tree.map(jnp.ones_like, change)
        state = rounds.update(change, rounds.init(start), start)[1]  # momentum is the change
        local = jax.tree.map(jnp.add, start, change)
        return rounds.sync(local, state, weight=weight)

    return jax.jit(RUN[run](one))


ANY_WEIGHT = st.one_of(
    st.just(0.0), st.sampled_from([1.0, 3.0]), st.floats(1e-6, 1e6, allow_subnormal=False)
)
SOME_COUNT = st.lists(ANY_WEIGHT, min_size=W, max_size=W).filter(any)


WHERE = [*itertools.product(WAYS, RUN)]
TURNS = [case for i, case in enumerate(WHERE) if i % 2 == i // 2 % 2]


@pytest.mark.parametrize("way,run", mostly_slow(WHERE, quick=TURNS))
@given(weights=SOME_COUNT, lost=st.sampled_from([0.0, np.nan, np.inf]))
def test_any_weights_equal_the_reference_and_nothing_is_read_of_who_does_not_count(
    way, run, weights, lost
):
    weights = np.float32(weights)
    changes = {
        k: np.where(weights.reshape(W, *[1] * (x.ndim - 1)) > 0, x, x + lost) for k, x in X.items()
    }
    new, state = a_sync(way, run)(changes, weights)
    assert_workers_bitwise_equal(new)
    mean = {k: reference.weighted_mean(x, weights) for k, x in changes.items()}
    moved = 0.7 * 1.9 if way == "outer" else 1.0  # of Nesterov's first step
    # Relative to the numbers that are summed, the largest of which are about 3.
    error = {"int8": 2 * 3 / 127, "top_k": 3 / 128}.get(way, 2e-6)
    for name in X:
        np.testing.assert_allclose(new[name][0], 1 + moved * mean[name], rtol=0, atol=error)
    if "sync_opt_state" in WAYS[way]:
        for name in X:
            trace = state.inner[0].trace[name]
            np.testing.assert_allclose(trace, copies(mean[name]), rtol=0, atol=2e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.residual, state.correction)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.anchor, state.outer)))
    if "drift" in WAYS[way]:
        assert np.isfinite(state.drift).all() and (state.drift[weights == 0] == 0).all()


NONE_COUNTS = [
    [0, 0, 0, 0],
    [1, -1e-9, 1, 1],
    [np.nan, 1, 1, 0],
    [1, 1, np.inf, 0],
    [1, 1e-20, 1, 1],
    [1e20, 1, 1, 1],
]
EXTREME = {
    "least": [1e-12, 3e-12, 4e-12, 0],
    "small": [1e-9, 3e-9, 2e-9, 1e-12],
    "largest": [1e12, 9e11, 1e12, 1e-12],
}


@pytest.mark.parametrize("run,scale", [("vmap", 1e-5), ("mesh", 1e5)])
@pytest.mark.parametrize("weights", EXTREME.values(), ids=EXTREME)
def test_only_the_ratios_of_weights_count(weights, scale, run):
    weights = np.float32(weights)
    x = scale * X["a"]
    actual = jax.jit(RUN[run](lambda x, v: local_opt.pmean(x, weight=v)))(x, weights)
    expected = reference.weighted_mean(np.float64(x), np.float64(weights))
    np.testing.assert_allclose(actual, copies(expected), rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("way,run", [case for case in TURNS if case[0] not in ("plain", "control")])
def test_weights_without_a_mean_leave_no_finite_parameter(way, run):
    for weights in NONE_COUNTS:
        new, _ = a_sync(way, run)(X, np.float32(weights))
        assert all(np.isnan(x).all() for x in jax.tree.leaves(new)), weights


def collectives(run, *args):
    """How often each collective stands in the program of one worker on a mesh."""
    text = jax.jit(on_mesh(run)).lower(*args).as_text()
    result = re.findall(r"stablehlo\.(all_reduce|all_gather|all_to_all|collective_\w+)", text)
    return {name: result.count(name) for name in {*result, "all_reduce"}}, text


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_one_number_more_and_without_them_nothing_changes(way):
    rounds = local_opt.local_rounds(SGD, **WAYS[way])
    state = jax.vmap(rounds.init)(X)
    plain, text = collectives(rounds.sync, X, state)
    same, none = collectives(lambda x, s: rounds.sync(x, s, weight=None), X, state)
    weighed, _ = collectives(lambda x, s, w: rounds.sync(x, s, weight=w), X, state, jnp.ones(W))
    strip = lambda text: text.split("\n", 1)[1]  # the module's name  # noqa: E731
    assert same == plain and strip(none) == strip(text)
    assert weighed == plain | {"all_reduce": plain["all_reduce"] + 1}  # beside all others
    leaves = 0 if "compress" in WAYS[way] else 2
    leaves += 2 if "sync_opt_state" in WAYS[way] else 0
    # Counts that tell whether steps are uneven, and a branch with a weighted mean if they are.
    assert plain["all_reduce"] == leaves + (1 + leaves + 1 if way == "control" else 0)


@pytest.mark.parametrize("make", [local_opt.local_steps, presets.diloco, presets.slowmo])
def test_a_planned_sync_takes_back_a_worker_whose_last_gradient_is_not_finite(make, recwarn):
    opt = make(optax.sgd(RATE), local_opt.constant(2, total_steps=4), sync_opt_state="mean")
    step, x = jax.jit(vmap(lambda g, s, x, w: opt.update(g, s, x, weight=w))), copies(jnp.ones(3))
    state, grads = jax.vmap(opt.init)(x), jnp.arange(12.0).reshape(W, 3)
    for bad in (grads, grads.at[1].set(jnp.nan)):
        updates, state = step(bad, state, x, jnp.array([1, 0, 2, 1]))
        x = optax.apply_updates(x, updates)
    assert np.isfinite(x).all() and np.ptp(x, axis=0).max() <= np.spacing(np.abs(x).max())
    if make is local_opt.local_steps:
        mean = reference.weighted_mean(1 - 2 * RATE * grads, [1, 0, 2, 1])
        np.testing.assert_allclose(x[0], mean, rtol=1e-6)


SHARDED = [*itertools.product((AxisType.Auto, AxisType.Explicit), (None, "int8"))]


@pytest.mark.parametrize("kind,compressor", mostly_slow(SHARDED, quick=[SHARDED[1], SHARDED[2]]))
def test_a_weight_counts_on_all_devices_of_a_worker(kind, compressor):
    mesh = jax.make_mesh((2, 2), ("worker", "model"), (kind,) * 2, devices=jax.devices()[:4])
    specs, results = {"a": jax.P("model"), "b": jax.P()}, []
    x = {"a": np.float32(RNG.normal(size=(2, 512))), "b": X["b"][:2]}
    for workers in (2, mesh):
        options = {"specs": specs, "drift": True} if workers is mesh else {}
        rounds = local_opt.local_rounds(SGD, compress=COMPRESSORS.get(compressor), **options)

        def one(x, w, rounds=rounds):
            return rounds.sync(x, rounds.init(jax.tree.map(jnp.zeros_like, x)), weight=w)[0]

        run = local_opt.map_workers(one, workers, in_specs="worker", out_specs="worker")
        local = placed(x, specs, mesh) if workers is mesh else x
        results.append(jax.jit(run)(local, jnp.array([3, 1])))
    # Shards have other rows of 128 numbers, and scales of their own.
    assert distance(*results) < (1e-6 if compressor is None else 1e-2)
