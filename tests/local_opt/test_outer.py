"""Outer optimizers equal their papers, and few rounds for their momentum are warned of."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from local_opt import presets
from tests import reference
from tests.problems import (
    NESTEROV,
    PLAN,
    RATE,
    RUNS,
    SGD,
    W,
    assert_workers_bitwise_equal,
    copies,
    distance,
    run_given,
)

# The gradients do not depend on the parameters, so changes are known.
CHANGES = np.random.default_rng(2).normal(size=(13, W, 3)).astype(np.float32)


def run(outer):
    """Parameters [R, 1, 3] after every sync; the inner optimizer is plain SGD."""
    opt = local_opt.local_steps(optax.sgd(RATE), PLAN, axis_name="worker", outer=outer)
    return np.stack(run_given(opt, jnp.zeros(3), CHANGES))[:, None]


def expected_outer(rate, momentum, nesterov=False, h_base=None):
    """Parameters [R, 1, 3] after every sync, in float64."""
    mean = RATE * np.asarray(CHANGES, np.float64).mean(axis=1)
    changes = [mean[s : s + h].sum(axis=0) for s, h in zip(PLAN.starts, PLAN.periods, strict=True)]
    lengths = PLAN.periods / h_base if h_base else np.ones(PLAN.rounds)
    moves = reference.outer_momentum(
        [d / n for d, n in zip(changes, lengths, strict=True)], rate, momentum, nesterov
    )
    return np.cumsum([u * n for u, n in zip(moves, lengths, strict=True)], axis=0)[:, None]


NORMALIZED = presets.normalize_by_period(NESTEROV, h_base=2)
HEAVY = optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(1.0, momentum=0.6))
OUTER = {
    "nesterov": (NESTEROV, (0.7, 0.9, True)),
    "heavy ball": (optax.sgd(0.8, momentum=0.6), (0.8, 0.6)),
    "by period": (presets.normalize_by_period(HEAVY, h_base=3), (1.0, 0.6, False, 3)),
    "chained": (optax.chain(optax.identity(), NORMALIZED), (0.7, 0.9, True, 2)),
}


@pytest.mark.parametrize("outer,settings", OUTER.values(), ids=OUTER)
def test_outer_optimizers_equal_their_papers(outer, settings):
    # float32 sums of 13 numbers, in another order.
    assert distance(run(outer), expected_outer(*settings)) < 2e-6


def test_normalized_velocities_are_per_base_round():
    """The change is 1 per step, whatever the rounds."""
    outer = presets.normalize_by_period(optax.sgd(1.0, momentum=0.5), h_base=4)

    def velocities(periods):
        state, results = outer.init(jnp.zeros(())), []
        for period in periods:
            _, state = outer.update(jnp.float32(period), state, period=jnp.int32(period))
            results.append(float(state[0].trace))
        return results

    assert velocities([4, 4, 4]) == velocities([2, 8, 16]) == [4.0, 6.0, 7.0]


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

STEPS, WEIGHTS = np.array([4, 2, 3, 7]), np.float32([1, 5, 2, 0])
BASE = 4
BY_PERIOD = presets.normalize_by_period(
    optax.chain(optax.trace(0.5), optax.scale(-0.7)), h_base=BASE
)


def means_of(changes, steps, weights):
    """Where the outer optimizer goes in two rounds of the same changes [4], by its definition."""
    share = weights / weights.sum()
    length = share @ steps / BASE
    x = v = 0.0
    for _ in range(2):
        v = 0.5 * v + (-share @ changes) / length
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
    for _ in range(2):
        counted = jnp.zeros(4) if weights is None else weights
        x, state = one(x, state, jnp.arange(1.0, 5), jnp.asarray(STEPS), counted)
        assert_workers_bitwise_equal((x, state.outer, state.anchor))
    return x


@pytest.mark.parametrize("run", ["vmap", "shard_map"])
@pytest.mark.parametrize("weights", [None, WEIGHTS])
@pytest.mark.parametrize("way", ["rounds", "compressor", "streaming"])
def test_workers_of_uneven_steps_agree_after_an_outer_step(way, weights, run):
    actual = after_two_rounds(way, run, weights)
    changes = STEPS * np.arange(1.0, 5)
    expected = means_of(changes, STEPS, np.ones(4) if weights is None else np.float64(WEIGHTS))
    np.testing.assert_allclose(actual, expected, rtol=1e-3 if way == "compressor" else 1e-6)
