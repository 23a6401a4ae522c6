"""Fragments in turn are the streaming rounds of the library, fragment by fragment."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from experiments.study import fragments
from experiments.study.tables import SYNC_RULES
from experiments.training.config import RunConfig

OUTER = optax.sgd(0.7, 0.9, nesterov=True)
RATES = np.cos(np.linspace(0, 1.55, 120))  # falling to a fiftieth


@pytest.mark.parametrize("name", ["constant", "matched", "qsr", "qsr+h_max8"])
def test_a_run_in_turn_equals_streaming_by_segments(name):
    given = RunConfig(RATES, seed=0)
    rule = SYNC_RULES[f"{name}+nesterov0.7_0.9+fragments2"]
    plans = fragments.plans_in_turn(SYNC_RULES[name].plan, given, 2)
    whole = rule.plan(given)
    ends = {e for plan in plans for e in plan.ends.tolist()}
    assert set(whole.ends.tolist()) == ends and rule.fragments == 2
    assert len(plans[0].ends) <= len(plans[1].ends) <= len(plans[0].ends) + 1

    inner, total = optax.adam(0.1), given.total_steps
    x = {"a": jnp.zeros((2, 3)), "b": jnp.ones((2, 3))}  # of two workers
    targets = jax.random.normal(jax.random.key(0), (total, 2, 3))
    turns = rule.rounds(inner, axis_name="worker")
    stream = local_opt.streaming_rounds(inner, fragments=2, mixing=0.0, outer=OUTER)

    def step(rounds):
        def one(x, state, t):
            grads = jax.tree.map(lambda p: p - targets[t], x)
            updates, state = jax.vmap(rounds.update)(grads, state, x)
            return optax.apply_updates(x, updates), state

        return jax.jit(one)

    sync = jax.jit(jax.vmap(turns.sync, axis_name="worker"))
    by_turn, states, step_in_turn = x, jax.vmap(turns.init)(x), step(turns)
    seen = []
    for t in range(total):
        by_turn, states = step_in_turn(by_turn, states, t)
        if whole.syncs_after(t):
            by_turn, states = sync(by_turn, states)
        seen.append(by_turn)

    state, step_of_stream = jax.vmap(stream.init)(x), step(stream)
    for begin, end, due in local_opt.stream_segments(dict(enumerate(plans))):
        if begin == total:  # there the rest is averaged where the model is evaluated
            break
        talk = jax.vmap(lambda x, s, due=due: stream.communicate(x, s, due), axis_name="worker")
        x, state = talk(x, state)
        if begin:
            # Up to the rounding of another program: values are of size 1.
            close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
            jax.tree.map(close, seen[begin - 1], x)
        for t in range(begin, end):
            x, state = step_of_stream(x, state, t)


def test_fragments_that_cannot_take_turns_are_refused():
    with pytest.raises(ValueError, match="2 fragments cannot take turns .* raise --h_base"):
        SYNC_RULES["constant+fragments2"].plan(RunConfig(RATES, seed=0, h_base=1))
    with pytest.raises(ValueError, match="fragments have no correction"):
        SYNC_RULES["qsr+control+fragments2"].rounds(optax.sgd(0.1), axis_name="worker")
