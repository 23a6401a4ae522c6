"""The Pallas kernel of the signs equals the scan, which `test_kernel.py` compares with NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import ordering
from experiments.study.compile import CUDA, LIBTPU, slice_of
from ordering import sign_loop
from syncopate import mesh
from tests import tables
from tests.compiled_runs import marks_of, text_of

RULES = {
    "greedy": ordering.greedy(),
    "walk": ordering.self_balancing_walk(bound=40.0),
    "halving": ordering.kernel_halving(num_epochs=7, num_pairs=30),
}
LOOPS = {
    "scan": sign_loop.signs_by_scan,
    "kernel": functools.partial(sign_loop.signs_in_kernel, interpret=True),
}


def products(size, seed):
    """Of whole numbers, with ties; some vectors are not valid or not finite."""
    vectors, rng = tables.whole_numbers((size, 3), seed, high=3), np.random.default_rng(seed)
    gram = vectors @ vectors.T
    dots = gram[:, 0] - 1
    dots[rng.random(size) < 0.1] = np.nan
    return [jnp.asarray(x, jnp.float32) for x in (dots, gram)], jnp.asarray(rng.random(size) < 0.9)


@functools.cache
def compiled(loop, rule):
    run = functools.partial(LOOPS[loop], RULES[rule])
    return jax.jit(run), jax.jit(jax.vmap(run, in_axes=(None, 0, 0, 0)))


def plain(state):
    """Numbers of a rule's state."""
    return [np.asarray(x) for x in jax.tree.leaves(state) if not mesh.is_key(x)]


@pytest.mark.parametrize("rule", RULES)
@given(size=st.sampled_from([1, 2, 7, 64]), seed=st.integers(0, 99))
def test_the_kernel_equals_the_scan(rule, size, seed):
    (dots, gram), valid = products(size, seed)
    state = RULES[rule].init(jax.random.key(seed))
    for _ in range(2):  # the state goes on
        found = [compiled(loop, rule)[0](state, dots, gram, valid) for loop in LOOPS]
        states, signs = zip(*found, strict=True)
        np.testing.assert_array_equal(*signs)
        for one, other in zip(*map(plain, states), strict=True):
            np.testing.assert_array_equal(one, other)
        taken = np.asarray(valid) & np.isfinite(np.asarray(dots))
        assert not np.asarray(signs[0])[~taken].any() and np.abs(signs[0])[taken].all()
        state = states[1]


@pytest.mark.parametrize("rule", RULES)
def test_workers_on_one_device_are_a_batch(rule):
    found = [products(5, seed) for seed in range(3)]
    dots, gram, valid = (jnp.stack(x) for x in zip(*[(*a, v) for a, v in found], strict=True))
    state = RULES[rule].init(jax.random.key(0))
    states, signs = compiled("kernel", rule)[1](state, dots, gram, valid)
    for i, ((one_dots, one_gram), one_valid) in enumerate(found):
        one, expected = compiled("scan", rule)[0](state, one_dots, one_gram, one_valid)
        np.testing.assert_array_equal(signs[i], expected)
        for batch, single in zip(plain(states), plain(one), strict=True):
            np.testing.assert_array_equal(batch[i], single)


def test_a_rule_with_arrays_in_its_state_is_signed_by_the_scan(monkeypatch):
    called = []
    for name in ("signs_by_scan", "signs_in_kernel"):
        loop = functools.partial(called.append, name)
        monkeypatch.setattr(sign_loop, name, lambda rule, *args, loop=loop: loop())
    args = jnp.zeros(2), jnp.zeros((2, 2)), jnp.ones(2, bool)
    for platform in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(sign_loop.mesh, "platform", lambda platform=platform: platform)
        sign_loop.signs_of(RULES["walk"], RULES["walk"].init(jax.random.key(0)), *args)
        sign_loop.signs_of(ordering.greedy(), jnp.zeros(4), *args)
    assert called == ["signs_by_scan"] * 4 + ["signs_in_kernel", "signs_by_scan"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "chip,kernels",
    [
        pytest.param("v5e", 1, marks=marks_of(LIBTPU)),
        pytest.param("v6e", 1, marks=marks_of(LIBTPU)),
        pytest.param("h100", 0, marks=marks_of(CUDA)),
    ],
)
def test_compiled_for_a_tpu_the_loop_is_one_kernel(chip, kernels, rule):
    of_chip, _ = slice_of(f"{chip}:1", 1)
    state = jax.eval_shape(RULES[rule].init, jax.random.key(0))
    args = state, jnp.zeros(64), jnp.zeros((64, 64)), jnp.zeros(64, bool)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(of_chip, jax.P())),
        args,
    )
    with jax.set_mesh(of_chip):
        lowered = jax.jit(functools.partial(sign_loop.signs_of, RULES[rule])).lower(*args)
    text = text_of(lowered, chip)
    assert text.count('custom_call_target="tpu_custom_call"') == kernels
    assert (" while(" in text) == (not kernels)
