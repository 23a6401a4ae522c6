"""Fragments are weighed, each at its own sync, as the reference does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from local_opt import WIRES
from tests import reference
from tests.problems import (
    MATRICES,
    RATE,
    RUNS,
    START,
    TARGETS,
    W,
    copies,
    distance,
    flat,
    square_gradient,
    square_step,
)

STEPPED = np.float32(np.random.default_rng(5).choice([0, 1, 2, 1e-3, 50], size=(13, W)))
STEPPED[:, 0] = 1
PLACES = [np.array([0, 1]), np.array([2, 3, 4, 5])]  # of b and of w, in the reference


def streamed(stream, turns, delay, run, *, lost=0.0):
    """[13, W, 6] of a loop over segments, weighed by STEPPED; `lost` is added where that is 0."""
    lost = jnp.full(W, lost)

    def step(params, state, matrix, target, weight, lost):
        params, state = square_step(stream)(params, state, matrix, target)
        return jax.tree.map(lambda x: jnp.where(weight == 0, x + lost, x), params), state

    @functools.partial(jax.jit, static_argnames="due")
    def communicate(params, state, weight, due):
        own = lambda x, s, w: stream.communicate(x, s, due, weight=w)  # noqa: E731
        return RUNS[run](own)(params, state, weight)

    step, params, history = jax.jit(RUNS[run](step)), copies(START), []
    state = jax.jit(RUNS[run](stream.init))(params)
    for begin, end, due in local_opt.stream_segments(turns, delay=delay):
        if begin:
            params, state = communicate(params, state, STEPPED[begin - 1], due)
            history[-1] = flat(params)
        for t in range(begin, end):
            params, state = step(params, state, MATRICES, TARGETS[t], STEPPED[t], lost)
            history.append(flat(params))
    return np.stack(history), state


@pytest.mark.parametrize("run", RUNS)
def test_every_fragment_is_weighed_at_its_own_sync(run):
    outer = optax.sgd(0.7, momentum=0.5, nesterov=True)
    stream = local_opt.streaming_rounds(optax.sgd(RATE), fragments=2, mixing=0.25, outer=outer)
    turns = {f: local_opt.constant(4, total_steps=13, offset=2 * f) for f in range(2)}
    found, _ = streamed(stream, turns, 2, run)
    expected = reference.streaming_diloco(
        flat(START), square_gradient, PLACES, [set(p.ends.tolist()) for p in turns.values()],
        13 * [RATE], delay=2, mixing=0.25, outer=(0.7, 0.5), weights=STEPPED,
    )  # fmt: skip
    assert distance(found, expected) < 2e-6


@pytest.mark.parametrize("wire", [None, "int8", "top_k"])
def test_a_finish_takes_back_a_worker_that_does_not_count(wire):
    """One fragment: all that was not finite is overwritten, and nobody else has seen it."""
    stream = local_opt.streaming_rounds(
        optax.sgd(RATE), fragments=1, mixing=0.5, wire=wire and WIRES[wire]
    )
    turns = {0: local_opt.every_step(13)}
    found, state = streamed(stream, turns, 0, "vmap", lost=np.nan)
    assert np.isfinite(found).all() and all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    same, _ = streamed(stream, turns, 0, "vmap")
    np.testing.assert_array_equal(found, same)


@pytest.mark.parametrize("wire", [None, "int8"])
def test_weights_are_two_collectives_of_a_start_and_none_of_a_finish(wire):
    stream = local_opt.streaming_rounds(
        optax.sgd(RATE), fragments=2, mixing=0.5, wire=wire and WIRES[wire]
    )
    x, weight = copies(START), jnp.ones(W)
    args = x, jax.vmap(stream.init)(x)

    def reduces(run, *args):
        return jax.jit(RUNS["shard_map"](run)).lower(*args).as_text().count("all_reduce")

    start = functools.partial(stream.start, fragment=1)
    plain = reduces(start, *args)
    assert reduces(lambda x, s, w: start(x, s, weight=w), *args, weight) == plain + 2
    finish = functools.partial(stream.finish, fragment=1)
    assert reduces(lambda x, s, w: finish(x, s, weight=w), *args, weight) == 0
