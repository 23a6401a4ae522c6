"""Mistakes in calling an order raise a ValueError that says what to pass instead."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ordering
from ordering.resize import resize
from tests import tables
from tests.refused import refuses

M, B, W, D = 6, 2, 2, 5
ORDERS = {name: row.make(M, B) for name, row in tables.ORDERS.items()}


def dealt_orders(num_units, orders):
    dealt = {
        f"dealt, {how}": ordering.dealt(orders["cd_grab"], num_units, how=how)
        for how in ordering.dealing.HOW
    }
    return dealt | {
        "dealt at syncs": ordering.dealt(orders["cd_grab, at syncs"], num_units),
        "dealt, some wait": ordering.dealt(orders["cd_grab"], num_units, total=3 * num_units),
        "dealt_reshuffling": ordering.dealt_reshuffling(num_units),
    }


DEALT = dealt_orders(M, ORDERS)
NEED_AXIS = {n: o for n, o in ORDERS.items() if tables.ORDERS[n].coordinated} | DEALT
OBSERVE = {n: o for n, o in ORDERS.items() if tables.ORDERS[n].observes}
OBSERVE["cd_grab, odd steps"] = ordering.cd_grab(M, units_per_step=1)
PARAMS, KEY = jnp.zeros(D), jax.random.key(0)
PAIRS = jnp.zeros((3, 2))


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


def epoch_of(order, state, size):
    """A step and the end of an epoch, from a state of all workers."""

    def one(state, worker):
        return order.next_epoch(order.sync(order.observe(state, zeros(size)(worker))))

    return over_workers(one, state, jnp.arange(W))


def form(state):
    return jax.tree.structure(state), [leaf.shape for leaf in jax.tree.leaves(state)]


def other_orders():
    """{(name, M, B): order}: every order, with other numbers of units, and odd steps."""
    found = {}
    for units, size in ((M, B), (4, B), (M, 3)):
        orders = {name: row.make(units, size) for name, row in tables.ORDERS.items()}
        for name, order in (orders | dealt_orders(units, orders)).items():
            found[name, units, size] = order
    return found


def refuses_state(order, state):
    """Whether every call of one worker refuses this state before it looks further."""
    calls = (lambda state: order.observe(state, None), order.next_epoch, order.sync)
    for call in calls:
        message = ""
        try:
            call(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state))
        except Exception as error:
            message = str(error)
        if "a state of this order" not in message:
            return False
    return True


def test_the_state_of_another_order_is_refused():
    """Each of 57 orders gets the states of all others: they would lose units."""
    orders = other_orders()
    begun = {name: states(order) for name, order in orders.items()}
    others = {str(form(state)): state for state in begun.values()}
    late = []
    for name, order in orders.items():
        for state in others.values():
            if form(state) == form(begun[name]) or refuses_state(order, state):
                continue
            late.append(name)
            with pytest.raises(ValueError, match="a state of this order|like one gradient"):
                epoch_of(order, state, name[2])
    # Only gradients tell those of coordinated pairs apart, and only the axis those of dealt orders.
    assert (len(others), len(late)) == (41, 50)


NO_NUMBER = (float("nan"), float("inf"), -1, 0, "4", True, 4j, [4], np.array([4, 4]))
NO_COUNT = (*NO_NUMBER, 1.5, 2**40)
HALVING = {"num_epochs": 4, "num_pairs": 4}


def makers_of(argument):
    """The public orders that take an argument, by name."""
    given = {} if argument == "num_units" else {"num_units": 8}
    for name in ("pair_balance", "cd_grab", "grab", "greedy_herding"):
        yield name, functools.partial(getattr(ordering, name), **given)
    if argument == "num_units":
        for name in ("random_reshuffling", "shuffle_once", "flip_flop", "unzip"):
            yield name, getattr(ordering, name)
        yield "dealt_reshuffling", ordering.dealt_reshuffling
        yield "dealt", functools.partial(ordering.dealt, ORDERS["cd_grab"])


def block(**given):
    return ordering.block_reshuffling(**{"num_units": 8, "block_size": 2} | given)


def total(order):
    return lambda total: states(order(total=total))


NUMBERS = [  # (argument, what takes it, refused values)
    *(("num_units", make, NO_COUNT) for _, make in makers_of("num_units")),
    *(("units_per_step", make, NO_COUNT) for _, make in makers_of("units_per_step")),
    ("num_units", block, NO_COUNT),
    ("block_size", block, NO_COUNT),
    ("paired_reversal", block, ("no", 2, None)),
    ("total", total(functools.partial(ordering.dealt_reshuffling, 4)), NO_COUNT),
    ("total", total(functools.partial(ordering.dealt, ORDERS["cd_grab"], M)), (*NO_COUNT, 25)),
    ("bound", ordering.self_balancing_walk, (*NO_NUMBER, 1e-50, 10**400)),
    ("num_epochs", lambda **given: ordering.kernel_halving(**HALVING | given), NO_NUMBER),
    ("num_pairs", lambda **given: ordering.kernel_halving(**HALVING | given), NO_NUMBER),
    ("delta", lambda **given: ordering.kernel_halving(**HALVING | given), (*NO_NUMBER, 1, 1e-30)),
    ("num_prefixes", ordering.sketch_size, (*NO_NUMBER, 1)),
    ("error", lambda **given: ordering.sketch_size(10, **given), (*NO_NUMBER, 1, 1e-9)),
    ("size", lambda size: ordering.sketch(KEY, size=size), NO_COUNT),
    ("size", lambda size: ordering.sketched(squares, KEY, size=size), NO_COUNT),
    ("norm", lambda norm: ordering.herding_bound(PAIRS, jnp.arange(3), norm=norm), ("2", 1, True)),
]


@pytest.mark.parametrize("argument,make,values", NUMBERS)
def test_numbers_out_of_range_are_named(argument, make, values):
    for value in values:
        with pytest.raises(ValueError, match=f"{argument}(=| is |.* ){re.escape(repr(value))}"):
            make(**{argument: value})


def test_sizes_of_numpy_do_not_overflow():
    """200 units as uint8: their number of blocks, and of all workers, is more than 255."""
    order = ordering.block_reshuffling(np.uint8(200), block_size=np.uint8(3))
    second = order.next_epoch(order.next_epoch(order.init(KEY)))
    assert sorted(second.current.tolist()) == list(range(200))
    assert states(ordering.dealt_reshuffling(np.uint8(200))).current.shape == (W, 200)


Z = jnp.ones((2, D))
FLOAT0 = np.zeros((2, D), jax.dtypes.float0)
BAD_ROWS = {
    "leaves": ([PAIRS, PAIRS[:2]], r"rows must .* shapes \[\(3, 2\), \(2, 2\)\]"),
    "empty": ({"w": None}, r"rows must be arrays .* shapes \[\]"),
    "no rows": (Z[:0], r"at least one unit"),
    "scalars": ([Z, jnp.zeros(())], r"leading axis .* \(\)\]"),
    "lists": ([[1.0, 2.0]], r"rows must be arrays"),
    "objects": (np.array([[None]]), "dtype object: gradients are arrays of real numbers"),
    "text": (np.array(["1", "2"]), "dtype <U1"),
    "complex": (Z * 1j, "dtype complex64: .* real and imaginary parts as two arrays"),
    "float0": (FLOAT0, "dtype .*float0"),
}
of_rows = [(ordering.Rows.of, tree, message) for tree, message in BAD_ROWS.values()]
of_rows += [
    (ordering.Rows.of_gradient, tree, message)
    for tree, message in (
        (Z * 1j, "complex64"),
        ("4", "dtype <U1"),
        (FLOAT0, "float0"),
        ({}, "rows"),
    )
]


@pytest.mark.parametrize("call,tree,message", of_rows)
def test_rows_that_hold_no_gradients_are_refused(call, tree, message):
    with pytest.raises(ValueError, match=message):
        call(tree)


LOSSES = {  # what the loss returns, has_aux, the message
    "a tuple": (lambda losses: (losses, 1.0), False, "returned a tuple .* pass has_aux=True"),
    "no tuple": (lambda losses: losses, True, r"with has_aux=True return a tuple \(losses, aux\)"),
    "a dict": (lambda losses: {"loss": losses}, False, "returned a dict as losses"),
    "nothing": (lambda losses: None, False, "returned a NoneType as losses"),
    "integers": (lambda losses: losses.astype(int), False, r"returned int32\[\d\] .* real numbers"),
    "complex": (lambda losses: losses * 1j, False, r"returned complex64\[\d\]"),
    "no losses": (lambda losses: losses[:0], False, r"returned float32\[0\]"),
}
MAKERS = {
    "per_example": ordering.per_example,
    "in turn": functools.partial(ordering.per_example, in_turn=True),
    "microbatch": ordering.microbatch,
    "grouped": ordering.grouped,
    "sketched": lambda loss, **given: ordering.sketched(loss, KEY, size=3, **given),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_losses_of_another_form_are_refused(maker):
    def run(loss, params=PARAMS, batch=Z, key=KEY, **given):
        batch = batch[None] if maker == "grouped" and jnp.ndim(batch) > 1 else batch
        return jax.eval_shape(lambda: MAKERS[maker](loss, **given)(params, batch, key)[:2])

    for change, has_aux, message in LOSSES.values():
        with pytest.raises(ValueError, match=message):
            run(lambda *args, to=change: to(squares(*args)), has_aux=has_aux)
    with pytest.raises(ValueError, match="loss is a str: pass a function"):
        run("squares")
    if maker != "grouped":
        for params in (PARAMS * 1j, PARAMS.astype(int), PARAMS > 0, [PARAMS, 3]):
            with pytest.raises(ValueError, match="dtype .*: gradients are arrays of real numbers"):
                run(lambda params, *_: 1.0, params)
    if maker in ("microbatch", "grouped"):
        return
    with pytest.raises(ValueError, match=r"one example have the shape \(1, 5\): return one loss"):
        run(lambda params, batch, key: batch)
    for batch in ({}, [Z, Z[:1]], Z[:0], jnp.zeros(()), 4.0):
        with pytest.raises(ValueError, match="the batch must be arrays with a common leading axis"):
            run(squares, batch=batch)
    for key in (None, 0, [0, 1]):
        with pytest.raises(ValueError, match="pass a typed key"):
            run(squares, key=key)


def test_a_batch_without_examples_has_no_mean():
    """It was NaN."""
    for maker, batch in (("per_example", Z[:0]), ("microbatch", Z[:0]), ("grouped", Z[None, :0])):
        with pytest.raises(ValueError, match=r"at least one unit|returned float32\[0\]"):
            MAKERS[maker](squares)(PARAMS, batch, KEY)


def of_params(order, params):
    return lambda: states(order, params)


def pairs_state(workers, num_units, size, make=ordering.pair_balance):
    order = make(num_units, units_per_step=size)
    keys = jax.random.split(KEY, workers)
    return jax.vmap(lambda key: order.init(key, PARAMS))(keys), order


def resized(state=(3, 6, 2), fresh=(2, 9, 3), units=(3, 6), make=ordering.pair_balance, **given):
    owned = None if units is None else np.arange(18).reshape(units)
    given = {"units_per_step": 2, "visited": 0} | given
    return lambda: resize(pairs_state(*state)[0], *pairs_state(*fresh, make=make), owned, **given)


def bound_of(orders, vectors=PAIRS):
    return lambda: ordering.herding_bound(vectors, orders)


def sends(rows):
    """All workers send these rows."""
    return lambda: over_workers(lambda _: ordering.exchange_rows(rows)[0], jnp.arange(W))


SKETCH = ordering.sketch(KEY, size=3)
test_bad_input = refuses({
    "gathers": (lambda: ordering.cd_grab(4, gathers="later"), "gathers is 'later'"),
    "no axis": (of_params(ordering.cd_grab(4, axis_name=None), PARAMS), "axis None is not in"),
    "a list of axes": (of_params(ordering.cd_grab(4, axis_name=["a"]), PARAMS), "is not in scope"),
    "no specs": (lambda: ordering.pair_balance(4, specs={}), "specs holds {}"),
    "uncalled order": (lambda: ordering.dealt(ordering.cd_grab, 4), "order is <function cd_grab"),
    "state as order": (lambda: ordering.dealt(0, 4), "order is 0: pass an Ordering"),
    "equal rows": (sends(ordering.Rows.of(Z)), "rows do not depend on the worker"),
    "no entries": (lambda: ordering.grab(4).init(KEY, jnp.zeros((2, 0))), "params holds no num"),
    "sketch of nothing": (lambda: SKETCH({}), "nothing to sketch in {}"),
    "sketch of complex": (lambda: SKETCH(Z * 1j), "dtype complex64"),
    "sketch of floats": (lambda: SKETCH([1.0, 2.0]), "gradients are arrays"),
    "a size as sketch": (lambda: ordering.per_example(squares, to_sketch=64), "to_sketch is 64"),
    "rows to sketch": (lambda: ordering.sketch_rows(Z, SKETCH), "where Rows are needed"),
    "sketch of rows": (lambda: ordering.sketch_rows(ordering.Rows.of(Z), 3), "to_sketch is 3"),
    "keys of a sketch": (lambda: ordering.sketch(jax.random.split(KEY)), r"key has shape \(2,\)"),
    "key of a sketch": (lambda: ordering.sketched(squares, 0), "key is 0 .*pass a typed key"),
    "lengths": (bound_of(jnp.arange(4)), "shape"),
    "repeated": (bound_of(jnp.array([0, 0, 1])), "orders are no permutations of the units 0 .. 2"),
    "from one": (bound_of(jnp.array([1, 2, 3])), "no permutations"),
    "floats": (bound_of(jnp.arange(3.0)), "no permutations .* as an integer"),
    "one of two": (bound_of(np.array([[0, 1, 2], [0, 0, 1]]), jnp.ones((2, 3, 1))), "no permut"),
    "complex vectors": (bound_of(jnp.arange(3), PAIRS * 1j), "complex64"),
    "lists": (bound_of(jnp.arange(3), [[1.0]] * 3), "needs arrays"),
    "without width": (bound_of(jnp.arange(3), PAIRS[:, :0]), "one entry"),
    "fewer units": (resized(fresh=(2, 4, 2)), "of 3 workers with 6 units.* of 2 workers with 4"),
    "another order": (resized(make=ordering.grab), "PairBalanceState.*cannot go on as a GrabState"),
    "a part of a step": (resized(units_per_step=5), "5 per step, cannot go on"),
    "visited": (resized(visited=10), "10 of them visited"),
    "not visited": (resized(visited=float("nan")), "nan of them visited"),
    "other units": (resized(units=(2, 9)), r"for units of shape \(2, 9\)"),
    "no units": (resized(units=None), "some units belong to several workers: pass as units"),
})  # fmt: skip


@pytest.mark.parametrize("name", ["pair_balance", "cd_grab", "grab"])
@pytest.mark.parametrize(
    "rule", [ordering.greedy, ordering.kernel_halving, "greedy", ORDERS["grab"]]
)
def test_rules_must_be_called(name, rule):
    with pytest.raises(ValueError, match=r"rule is .*: pass a SignRule.*greedy\(\)"):
        getattr(ordering, name)(4, rule=rule)


@pytest.mark.parametrize("name", [*OBSERVE, "dealt at syncs"])
@pytest.mark.parametrize("params", [None, {}, (), {"w": None}])
def test_orders_that_observe_need_params(name, params):
    with pytest.raises(ValueError, match="params holds no numbers .*shapes of one gradient"):
        states((OBSERVE | DEALT)[name], params)


def test_traced_orders_and_integers_are_accepted():
    """Bounds in a compiled step; the exchanged mean of integers is not rounded."""
    bound = jax.jit(ordering.herding_bound)(jnp.eye(3), jnp.arange(3))
    assert bound == ordering.herding_bound(jnp.eye(3), np.arange(3, dtype=np.uint8))
    mean = jax.vmap(lambda g: ordering.exchange_rows(ordering.Rows.of(g))[0], axis_name="worker")
    assert mean(jnp.array([[[1]], [[2]]])).tolist() == [[1.5], [1.5]]
