"""A run that goes on under another plan: the plan decides by the step, whatever came before."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from tests import problems
from tests.cases import mostly_slow
from tests.plain_loop import Mean, history
from tests.problems import RUNS, W, vmap

RATE, T = 0.1, 40
GRADS = np.random.default_rng(3).normal(size=(T, W)).astype(np.float32)
constant = local_opt.constant
GROWING = local_opt.from_function(lambda t: 1 + t // 4, total_steps=T)
CHANGES = {  # the plans of a run, each from a step on
    "longer rounds": {0: constant(2, total_steps=T), 11: constant(10, total_steps=T)},
    "shorter rounds": {0: constant(10, total_steps=T), 11: constant(2, total_steps=T)},
    "inside a round": {0: constant(8, total_steps=T), 13: constant(3, total_steps=T, offset=1)},
    "a longer run": {0: constant(4, total_steps=15), 15: GROWING},
    "there and back": {0: GROWING, 9: local_opt.constant(1, total_steps=T), 17: GROWING},
}


def step_of(opt):
    @jax.jit
    @vmap
    def step(x, state, grads):
        updates, state = opt.update(grads, state, x)
        return x + updates, state

    return step


def expected(ends):
    """[T, W] of SGD alone, with a mean after the steps of which `ends` are one past."""
    means = {end - 1: Mean() for end in ends}
    step = lambda w, t, x, state: (x - RATE * np.float64(GRADS[t, w]), state)  # noqa: E731
    return history(step, np.float64(0), [()] * W, T, means)


def ends_of(plans):
    until = [*plans, T][1:]
    pairs = zip(plans.items(), until, strict=True)
    return {e for (begin, plan), end in pairs for e in problems.ends_of(plan) if begin < e <= end}


def run(plans):
    """Each part with the optimizer of its plan, and a state as from a checkpoint."""
    make = lambda plan: local_opt.local_steps(optax.sgd(RATE), plan)  # noqa: E731
    x, results = jnp.zeros(W), []
    state = jax.vmap(make(plans[0]).init)(x)
    for begin, end in zip(plans, [*plans, T][1:], strict=True):
        step, state = step_of(make(plans[begin])), pickle.loads(pickle.dumps(state))
        for t in range(begin, end):
            x, state = step(x, state, GRADS[t])
            results.append(x)
    return np.stack(results), state


@pytest.mark.parametrize("name", CHANGES)
def test_the_plan_in_force_decides(name):
    plans = CHANGES[name]
    result, state = run(plans)
    ends = ends_of(plans)
    np.testing.assert_allclose(result, expected(ends), atol=1e-6)
    assert state.num_syncs.tolist() == [len(ends)] * W and state.num_steps.tolist() == [T] * W


@pytest.mark.parametrize("mesh", mostly_slow(("vmap", "shard_map"), quick=("shard_map",)))
def test_syncs_of_the_host_do_not_move_the_plan(mesh):
    opt = local_opt.local_steps(optax.sgd(RATE), constant(10, total_steps=T))

    def steps(x, grads):
        state, results = opt.init(x), []
        for t in range(T):
            updates, state = opt.update(grads[t], state, x, sync=True if t < 20 else None)
            x = x + updates
            results.append(x)
        return jnp.stack(results), state.num_syncs

    result, syncs = jax.jit(RUNS[mesh](steps))(jnp.zeros(W), GRADS.T)
    np.testing.assert_allclose(np.asarray(result).T, expected({*range(1, 21), 30, 40}), atol=1e-6)
    assert syncs.tolist() == [22] * W


TURNS = {  # of two fragments in 13 steps: until a step, and from it on
    "on its way": ((4, 1), 6, (3, 1)),  # 0 was sent at 5 and arrives at 7
    "never sent": ((6, 3), 7, (3, 0)),  # 0 would have been sent at 6, to arrive at 8
    "at once": ((5, 2), 5, (2, 1)),
}


@pytest.mark.parametrize("name", TURNS)
def test_fragments_go_on_under_other_plans(name):
    (old, offset), change, (new, other) = TURNS[name]
    delay, total = 2, 13
    plans = [
        {f: constant(h, total_steps=total, offset=at + f) for f in range(2)}
        for h, at in ((old, offset), (new, other))
    ]
    stream = local_opt.streaming.streaming_rounds(
        optax.sgd(RATE), fragments=2, outer=optax.sgd(0.7, 0.5, nesterov=True)
    )

    first = local_opt.streaming.stream_segments(plans[0], delay=delay)
    rest = local_opt.streaming.stream_segments(plans[1], delay=delay, start=change, before=plans[0])
    cut = [s._replace(end=min(s.end, change)) for s in first if s.begin < change]
    actual, *_ = problems.run_segments(stream, cut + rest)
    ends = [
        {e for e in problems.ends_of(was) if e < change}
        | {e for e in problems.ends_of(now) if e >= change}
        for was, now in zip(*(p.values() for p in plans), strict=True)
    ]
    expected = problems.expected_stream(ends, delay, 0.5, (0.7, 0.5), rate=RATE)
    assert problems.distance(actual, expected) < 2e-6


def beyond(count, **more):
    """An update of one worker that has taken so many steps of a plan of ten."""
    opt = local_opt.local_steps(optax.sgd(RATE), constant(5, total_steps=10), axis_name=())
    x = jnp.zeros(3)
    state = opt.init(x)._replace(num_steps=jnp.int32(count))
    return lambda: opt.update(x, state, x, **more)


def test_the_last_step_and_a_host_that_decides_are_not_refused():
    beyond(9)()
    beyond(15, sync=True)()
