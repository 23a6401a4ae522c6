"""Streaming sync equals its paper, and plain averaging where both are the same."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import local_opt
from local_opt import streaming
from tests.cases import FAST_XLA, mostly_slow
from tests.problems import (
    COMPRESSORS,
    NESTEROV,
    PLAN,
    RATE,
    RUNS,
    SGD,
    W,
    assert_bitwise_equal,
    assert_workers_bitwise_equal,
    copies,
    distance,
    ends_of,
    expected_stream,
    run_rounds,
    run_segments,
)


def qsr(offset):
    lr = optax.linear_schedule(0.4, 0.05, 13)
    return local_opt.qsr(lr, total_steps=13, alpha=0.4, h_base=2, offset=offset)


TWO = {  # (plans, delay)
    "constant": ({f: local_opt.constant(4, total_steps=13, offset=2 * f) for f in range(2)}, 2),
    "qsr": ({f: qsr(f) for f in range(2)}, 2),
}


def segments_of(plans):
    turns, delay = plans
    return local_opt.streaming.stream_segments(turns, delay=delay)


def expected(plans, mixing, outer, weights=None):
    turns, delay = plans
    return expected_stream(
        [ends_of(plan) for plan in turns.values()], delay, mixing, outer, weights
    )


STEPPED = np.float32(np.random.default_rng(5).choice([0, 1, 2, 1e-3, 50], size=(13, W)))
STEPPED[:, 0] = 1


CASES = [*itertools.product(TWO, ("vmap", "shard_map"))]


@pytest.mark.parametrize("name,run", mostly_slow(CASES, quick=[CASES[1], CASES[2]]))
def test_fragments_equal_the_reference(name, run):
    """Every fragment with the weights of its own sync."""
    weights = STEPPED if name == "constant" else None
    outer = optax.sgd(0.7, momentum=0.5, nesterov=True)
    stream = local_opt.streaming.streaming_rounds(
        optax.sgd(RATE), axis_name="worker", fragments=2, mixing=0.25, outer=outer
    )
    result, params, _ = run_segments(stream, segments_of(TWO[name]), run, weights)
    right = expected(TWO[name], 0.25, (0.7, 0.5), weights)
    assert distance(result, right) < 2e-6  # float32 against float64
    assert distance(result, expected(TWO[name], 0.0, (0.7, 0.5), weights)) > 1e-3
    assert_workers_bitwise_equal(params)


@functools.cache
def averaging(mixing):
    return local_opt.streaming.streaming_rounds(
        optax.sgd(RATE), axis_name="worker", fragments=2, mixing=mixing
    )


@given(st.data())
def test_any_plans_equal_the_reference(data):
    delay = data.draw(st.integers(0, 3), "delay")
    mixing = data.draw(st.sampled_from([0.0, 0.5, 0.9]), "mixing")
    ends = []
    for _ in range(2):  # rounds as long as the delay, but the first
        at = data.draw(st.integers(1, 12))
        chosen = [0]
        while at < 13:
            chosen.append(at)
            at += data.draw(st.integers(max(delay, 1), 6))
        ends.append(chosen)
    turns = {f: local_opt.SyncPlan(starts, 13) for f, starts in enumerate(ends)}
    segments = segments_of((turns, delay))
    for name, plan in turns.items():
        local = [(s.begin, action) for s in segments for action, f, _ in s.due if f == name]
        assert [a for _, a in local] == plan.rounds * ["start", "finish"]  # never two on the way
        assert [step for step, _ in local[::2]] == ends_of(plan)
        assert all(
            0 <= b - a <= delay for (a, _), (b, _) in zip(local[::2], local[1::2], strict=True)
        )
    result, _, _ = run_segments(averaging(mixing), segments)
    # A mean is an outer step of rate 1, which rounds once more.
    assert distance(result, expected((turns, delay), mixing, (1.0, 0.0))) < 2e-6


@pytest.mark.parametrize("outer", [None, NESTEROV], ids=["mean", "outer"])
def test_one_fragment_without_delay_is_plain_averaging_bitwise(outer, monkeypatch):
    """Compiled by XLA's default emitters: others fuse and so round the two otherwise."""
    if "fusion_emitters" in FAST_XLA:
        options = {"xla_cpu_use_fusion_emitters": True}
        monkeypatch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=options))
    stream = local_opt.streaming.streaming_rounds(
        SGD, axis_name="worker", fragments=1, mixing=0.0, outer=outer
    )
    result, _, _ = run_segments(stream, segments_of(({0: PLAN}, 0)))
    # A stream's mean is of changes from what workers share, as of rounds with a correction.
    nothing = None if outer else local_opt.corrections.fedprox(0.0)
    rounds = local_opt.local_rounds(SGD, axis_name="worker", outer=outer, correction=nothing)
    np.testing.assert_array_equal(result, run_rounds(rounds, PLAN)[0])


