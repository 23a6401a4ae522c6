"""Mistakes in calling an order raise a ValueError that says what to pass instead.

Messages are here once; every public function with every bad argument, and every order with the
states of the others, in tests/project/test_bad_inputs.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from tests import tables
from tests.refused import refuses

M, B, W, D = 6, 2, 2, 5
ORDERS = {name: row.make(M, B) for name, row in tables.ORDERS.items()}


GLOBAL = {
    "global": ordering.global_order(ORDERS["cd_grab"], M),
    "global, at syncs": ordering.global_order(ORDERS["cd_grab, at syncs"], M),
    "global_reshuffling": ordering.global_reshuffling(M),
}
NEED_AXIS = {name: ORDERS[name] for name in ("cd_grab", "cd_grab, at syncs")} | GLOBAL
PARAMS, KEY = jnp.zeros(D), jax.random.key(0)


def squares(params, batch, key):
    return jnp.square(batch @ params)


def over_workers(function, *args):
    """Traces a function of one worker for all workers, without compiling it."""
    return jax.eval_shape(jax.vmap(function, axis_name="worker"), *args)


def states(order, params=PARAMS):
    keys = jax.random.split(KEY, W)
    return over_workers(lambda key: order.init(key, params), keys)


def observe(order, rows, params=PARAMS):
    """Every worker observes the rows `rows(worker)`."""
    return over_workers(
        lambda state, worker: order.observe(state, rows(worker)), states(order, params),
        jnp.arange(W),
    )  # fmt: skip


def zeros(units, width=D):
    """`worker -> gradients`, zeros that vmap batches, as it must what is sent."""
    return lambda worker: jnp.zeros((units, width)) + worker


@pytest.mark.parametrize("name", NEED_AXIS)
def test_calls_outside_of_the_axis_name_it(name):
    order = NEED_AXIS[name]
    needed = "axis 'worker' is not .*axis_name='worker'.*shard_map.*map_workers.*axis_name="
    with pytest.raises(ValueError, match=needed):
        order.init(jax.random.key(0), PARAMS)
    run = tables.vmap_workers(lambda key: order.init(key, PARAMS))
    state = jax.tree.map(lambda x: x[0], run(jax.random.split(jax.random.key(0), W)))
    rows = jnp.zeros((B, D))
    if name != "global_reshuffling":
        with pytest.raises(ValueError, match=needed):  # gathered rows may wait for a sync
            order.sync(order.observe(state, rows))
    if name in GLOBAL:
        with pytest.raises(ValueError, match=needed):
            order.next_epoch(state)


def test_sizes_of_numpy_do_not_overflow():
    """200 units as uint8: their number of blocks, and of all workers, is more than 255."""
    order = ordering.baselines.block_reshuffling(np.uint8(200), block_size=np.uint8(3))
    second = order.next_epoch(order.next_epoch(order.init(KEY)))
    assert sorted(second.current.tolist()) == list(range(200))
    assert states(ordering.global_reshuffling(np.uint8(200))).current.shape == (W, 200)


Z = jnp.ones((2, D))
LOSSES = {  # what the loss returns, the message
    "a tuple": (lambda x: (x, 1.0), "returned a tuple .* pass has_aux=True"),
    "a dict": (lambda x: {"loss": x}, "returned a dict as losses"),
    "integers": (lambda x: x.astype(int), r"returned int32\[\d\] .* real numbers"),
    "no losses": (lambda x: x[:0], r"returned float32\[0\]"),
    "rows of it": (lambda x: jnp.ones((1, 5)), r"the shape \(1, 1, 5\): return one loss|\(1, 5\)"),
}
MAKERS = {
    "per_example": ordering.per_example_grads,
    "in turn": functools.partial(ordering.per_example_grads, in_turn=True),
    "sketched": lambda loss, **given: ordering.sketched_grads(loss, KEY, size=3, **given),
}


def gradients(
    loss=squares, params=PARAMS, batch=Z, key=KEY, make=ordering.per_example_grads, **given
):
    return lambda: jax.eval_shape(lambda: make(loss, **given)(params, batch, key=key)[:2])


test_losses_of_another_form_are_refused = refuses({
    f"{maker}, {what}": (
        gradients(lambda *args, key, to=to: to(squares(*args, key)), make=make), message
    )
    for maker, make in MAKERS.items() for what, (to, message) in LOSSES.items()
})  # fmt: skip


@functools.cache
def pairs_state(workers, num_units, size, make=ordering.pair_balance):
    order = make(num_units, units_per_step=size)
    keys = jax.random.split(KEY, workers)
    return jax.jit(jax.vmap(lambda key: order.init(key, PARAMS)))(keys), order


def walking(num_units, **sizes):
    return ordering.pair_balance(num_units, rule=ordering.baselines.self_balancing_walk(), **sizes)


def resized(state=None, fresh=(2, 9, 3), make=ordering.pair_balance, units=(3, 6)):
    state = state or pairs_state(3, 6, 2)[0]
    numbers = units and np.arange(18).reshape(units)
    new = pairs_state(*fresh, make=make)
    return lambda: ordering.resize(state, *new, numbers, units_per_step=2, visited=0)


def observed(name, rows, params=PARAMS):
    return lambda: observe(ORDERS[name], rows, params)


def epoch_of(name, state):
    return lambda: over_workers(ORDERS[name].next_epoch, states(ORDERS[state]))


def begin(like=None, workers=None, order=ORDERS["unzip"]):
    return lambda: ordering.init_workers(order, KEY, like, workers)


test_bad_input = refuses({
    "a scalar": (observed("grab", lambda w: w * 1.0),
                 r"gradients of units must be arrays .*lambda g: g\[None\]"),
    "width": (observed("cd_grab", zeros(B, D + 2)), r"init .* params .*like one gradient"),
    "units of a step": (observed("grab", zeros(4)), "gradients of 4 units; .* units_per_step"),
    "seed": (lambda: ORDERS["grab"].init(0, PARAMS), r"key is 0 .int.*jax\.random\.key\(seed\)"),
    "keys of all": (lambda: ORDERS["grab"].init(jax.random.split(KEY, W), PARAMS),
                    r"shape \(2,\).*one worker's key.*jax\.vmap"),
    "another state": (epoch_of("grab", "unzip"), "a state of this order"),
    "num_units": (
        lambda: ordering.baselines.unzip(2.0), "num_units is 2.0: pass a whole number in 1"),
    "uncalled rule": (lambda: ordering.grab(4, rule=ordering.baselines.self_balancing_walk),
                      r"rule is .*: pass a SignRule.*walk\(\)"),
    "no params": (lambda: states(ORDERS["grab"], None), "params holds no numbers .*shapes of"),
    "no shapes": (begin(squares), r"like is .*: pass a tree of arrays of the shapes of one unit's"),
    "no order": (begin(order=3), "order is 3: pass an Ordering"),
    "no workers": (begin(workers=0), "workers is 0: pass a whole number >= 1"),
    "no axis": (begin(workers=jax.make_mesh((2, 1), ("data", "model"))),
                r"the mesh has the axes \('data', 'model'\)"),
    "no aux": (gradients(has_aux=True), r"with has_aux=True return a tuple \(losses, aux\)"),
    "params": (gradients(lambda *_: 1.0, PARAMS > 0), "dtype .*: gradients are arrays of real num"),
    "batch": (gradients(batch=4.0), "the batch must be arrays with a common leading axis"),
    "uncalled order": (
        lambda: ordering.global_order(ordering.cd_grab, 4), "order is <function cd_grab"),
    "sketch of nothing": (lambda: ordering.make_sketch(KEY)({}), "nothing to sketch in {}"),
    "repeated": (
        lambda: ordering.baselines.herding_bound(
            jnp.ones((2, 3, 1)), np.array([[0, 1, 2], [0, 0, 1]])),
        "orders are no permutations of the units 0 .. 2",
    ),
    "fewer units": (resized(fresh=(2, 4, 2)), "of 3 workers with 6 units.* of 2 workers with 4"),
    "another order": (resized(make=ordering.grab), "PairBalanceState.*cannot go on as a GrabState"),
    "one worker": (
        resized(ORDERS["pair_balance"].init(KEY, PARAMS)),
        "state is a PairBalanceState: pass a state of an order, of all workers",
    ),
    "another rule": (resized(make=walking), "orders with other sign rules: pass states of one"),
    "rows of whole steps": (
        lambda: observe(ordering.grab(8, units_per_step=4), zeros(3)),
        r"gradients of 3 units; a step has 4 \(of 8\)\. Slice",
    ),
    "no units": (resized(units=None), "some units belong to several workers: pass as units"),
})  # fmt: skip


def test_traced_orders_and_integers_are_accepted():
    """Bounds in a compiled step."""
    bound = jax.jit(ordering.baselines.herding_bound)(jnp.eye(3), jnp.arange(3))
    assert bound == ordering.baselines.herding_bound(jnp.eye(3), np.arange(3, dtype=np.uint8))
