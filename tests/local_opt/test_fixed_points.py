"""What no worker has moved stays to the bit, wherever more is made of a mean than a mean."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from tests.cases import mostly_slow
from tests.problems import COMPRESSORS, SGD, copies, vmap

START = np.random.default_rng(3).normal(size=40).astype(np.float32)
OUTER = {
    "adam": optax.adam(1e-2),
    "lion": optax.lion(1e-2, weight_decay=0.0),
    "muon": optax.contrib.muon(1e-2),
    "momentum": optax.sgd(0.7, momentum=0.9, nesterov=True),
}
HOW = {
    **{name: {"outer": outer} for name, outer in OUTER.items()},
    **{name: {"compress": COMPRESSORS[name], "outer": OUTER["adam"]} for name in ("int8", "top_k")},
    "scaffold": {"correction": local_opt.corrections.scaffold()},
    "fedprox": {"correction": local_opt.corrections.fedprox(0.5), "outer": OUTER["lion"]},
}


CASES = [*itertools.product(HOW, ((3, True), (7, False)))]


@pytest.mark.parametrize("how,of", mostly_slow(CASES, quick=CASES[::3]))
def test_a_leaf_that_no_worker_moves_keeps_its_bits(how, of):
    """While another one trains: also rows of a table that nobody has seen."""
    workers, weighs = of
    labels = {"frozen": "f", "table": "t", "train": "t"}
    inner = optax.partition({"t": optax.sgd(0.1), "f": optax.set_to_zero()}, labels)
    rounds = local_opt.local_rounds(inner, **HOW[how])
    params = {"frozen": START, "table": START.reshape(4, 10), "train": START[:3]}
    weight = jnp.arange(1.0, workers + 1) if weighs else None

    def run(params, weight):
        def turn(_, carry):
            params, state = carry
            grads = {**params, "table": params["table"].at[1:].set(0)}  # only row 0 is seen
            updates, state = rounds.update(grads, state, params)
            return rounds.sync(optax.apply_updates(params, updates), state, weight=weight)

        return jax.lax.fori_loop(0, 20, turn, (params, rounds.init(params)))[0]

    run = jax.vmap(run, axis_name="worker", in_axes=(0, 0 if weighs else None))
    result = jax.jit(run)(copies(params, workers), weight)
    np.testing.assert_array_equal(result["frozen"], np.stack([START] * workers))
    if how != "muon":  # which moves all rows of a matrix together
        np.testing.assert_array_equal(result["table"][0, 1:], params["table"][1:])
    assert np.abs(result["train"][0] - START[:3]).min() > 1e-5


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("outer", [optax.adam(1e-3), optax.sgd(0.01)], ids=["adam", "sgd"])
def test_narrow_parameters_move_under_an_outer_optimizer_as_wide_ones_do(kind, outer):
    """Outer steps are smaller than a rounding of the parameters, and add up in the anchor."""
    rounds = local_opt.local_rounds(optax.sgd(0.05), outer=outer)

    def run(x):
        def turn(_, carry):
            x, state = carry
            updates, state = rounds.update(x - 3, state, x)
            return rounds.sync(optax.apply_updates(x, updates), state)

        return jax.lax.fori_loop(0, 200, turn, (x, rounds.init(x)))

    wide, _ = jax.jit(vmap(run))(jnp.ones((4, 3)))
    x, state = jax.jit(vmap(run))(jnp.ones((4, 3), kind))
    assert x.dtype == kind and state.anchor.dtype == jnp.float32
    np.testing.assert_allclose(np.float32(x), wide, atol=0.02)
    assert abs(float(wide[0, 0]) - 1) > 0.1


def test_the_wide_anchor_of_narrow_parameters_stays_where_no_worker_moves():
    """Though parameters are the anchor rounded, which is no change."""
    rounds, anchor = local_opt.local_rounds(SGD, outer=OUTER["adam"]), copies(jnp.float32(1.001))
    x = anchor.astype(jnp.bfloat16)
    state = jax.vmap(rounds.init)(x)._replace(anchor=anchor)
    result, state = jax.jit(vmap(rounds.sync))(x, state)
    assert (state.anchor == anchor).all() and (result == x).all()


KINDS = ("bfloat16", "int8", "int4", "top_k")


@pytest.mark.parametrize("name", mostly_slow(KINDS, quick=("int8",)))
def test_a_compressor_leaves_numbers_of_64_bits_where_nothing_moves(name):
    with jax.enable_x64(True):
        x = jnp.full((2, 3), 1 + 1e-12)
        rounds = local_opt.local_rounds(optax.sgd(0.1), compress=COMPRESSORS[name])
        result, _ = jax.jit(vmap(rounds.sync))(x, jax.jit(jax.vmap(rounds.init))(x))
        assert result.dtype == jnp.float64 and (result == 1 + 1e-12).all()


@pytest.mark.parametrize("mixing", [0.3, 0.7])
def test_a_stream_leaves_what_no_worker_moves(mixing):
    stream = local_opt.streaming.streaming_rounds(optax.sgd(0.1), fragments=1, mixing=mixing)
    x = copies(START, 5)

    @jax.jit
    @vmap
    def turn(x, state):
        return stream.finish(x, stream.start(x, state, fragment=0), fragment=0)

    state = jax.vmap(stream.init)(x)
    for _ in range(10):
        x, state = turn(x, state)
    np.testing.assert_array_equal(x, np.stack([START] * 5))


@pytest.mark.parametrize("names", ["dict", "fields"])
def test_policies_match_no_parameter(names):
    """As the heads of an autoencoder, which are named as the moments are."""
    made = optax.ScaleByRStdDevState if names == "fields" else None
    leaves = {"mu": jnp.zeros(2), "nu": jnp.zeros(2)}
    params = made(**leaves) if made else leaves
    policies = {"mu": "mean", "nu": "mean"}
    rounds = local_opt.local_rounds(optax.sgd(0.1), sync_opt_state=policies)
    with pytest.raises(ValueError, match=r"\['mu', 'nu'\]"):
        rounds.init(params)
    inner = optax.sgd(0.1, momentum=0.9)
    rounds = local_opt.local_rounds(inner, sync_opt_state={"mu": "mean"})
    with pytest.raises(ValueError, match=r"\['mu'\].*\['trace'\]"):
        rounds.init(params)


def test_one_model_of_equal_workers_is_theirs():
    for workers in (3, 5, 7, 12):
        result = local_opt.mean_over_workers({"x": copies(START, workers)})
        np.testing.assert_array_equal(result["x"], START)
