"""Every key is used once: what draws from one key twice draws the same numbers twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import KeyReuseError

import local_opt
import models
import ordering
from ordering import echo
from syncopate import mesh
from tests import tables
from tests.cases import mostly_slow

W, M, B, D = 4, 6, 2, 3
ROWS = tables.whole_numbers((W, M, D))
OVER = {"vmap": tables.vmap_workers, "shard_map": tables.shard_map_workers}


@pytest.fixture(autouse=True)
def checked():
    """JAX counts the uses of every key, here alone: programs compile anew for it."""
    with jax.debug_key_reuse(True):
        yield


CASES = [(name, "vmap") for name in tables.ORDERS]
CASES += [("cd_grab", "shard_map"), ("cd_grab_walk", "shard_map")]


@pytest.mark.parametrize("name,over", mostly_slow(CASES, quick=CASES[::2]))
def test_an_order_uses_its_keys_once(name, over):
    order = tables.ORDERS[name].make(M, B)

    def epochs(key, rows):
        state = order.init(key, rows[0])
        for _ in range(2):
            state = tables.run_epoch(order, state, rows, B)
        return state.current

    OVER[over](epochs)(jax.random.split(jax.random.key(0), W), jnp.asarray(ROWS))


@pytest.mark.parametrize("name", tables.PLANS)
def test_a_plan_uses_its_key_once(name):
    tables.PLANS[name](12)


LEGACY, TYPED = jax.random.PRNGKey(3), jax.random.key(3)
TAKE_KEYS = {
    **{
        name: lambda key, row=row: row.make(M, B).init(key, ROWS[0, 0])
        for name, row in tables.ORDERS.items()
        if not row.coordinated
    },
    "bernoulli": lambda key: local_opt.bernoulli(0.5, total_steps=40, key=key).starts,
    "sketch": lambda key: ordering.make_sketch(key, size=4)(jnp.asarray(ROWS[0])),
    "loss": lambda key: ordering.per_example_grads(
        lambda p, x, key: p * x.sum() * jax.random.normal(key)
    )(jnp.ones(()), jnp.asarray(ROWS[0]), key=key),
    "echo": lambda key: echo.bernoulli(0.5, total_steps=40, key=key).load_steps,
    "model": lambda key: models.lenet().init(key),
}


@pytest.mark.parametrize("take", TAKE_KEYS.values(), ids=TAKE_KEYS)
def test_a_legacy_key_is_the_typed_one_of_its_numbers(take):
    with jax.debug_key_reuse(False):
        actual, wanted = (
            [jax.random.key_data(x) if mesh.is_key(x) else x for x in jax.tree.leaves(take(key))]
            for key in (LEGACY, TYPED)
        )
    assert len(actual) == len(wanted) > 0
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


ONE_KEY = {
    "counted": lambda keys: ordering.counted(4).init(keys, None),
    "index_shuffle": lambda keys: ordering.index_shuffle(0, 4, keys),
    "init_workers": lambda keys: ordering.init_workers(ordering.grab(4), keys, ROWS[0, 0], 2),
    "make_sketch": ordering.make_sketch,
    "sketched_grads": lambda keys: ordering.sketched_grads(lambda w, x: x @ w, keys),
}


@pytest.mark.parametrize("take", ONE_KEY.values(), ids=ONE_KEY)
def test_one_key_for_all_workers_is_asked_for_as_one(take):
    with pytest.raises(ValueError, match=r"key has shape \(2,\): pass one key, as key\[0\]"):
        take(jax.random.split(jax.random.key(0)))


def test_a_second_use_would_be_seen():
    with pytest.raises(KeyReuseError):
        key = jax.random.key(0)
        jax.random.uniform(key), jax.random.normal(key)
