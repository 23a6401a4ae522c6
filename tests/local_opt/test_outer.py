"""Outer optimizers see the length of a round; few rounds for their momentum are warned of."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from local_opt import presets
from tests.cases import mostly_slow
from tests.problems import (
    RUNS,
    SGD,
    assert_workers_bitwise_equal,
    copies,
)


def test_few_rounds_are_warned_of():
    plan = local_opt.constant(30, total_steps=17 * 30)
    with pytest.warns(UserWarning, match="diloco has 17 rounds for .* momentum of 0.9: .* 41% "):
        presets.diloco(SGD, plan, axis_name="worker")
    with pytest.warns(UserWarning, match="slowmo has 2 rounds .* at least 7 rounds"):
        presets.slowmo(SGD, local_opt.constant(8, total_steps=16), axis_name="worker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        presets.diloco(SGD, local_opt.constant(30, total_steps=44 * 30), axis_name="worker")
    with pytest.warns(UserWarning, match="Take at least 44 rounds"):
        presets.diloco(SGD, local_opt.constant(30, total_steps=43 * 30), axis_name="worker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        presets.diloco(SGD, plan, axis_name="worker", momentum=0.0)


# The outer optimizer gets one round length, of all workers.

STEPS, WEIGHTS = np.array([[4, 2, 3, 7], [1, 5, 2, 2]]), np.float32([1, 5, 2, 0])
BASE = 4
BY_PERIOD = presets.normalize_by_period(
    optax.chain(optax.trace(0.5), optax.scale(-0.7)), h_base=BASE
)


def means_of(weights):
    """Where the outer optimizer goes in two rounds, by its definition."""
    share = weights / weights.sum()
    x = v = 0.0
    for steps in STEPS:
        length = share @ steps / BASE
        v = 0.5 * v + (-share @ (steps * np.arange(1.0, 5))) / length
        x -= 0.7 * v * length
    return x


def after_two_rounds(way, run, weights):
    """x of every worker, which moves by its own number of steps of its own size."""
    if way == "streaming":
        stream = local_opt.streaming.streaming_rounds(
            optax.sgd(1.0), fragments=1, mixing=0.0, outer=BY_PERIOD
        )
        rounds = local_opt.Rounds(stream.init, stream.update, None)

        def sync(x, state, **options):
            state = stream.start(x, state, fragment=0, **options)
            return stream.finish(x, state, fragment=0)
    else:
        compressor = local_opt.quantize("float16") if way == "compressor" else None
        rounds = local_opt.local_rounds(optax.sgd(1.0), outer=BY_PERIOD, compress=compressor)
        sync = rounds.sync

    def one(x, state, size, count, weight):
        def step(k, carry):
            x, state = carry
            updates, new = rounds.update(-size, state, x)
            return jax.tree.map(lambda a, b: jnp.where(k < count, a, b), (x + updates, new), carry)

        moved = jax.lax.fori_loop(0, 8, step, (x, state))
        return sync(*moved) if weights is None else sync(*moved, weight=weight)

    one, x = jax.jit(RUNS[run](one)), copies(jnp.zeros(()))
    state = jax.vmap(rounds.init)(x)
    for steps in STEPS:
        counted = jnp.zeros(4) if weights is None else weights
        x, state = one(x, state, jnp.arange(1.0, 5), steps, counted)
        assert_workers_bitwise_equal((x, state.outer, state.anchor))
    return x


WAYS = "rounds", "compressor", "streaming"
CASES = [*itertools.product(WAYS, (False, True), ("vmap", "shard_map"))]


@pytest.mark.parametrize("way,weighs,run", mostly_slow(CASES, quick=[*CASES[::4], *CASES[3::4]]))
def test_workers_of_uneven_steps_agree_after_an_outer_step(way, weighs, run):
    weights = WEIGHTS if weighs else None
    actual = after_two_rounds(way, run, weights)
    expected = means_of(np.ones(4) if weights is None else np.float64(WEIGHTS))
    np.testing.assert_allclose(actual, expected, rtol=1e-3 if way == "compressor" else 1e-6)
