"""Mistakes in calling an order raise a ValueError that says what to pass instead."""

import jax
import jax.numpy as jnp
import pytest

import ordering
from tests import tables

M, B, W, D = 6, 2, 2, 5
ORDERS = {name: row.make(M, B) for name, row in tables.ORDERS.items()}
DEALT = {
    "dealt": ordering.dealt(ORDERS["cd_grab"], M),
    "dealt at syncs": ordering.dealt(ORDERS["cd_grab, at syncs"], M),
    "dealt_reshuffling": ordering.dealt_reshuffling(M),
}
NEED_AXIS = {n: o for n, o in ORDERS.items() if tables.ORDERS[n].coordinated} | DEALT
OBSERVE = {n: o for n, o in ORDERS.items() if tables.ORDERS[n].observes}
OBSERVE["cd_grab, odd steps"] = ordering.cd_grab(M, units_per_step=1)
PARAMS = jnp.zeros(D)


def over_workers(function, *args):
    """Traces a function of one worker for all workers, without compiling it."""
    return jax.eval_shape(jax.vmap(function, axis_name="worker"), *args)


def states(order, params=PARAMS):
    keys = jax.random.split(jax.random.key(0), W)
    return over_workers(lambda key: order.init(key, params), keys)


def observe(order, rows, params=PARAMS):
    """Every worker observes the rows `rows(worker)`."""
    return over_workers(
        lambda state, worker: order.observe(state, rows(worker)), states(order, params),
        jnp.arange(W),
    )  # fmt: skip


def zeros(units, width=D):
    """`worker -> Rows` of zeros, which depend on the worker, since vmap must batch what is sent."""
    return lambda worker: ordering.Rows.of(jnp.zeros((units, width)) + worker)


@pytest.mark.parametrize("name", NEED_AXIS)
def test_calls_outside_of_the_axis_name_it(name):
    order = NEED_AXIS[name]
    needed = "axis 'worker' is not .*axis_name='worker'.*shard_map.*lift.*axis_name="
    with pytest.raises(ValueError, match=needed):
        order.init(jax.random.key(0), PARAMS)
    run = jax.vmap(lambda key: order.init(key, PARAMS), axis_name="worker")
    state = jax.tree.map(lambda x: x[0], run(jax.random.split(jax.random.key(0), W)))
    rows = ordering.Rows.of(jnp.zeros((B, D)))
    if name != "dealt_reshuffling":
        with pytest.raises(ValueError, match=needed):  # gathered rows may wait for a sync
            order.sync(order.observe(state, rows))
    if name in DEALT:
        with pytest.raises(ValueError, match=needed):
            order.next_epoch(state)


def test_exchange_rows_outside_of_the_axis_names_it():
    rows = ordering.Rows.of(jnp.zeros((B, D)))
    with pytest.raises(ValueError, match="axis 'data' is not .*axis_name='data'"):
        ordering.exchange_rows(rows, axis_name="data")


@pytest.mark.parametrize("name", ORDERS | DEALT)
@pytest.mark.parametrize("given", [{"w": jnp.zeros((B, D))}, jnp.zeros((B, D))])
def test_gradients_must_be_wrapped_as_rows(name, given):
    order = (ORDERS | DEALT)[name]
    with pytest.raises(
        ValueError, match=r"got a \w+ where Rows are needed.*Rows\.of\(.*Rows\.of_gradient\("
    ):
        observe(order, lambda worker: given)


@pytest.mark.parametrize("name", OBSERVE)
def test_rows_must_have_the_width_of_the_state(name):
    size = 1 if "odd" in name else B
    observe(OBSERVE[name], zeros(size, D))
    with pytest.raises(ValueError, match=r"init .* params .*like one gradient"):
        observe(OBSERVE[name], zeros(size, D + 2))


@pytest.mark.parametrize("name", ["grab", "pair_balance"])
@pytest.mark.parametrize(
    "tree,message",
    [
        ({"a": (3,), "b": (2,)}, r"rows.tree\['a'\]: observe got \(3,\), .* \(2,\)"),
        ({"a": (2,)}, r"rows.tree\['b'\]: observe got none, .* \(3,\)"),
        ({"a": (2,), "b": (3,), "c": (1,)}, r"rows.tree\['c'\]: observe got \(1,\), .* none"),
    ],
)
def test_rows_must_have_the_leaves_of_the_state(name, tree, message):
    params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    rows = {leaf: jnp.zeros((B, *shape)) for leaf, shape in tree.items()}
    with pytest.raises(ValueError, match=message):
        observe(ORDERS[name], lambda w: ordering.Rows.of(rows), params)


@pytest.mark.parametrize("name", OBSERVE)
def test_rows_must_have_the_units_of_a_step(name):
    with pytest.raises(ValueError, match="rows of 4 units; .* units_per_step"):
        observe(OBSERVE[name], zeros(4, D))


@pytest.mark.parametrize("name", [n for n in OBSERVE if not n.startswith("cd_grab")])
def test_only_cd_grab_accepts_exchanged_rows(name):
    def exchanged(worker):
        return ordering.exchange_rows(zeros(B)(worker))[1]

    with pytest.raises(ValueError, match="rows of all 2 workers.*cd_grab"):
        observe(OBSERVE[name], exchanged)


@pytest.mark.parametrize("name", ORDERS | DEALT)
def test_legacy_keys_are_refused(name):
    order = (ORDERS | DEALT)[name]
    with pytest.raises(ValueError, match=r"legacy key.*jax\.random\.key\(seed\)"):
        over_workers(lambda key: order.init(key, PARAMS), jnp.zeros((W, 2), jnp.uint32))


@pytest.mark.parametrize("name", [n for n in ORDERS if n not in NEED_AXIS])
def test_keys_of_all_workers_need_vmap(name):
    with pytest.raises(ValueError, match=r"shape \(2,\).*one worker's key.*jax\.vmap"):
        ORDERS[name].init(jax.random.split(jax.random.key(0), W), PARAMS)
