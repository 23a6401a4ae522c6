"""Who counts in a merge by a quorum, and the mean of a sync with those weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import local_opt
from tests import reference_quorum

SECONDS = st.integers(0, 12).map(lambda n: n / 4)


@st.composite
def merges(draw):
    workers = draw(st.integers(1, 6))
    several = st.lists(SECONDS | st.just(np.inf), min_size=workers, max_size=workers)
    arrivals = draw(several)
    least = draw(st.integers(1, workers))
    arrivals[:least] = [t if t < np.inf else 3.0 for t in arrivals[:least]]
    tokens = st.lists(st.integers(1, 9), min_size=workers, max_size=workers)
    steps = st.lists(st.sampled_from([1, 2, 4]), min_size=workers, max_size=workers)
    return arrivals, least, draw(SECONDS), draw(tokens), draw(steps | st.none())


@given(merges())
def test_a_merge_equals_workers_that_come_one_after_another(case):
    arrivals, least, grace, tokens, steps = case
    found = local_opt.quorum(arrivals, least=least, grace=grace, tokens=tokens, steps=steps)
    seconds, weights = reference_quorum.merge(arrivals, least, grace, tokens, steps)
    assert found.seconds == seconds
    np.testing.assert_array_equal(found.weights, weights)
    assert np.sum(found.weights > 0) >= least
    # Many at once are each alone.
    twice = local_opt.quorum([arrivals, arrivals], least=least, grace=grace, tokens=tokens,
                             steps=steps)  # fmt: skip
    np.testing.assert_array_equal(twice.weights, [weights, weights])


def test_a_quorum_of_all_waits_for_all_whatever_the_grace():
    arrivals = np.random.default_rng(0).uniform(0, 9, (20, 5))
    for grace in (0.0, 4.0):
        merge = local_opt.quorum(arrivals, least=5, grace=grace, tokens=7)
        np.testing.assert_array_equal(merge.seconds, arrivals.max(axis=-1))
        np.testing.assert_array_equal(merge.weights, np.full((20, 5), 7.0))


def test_a_sync_takes_the_mean_of_those_that_count():
    merge = local_opt.quorum([3.0, 1.0, np.inf, 2.0], least=2, grace=1.0, tokens=[4, 1, 9, 2])
    assert merge.weights.tolist() == [4.0, 1.0, 0.0, 2.0] and merge.seconds == 3.0
    rounds = local_opt.local_rounds(optax.sgd(0.1))
    x = jnp.array([1.0, 2.0, jnp.nan, 4.0])  # the third has gone astray
    state = jax.vmap(rounds.init)(x)
    sync = jax.vmap(lambda x, s, v: rounds.sync(x, s, weight=v), axis_name="worker")
    x, _ = sync(x, state, jnp.asarray(merge.weights))
    np.testing.assert_allclose(x, np.full(4, (4 * 1 + 1 * 2 + 2 * 4) / 7), rtol=1e-6)


def test_what_is_refused_says_what_to_do():
    with pytest.raises(ValueError, match=r"least is 3, and of 4 workers fewer arrive: wait for"):
        local_opt.quorum([0.0, np.inf, 1.0, np.inf], least=3)
    with pytest.raises(ValueError, match="tokens is 0 for all workers that count: pass those"):
        local_opt.quorum([0.0, 2.0], least=1, tokens=[0, 5])
