"""Every key is used once: what draws from one key twice draws the same numbers twice."""

import jax
import jax.numpy as jnp
import pytest
from jax.errors import KeyReuseError

from tests import tables

W, M, B, D = 4, 6, 2, 3
ROWS = tables.whole_numbers((W, M, D))
LIFTS = {"vmap": tables.vmap_workers, "shard_map": tables.shard_map_workers}


@pytest.fixture(autouse=True)
def checked():
    """JAX counts the uses of every key, here alone: programs compile anew for it."""
    with jax.debug_key_reuse(True):
        yield


CASES = [(name, "vmap") for name in tables.ORDERS]
CASES += [(name, "shard_map") for name, row in tables.ORDERS.items() if row.coordinated]


@pytest.mark.parametrize("name,lift", CASES)
def test_an_order_uses_its_keys_once(name, lift):
    order = tables.ORDERS[name].make(M, B)

    def epochs(key, rows):
        state = order.init(key, rows[0])
        for _ in range(2):
            state = tables.run_epoch(order, state, rows, B)
        return state.current

    LIFTS[lift](epochs)(jax.random.split(jax.random.key(0), W), jnp.asarray(ROWS))


@pytest.mark.parametrize("name", tables.PLANS)
def test_a_plan_uses_its_key_once(name):
    tables.PLANS[name](12)


def test_a_second_use_would_be_seen():
    with pytest.raises(KeyReuseError):
        key = jax.random.key(0)
        jax.random.uniform(key), jax.random.normal(key)