def test_a_run_that_stops_with_a_mean_in_transit_resumes_bitwise():
    stream = local_opt.streaming.streaming_rounds(
        SGD, axis_name="worker", fragments=2, outer=NESTEROV, compress=COMPRESSORS["int8"]
    )
    turns, delay = TWO["constant"]
    segments = segments_of(TWO["constant"])
    whole, params, state = run_segments(stream, segments)
    for stop in (3, 5, 12):  # between start and finish of the second, of the first, before the end
        until = [s._replace(end=min(s.end, stop)) for s in segments if s.begin < stop]
        head, *kept = run_segments(stream, until)
        saved = jax.tree.map(np.asarray, tuple(kept))
        rest = local_opt.streaming.stream_segments(turns, delay=delay, start=stop)
        tail, *after = run_segments(stream, rest, begin=saved)
        # What is due at the stop is done after it.
        np.testing.assert_array_equal(head[:-1], whole[: stop - 1])
        np.testing.assert_array_equal(tail, whole[stop:])
        assert_bitwise_equal(tuple(after), (params, state))


def test_the_last_syncs_follow_the_last_step():
    for start in (0, 5, 13):
        segments = local_opt.streaming.stream_segments(TWO["qsr"][0], delay=2, start=start)
        assert [s.begin for s in segments] == [start, *(s.end for s in segments[:-1])]
        assert segments[-1].end == segments[-1].begin == 13


def test_fragments_are_even_and_whole():
    sizes = dict(zip("abcdef", (5, 5, 1, 9, 1, 3), strict=True))
    params = {name: jnp.zeros(n) for name, n in sizes.items()}
    assert streaming.parts_of(params, 2) == [[0, 1, 2], [3, 4, 5]]
    assert streaming.parts_of(params, 6) == [[0], [1], [2], [3], [4], [5]]
    labels = {name: n % 3 for n, name in enumerate(params)}
    assert streaming.parts_of(params, labels) == [[0, 3], [1, 4], [2, 5]]
    big_last = {"a": jnp.zeros(1), "b": jnp.zeros(1), "c": jnp.zeros(100)}
    assert streaming.parts_of(big_last, 3) == [[0], [1], [2]]


def named(tree, word, *values):
    """A tree of the first value where a leaf's path has the word, and of the second elsewhere."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: values[word not in jax.tree_util.keystr(path)], tree
    )


RATES_OF = {"slow": optax.sgd(0.1), "fast": optax.sgd(1.0)}
BY_NAME = {
    "partition": optax.partition(RATES_OF, lambda p: named(p, "embed", "slow", "fast")),
    "masked": optax.masked(optax.sgd(0.3), lambda p: named(p, "'b'", False, True)),
    "muon": optax.contrib.muon(0.1),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "by period": local_opt.presets.normalize_by_period(
        optax.partition(RATES_OF, {"embed": "slow", "body": "fast"}), h_base=2
    ),
}


NAMED = [("partition", "shard_map"), *((name, "vmap") for name in BY_NAME)]


@pytest.mark.parametrize("name,run", mostly_slow(NAMED, quick=[NAMED[0], NAMED[3], NAMED[5]]))
def test_outer_optimizers_see_the_names_of_the_leaves(name, run):
    """Fragments, one after another, move as the whole does."""
    rng, normal = np.random.default_rng(3), lambda rng, *s: np.float32(rng.normal(size=s))
    x = {
        "embed": normal(rng, 3, 4),
        "body": [{"w": normal(rng, 4, 2), "b": normal(rng, 2)}, {"w": normal(rng, 2, 2)}],
    }
    x, moved = copies(x), jax.tree.map(lambda a: normal(rng, 4, *a.shape), x)
    outer, ends = BY_NAME[name], []
    for count in (None, 2, 4):
        if count:
            made = local_opt.streaming.streaming_rounds(SGD, fragments=count, outer=outer)
        else:
            made = local_opt.local_rounds(SGD, outer=outer)

        def one(x, moved, made=made, count=count):
            _, state = made.update(moved, made.init(x), x)
            x = jax.tree.map(jnp.add, x, moved)
            for fragment in range(count or 0):
                state = made.start(x, state, fragment=fragment)
                x, state = made.finish(x, state, fragment=fragment, last=True)
            return x if count else made.sync(x, state)[0]

        ends.append(jax.jit(RUNS[run](one))(x, moved))
    for result in ends[1:]:
        assert distance(result, ends[0]) < 1e-6


@pytest.mark.parametrize("compressor", [None, "int8", "top_k"])
def test_a_finish_takes_back_a_worker_that_does_not_count(compressor):
    """One fragment: all that was not finite is overwritten, and nobody else has seen it."""
    stream = local_opt.streaming.streaming_rounds(
        optax.sgd(RATE), fragments=1, mixing=0.5, compress=compressor and COMPRESSORS[compressor]
    )
    segments = segments_of(({0: local_opt.constant(1, total_steps=13)}, 0))
    result, _, state = run_segments(stream, segments, weights=STEPPED, lost=np.nan)
    assert np.isfinite(result).all() and all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    same, *_ = run_segments(stream, segments, weights=STEPPED)
    np.testing.assert_array_equal(result, same)


def test_the_period_of_a_fragment_is_that_of_its_round():
    def update(updates, state, params=None, *, period, **extra):
        return jax.tree.map(lambda x: 0 * x + period, updates), state

    outer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    stream = local_opt.streaming.streaming_rounds(SGD, axis_name=(), fragments=2, outer=outer)
    x = {"a": jnp.zeros(()), "b": jnp.zeros(())}
    state = stream.init(x)
    for fragment, steps in ((0, 2), (1, 3), (0, 4)):
        for _ in range(steps):
            _, state = stream.update(x, state, x)
        state = stream.start(x, state, fragment=fragment)
    assert state.anchor == {"a": 2 + 7, "b": 5}
