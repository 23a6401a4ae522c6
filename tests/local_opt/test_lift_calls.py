"""How a lifted function is called: as the function that it wraps, by position and by keyword."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import local_opt
from tests.refused import refuses

W = 4
MESH = jax.make_mesh((W,), ("worker",), (AxisType.Auto,), devices=jax.devices()[:W])
WAYS = {"vmap": {"workers": W}, "mesh": {"workers": MESH}, "turns": {"workers": W, "in_turn": True}}
by_way = pytest.mark.parametrize("way", WAYS)
WORDS = {"inputs": "owned split", "outputs": "owned mean"}


def step(state, batch, scale=1.0, *, power: int = 1, train: bool = True):
    """One step of one worker."""
    if not train:
        return state, batch.mean()
    return state + scale * batch.mean() ** power, batch.mean()


def start():
    return jnp.zeros(W), jnp.arange(2.0 * W)


MEANS = 2 * np.arange(W) + 0.5  # of each worker's rows


def test_a_lifted_function_has_the_name_signature_and_docstring_of_its_own():
    lifted = local_opt.lift(step, W, **WORDS)
    assert inspect.signature(lifted) == inspect.signature(step)
    assert lifted.__name__ == "step" and lifted.__doc__ == step.__doc__


@by_way
def test_arguments_may_be_given_by_keyword(way):
    lifted = local_opt.lift(step, **WAYS[way], **WORDS)
    state, batch = start()
    for found in (lifted(state, batch=batch), lifted(batch=batch, state=state)):
        np.testing.assert_allclose(found[0], MEANS)
        np.testing.assert_allclose(found[1], MEANS.mean())
    np.testing.assert_allclose(lifted(state, batch, power=2)[0], MEANS**2)


@by_way
def test_jit_may_name_what_is_donated_and_what_is_static(way):
    lifted = local_opt.lift(step, **WAYS[way], **WORDS)
    run = jax.jit(lifted, donate_argnames="state", static_argnames=("power", "train"))
    state, batch = start()
    if way == "mesh":
        state = local_opt.owned(jnp.zeros(()), MESH)
    after, _ = run(state, batch=batch, power=3)
    np.testing.assert_allclose(after, MEANS**3)
    assert state.is_deleted()
    assert run(after, batch, train=False)[0].tolist() == (MEANS**3).tolist()


@by_way
def test_a_word_belongs_to_a_parameter_wherever_it_is_given(way):
    lifted = local_opt.lift(step, **WAYS[way], inputs="owned split owned", outputs="owned mean")
    state, batch = start()
    scale = jnp.arange(float(W))
    np.testing.assert_allclose(lifted(state, batch)[0], MEANS)
    np.testing.assert_allclose(lifted(state, scale=scale, batch=batch)[0], scale * MEANS)


def test_functions_of_any_number_of_arguments_take_words_by_position():
    def total(*rows, offset=0):
        return sum(rows) + offset

    lifted = local_opt.lift(total, W, inputs="owned shared owned", outputs="owned")
    ones = jnp.ones(W)
    assert lifted(ones, 2.0, ones, offset=jnp.arange(2)).tolist() == [[4, 5]] * W
    partial = functools.partial(step, power=2)
    found, _ = local_opt.lift(partial, W, **WORDS)(*start())
    np.testing.assert_allclose(found, MEANS**2)
    assert local_opt.lift(jax.jit(step), W, **WORDS)(*start())[0].shape == (W,)


def test_a_call_that_the_function_would_not_take_is_a_type_error():
    lifted = local_opt.lift(step, W, **WORDS)
    with pytest.raises(TypeError, match="missing a required argument: 'batch'"):
        lifted(jnp.zeros(W))
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        lifted(*start(), rows=1)


test_words_that_fit_no_parameter_are_refused = refuses({
    "too many": (
        lambda: local_opt.lift(lambda x: x, W, inputs="owned split", outputs="owned"),
        r"inputs has 2 words and the function takes \(x\): give one word",
    ),
    "too few": (
        lambda: local_opt.lift(step, W, **WORDS)(*start(), 2.0),
        r"3 arguments came for \(state, batch, scale.* and inputs are .*: give one word",
    ),
    "by keyword": (
        lambda: local_opt.lift(step, W, **WORDS)(*start(), scale=2.0),
        "3 arguments came for",
    ),
})  # fmt: skip


@by_way
def test_a_sum_is_over_all_workers(way):
    def right(shift, rows):
        narrow = jnp.full((), 100, jnp.int8) + shift.astype(jnp.int8)
        return {"right": rows > 3, "count": rows.size, "narrow": narrow}, rows

    lifted = local_opt.lift(right, **WAYS[way], inputs="owned split", outputs="sum sum")
    counts, rows = jax.jit(lifted)(jnp.zeros(W), jnp.arange(2.0 * W))
    assert counts["right"].tolist() == [2, 2] and counts["right"].dtype == jnp.int32
    assert counts["narrow"].tolist() == 400, "not in eight bits"
    assert counts["count"].tolist() == 2 * W, "numbers of Python are every worker's"
    np.testing.assert_allclose(rows, [12, 16])


@by_way
def test_a_mean_of_whole_numbers_is_their_mean(way):
    def one(x):
        return x, x > 1

    lifted = local_opt.lift(one, **WAYS[way], inputs="owned", outputs="mean mean")
    mean, share = jax.jit(lifted)(jnp.arange(W))
    assert float(mean) == 1.5 and float(share) == 0.5


def test_keys_have_neither_mean_nor_sum():
    keys = jax.random.split(jax.random.key(0), W)
    for word in ("mean", "sum"):
        lifted = local_opt.lift(lambda x: {"key": x}, W, inputs="owned", outputs=word)
        with pytest.raises(
            ValueError, match=rf"a key has no {word}, as the result .*'key'.* take 'owned'"
        ):
            lifted(keys)
