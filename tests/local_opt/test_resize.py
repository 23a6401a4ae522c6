"""What rounds keep when they go on with another number of workers, and what becomes a mean."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import local_opt
from local_opt.resize import mean_of, resize
from local_opt.rounds import AccumulateState, LocalState

ROWS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def equal(value, workers):
    return np.repeat(np.asarray(value)[None], workers, axis=0)


def state_of(workers, inner):
    """As in a round: workers differ in what is their own."""
    return LocalState(
        since=equal(np.int32(3), workers),
        inner=inner,
        anchor=equal(ROWS[0], workers),
        outer={"trace": equal(ROWS[1], workers)},
        residual=ROWS[:workers],
        drift=np.arange(workers, dtype=np.float32),
        correction=ROWS[:workers],
    )


@pytest.mark.parametrize("before,after", [(6, 4), (2, 5), (1, 3)])
@pytest.mark.parametrize("policy", ["mean", "reset", "first"])
def test_shared_fields_stay_and_the_policy_decides_about_others(before, after, policy):
    inner = {"mu": ROWS[:before], "count": np.arange(before, dtype=np.int32) + 7}
    first = {"mu": equal(ROWS[5], after), "count": np.zeros(after, np.int32)}
    fresh = state_of(after, first)._replace(correction="begun anew")
    new = resize(state_of(before, inner), fresh, after, policy)
    mean = np.mean(ROWS[:before].astype(np.float64), axis=0).astype(np.float32)
    mu, count = {"mean": (mean, 7), "reset": (ROWS[5], 0), "first": (ROWS[0], 7)}[policy]
    np.testing.assert_array_equal(new.inner["mu"], equal(mu, after))
    np.testing.assert_array_equal(new.inner["count"], equal(np.int32(count), after))
    np.testing.assert_array_equal(new.residual, equal(mean, after))
    for name in ("since", "anchor"):
        np.testing.assert_array_equal(getattr(new, name), getattr(fresh, name))
    np.testing.assert_array_equal(new.outer["trace"], fresh.outer["trace"])
    assert (new.drift == (before - 1) / 2).all() and new.correction == "begun anew"


def test_accumulated_gradients_keep_their_mean_and_one_optimizer():
    inner = {"mu": equal(ROWS[2], 6)}
    new = resize(AccumulateState(equal(np.int32(2), 6), inner, ROWS), None, 4, "reset")
    mean = np.mean(ROWS, axis=0, dtype=np.float64).astype(np.float32)
    np.testing.assert_array_equal(new.inner["mu"], equal(ROWS[2], 4))
    np.testing.assert_array_equal(new.mean, equal(mean, 4))
    assert new.since.tolist() == [2] * 4


def test_means_are_taken_in_float64_and_keep_their_type():
    rows = ROWS.astype(ml_dtypes.bfloat16)
    result = mean_of({"w": rows, "n": np.arange(6)}, 2)
    wide = rows.astype(np.float64).mean(axis=0).astype(ml_dtypes.bfloat16)
    assert result["w"].dtype == rows.dtype and result["n"].tolist() == [0, 0]
    np.testing.assert_array_equal(result["w"], equal(wide, 2))


def streams_of(keys):
    return {tuple(row.ravel()) for row in np.asarray(jax.random.key_data(keys))}


@pytest.mark.parametrize("before,after", [(4, 2), (2, 5), (1, 3), (3, 3)])
def test_workers_keys_become_new_ones_of_their_own(before, after):
    key = jax.random.split(jax.random.key(0), 2)  # two in a state
    copies = local_opt.replicate({"dropout": key, "w": jnp.ones(2)}, before, keys="fold")
    result = mean_of(copies, after)["dropout"]
    assert result.shape == (after, 2) and result.dtype == key.dtype
    drawn = streams_of(result.reshape(-1))
    assert len(drawn) == 2 * after and not drawn & streams_of(copies["dropout"].reshape(-1))


def test_keys_that_all_workers_share_stay_shared():
    copies = local_opt.replicate({"noise": jax.random.key(3)}, 4, keys="copy")
    for result in (mean_of(copies, 2)["noise"], mean_of(copies, 6)["noise"]):
        assert streams_of(result) == streams_of(copies["noise"])


@pytest.mark.parametrize("policy", ["mean", "first"])
def test_keys_in_optimizer_states_are_new_and_legacy_ones_are_named(policy):
    """As of `optax.add_noise`."""
    keys = jax.random.split(jax.random.key(0), 4)
    fresh = state_of(2, {"rng_key": keys[:2]})
    new = resize(state_of(4, {"rng_key": keys}), fresh, 2, policy)
    assert len(streams_of(new.inner["rng_key"])) == 2
    legacy = np.asarray(jax.random.key_data(keys))
    fresh = state_of(2, {"rng_key": legacy[:2]})
    with pytest.raises(ValueError, match=r"rng_key.* is uint32\[4, 2\] .*legacy keys.*wrap_key"):
        resize(state_of(4, {"rng_key": legacy}), fresh, 2, policy)
    same = resize(state_of(4, {"rng_key": equal(legacy[0], 4)}), fresh, 2, policy)
    np.testing.assert_array_equal(same.inner["rng_key"], equal(legacy[0], 2))


def test_the_outer_optimizers_key_stays_one_for_all_workers():
    one = state_of(1, {})._replace(outer={"rng_key": jax.random.split(jax.random.key(5), 1)})
    new = resize(one, state_of(3, {}), 3, "mean")
    assert streams_of(new.outer["rng_key"]) == streams_of(one.outer["rng_key"])
