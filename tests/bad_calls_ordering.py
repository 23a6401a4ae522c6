"""The calls of `ordering`: valid arguments, and bad ones for each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import ordering
from ordering.signs import SignRule
from tests import tables
from tests.bad_values import (
    INF,
    KEY,
    KEYS,
    KINDS,
    LIKE_PARAMS,
    NAN,
    NOTHING,
    THING,
    Arg,
    X,
    also,
    arguments,
    but_none,
    call,
    leaves_of,
    real,
    whole,
    word,
    wrong_functions,
)
from tests.public import returning

M, B, W = 6, 2, 2
ROWS = {"w": jnp.ones((B, 3))}
CALLS = {}


def over_workers(function):
    """Traces a function of one of two workers; nothing runs."""
    return jax.eval_shape(jax.vmap(function, axis_name="worker"), jnp.arange(float(W)))


def varying(tree, w):
    """The tree with floats that are each worker's own, as what is sent must be."""
    real = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact)  # noqa: E731
    return jax.tree.map(lambda x: x + (0 * w).astype(x.dtype) if real(x) else x, tree)


def traced(function):
    return lambda **args: jax.eval_shape(lambda: function(**args))


def rows_of(tree):
    return lambda w: varying(tree, w)


def given(value, *args):
    """What a function of the worker makes, or the value."""
    return value(*args) if callable(value) and not isinstance(value, type) else value


# Orders: an epoch of one step, traced.
def epoch(make):
    def run(key=KEY, params=X, rows=None, **args):
        order = make(**args)

        def one(w):
            state = order.observe(order.init(key, params), given(rows, w))
            return order.next_epoch(order.sync(state))

        return over_workers(one)

    return run


NO_ROWS = [X, 3, "rows", THING, {}, [], ordering.Ordering]
BAD_ROWS = [
    *NO_ROWS,
    *(rows_of({"w": jnp.ones(shape)}) for shape in ((3, 3), (B, 7), (0, 3))),
    rows_of({"w": 1j * jnp.ones((B, 3))}),
    rows_of({"w": np.full((B, 3), "a")}),
    rows_of({"w": jnp.ones((B, 3)), "b": jnp.ones((B, 5))}),
]
SHAPED = [rows_of(t) for t in ({"v": ROWS["w"]}, ROWS["w"], {"w": jnp.ones((B, 3, 1))})]
SHAPELESS = [{}, None, "text", THING, {"w": "text"}, {"w": THING}, {"w": [1.0, "a"]}]
OBSERVED = {"key": KEY, "params": Arg(X, SHAPELESS), "rows": Arg(rows_of(ROWS), BAD_ROWS)}
AXIS = Arg("worker", but_none(KINDS["axis_name"]))  # None is the only one in scope
SIZES = {
    "num_units": M,
    "units_per_step": also("units_per_step", B, M + 1),
    "block_size": also("block_size", B, M + 1),
    "total": also("total", W * M, W * M - 1),
    "axis_name": AXIS,
    "team_size": Arg(None, [1, 2]),
}
MAKES = returning(ordering.Ordering, ordering, ordering.baselines)
del MAKES["global_order"], MAKES["scored"]  # of an order and of scores, below


LARGE = Arg(M, [*whole(), 2**63])  # numbers of units that are computed, beyond int32
COMPUTED = {"counted": {"num_units": LARGE}}


def order_call(make):
    args = arguments(make, **SIZES | COMPUTED.get(make.__name__, {}))
    order = make(**{name: arg.valid for name, arg in args.items()})
    observes, coordinated = tables.traits(order, B)
    args["key"] = KEY
    if observes:
        args |= OBSERVED
        as_trees = "rule" in args and not coordinated  # the others flatten the gradients
        args["rows"] = Arg(rows_of(ROWS), BAD_ROWS + SHAPED * as_trees)
    return call(epoch(make), **args)


CALLS |= {name: order_call(make) for name, make in MAKES.items()}
COORDINATED = {
    **OBSERVED,
    "num_units": M,
    "units_per_step": SIZES["units_per_step"],
    "axis_name": AXIS,
    "rule": None,
    "team_size": also("team_size", 1, 3),
}
for when in ("step", "sync"):
    make = lambda gathers=when, **args: ordering.cd_grab(gathers=gathers, **args)  # noqa: E731
    CALLS[f"cd_grab, {when}"] = call(epoch(make), **COORDINATED)
NO_SCORES = [*NOTHING, [], [1.0, NAN], [1.0, "a"], np.ones((2, 2)), np.ones(2, complex)]
CALLS["scored"] = call(
    epoch(ordering.scored),
    scores=Arg(np.arange(W * M), NO_SCORES),
    pattern=Arg("saw", word()),
    workers=also("workers", W, 3, 2 * W * M),
    units_per_step=also("units_per_step", B, M + 1),
    jitter=Arg(0, whole(0)),
    fixed=Arg(False, [3, None, "yes", THING]),
    layers=Arg(None, but_none(whole())),
    sections=Arg(None, but_none(whole())),
    radius=Arg(None, but_none(real(1.5))),
    ends=Arg(None, [0.1]),
    axis_name=AXIS,
    key=KEY,
)
CD, GRAB = ordering.cd_grab(M, units_per_step=B), ordering.grab(M, units_per_step=B)
NO_PAIRS = [GRAB, ordering.random_reshuffling(M), ordering.global_order(CD, M), ordering.cd_grab]
NOT_PAIRS = [*NOTHING, *NO_PAIRS, ordering.cd_grab(M + 2, units_per_step=B)]
CALLS["global_order"] = call(
    epoch(ordering.global_order),
    order=Arg(CD, NOT_PAIRS),
    num_units=also("num_units", M, M - 1),
    total=also("total", W * M, W * M - 1, 4 * M + 1, 2**31),
    axis_name=AXIS,
    **OBSERVED,
)

# States: of other orders, of other sizes, and what is none.
ORDERS = {
    "random_reshuffling": lambda m: ordering.random_reshuffling(m),
    "global_reshuffling": lambda m: ordering.global_reshuffling(m),
    "grab": lambda m: ordering.grab(m, units_per_step=B),
    "greedy_herding": lambda m: ordering.baselines.greedy_herding(m, units_per_step=B),
    "pair_balance": lambda m: ordering.pair_balance(m, units_per_step=B),
    "pair_balance, odd": lambda m: ordering.pair_balance(m),
    "cd_grab": lambda m: ordering.cd_grab(m, units_per_step=B),
    "cd_grab, sync": lambda m: ordering.cd_grab(m, units_per_step=B, gathers="sync"),
    "dealt": lambda m: ordering.global_order(ordering.cd_grab(m, units_per_step=B), m),
}


def state_of(name, m):
    return lambda: ORDERS[name](m).init(KEY, X)


def at(part, function, units=B):
    rows = [rows_of({"w": jnp.ones((units, 3))})] if part == "observe" else []

    def run(state):
        def one(w):
            return function(given(state), *(make(w) for make in rows))

        return over_workers(one)

    return run


for name, make in ORDERS.items():
    shuffles = "reshuffling" in name
    wrong = [n for n in ORDERS if n != name and not (shuffles and "reshuffling" in n)]
    states = [*NOTHING, (), lambda make=make: make(M), state_of(name, M - 2)]
    states += [state_of(n, M) for n in wrong]
    if name in ("pair_balance", "cd_grab"):  # the ends of their epochs are alike
        states.pop(-1 - wrong[::-1].index("cd_grab" if name == "pair_balance" else "pair_balance"))
    for part in ("observe", "next_epoch", "sync"):
        if part == "next_epoch" or not shuffles and (part == "observe" or name == "dealt"):
            function = getattr(make(M), part)
            CALLS[f"{name}.{part}"] = call(
                at(part, function, 1 if "odd" in name else B), state=Arg(state_of(name, M), states)
            )


def signed(make):
    def run(**args):
        rule = make(**args)
        return rule.sign(rule.init(KEY), 0.5, 1.0, 0.5)[1]

    return traced(run)


PAIRS = {"bound": 30.0, "num_epochs": 4, "num_pairs": 8}
CALLS |= {
    name: call(signed(make), **arguments(make, **PAIRS))
    for name, make in returning(SignRule, ordering.baselines).items()
}


# Gradients.
def gradients(make):
    def run(loss, params, batch, key=KEY, **args):
        return make(loss, **args)(params, batch, key=key)[:2]

    return traced(run)


def loss_of(p, x, key):
    return jnp.square(jax.tree.leaves(x)[0] @ p["w"])


LOSSES = wrong_functions(
    None,
    lambda p: 0.0,
    lambda p, x: 0.0,
    lambda p, x, key: None,
    lambda p, x, key: "text",
    lambda p, x, key: loss_of(p, x, key) > 0,
    lambda p, x, key: 1j * loss_of(p, x, key),
    lambda p, x, key: loss_of(p, x, key).astype(int),
    lambda p, x, key: (loss_of(p, x, key), 3),
    lambda p, x, key: {"loss": loss_of(p, x, key)},
)
PER_EXAMPLE = [lambda p, x, key: jnp.stack([loss_of(p, x, key)] * 3), lambda p, x, key: jnp.ones(2)]
EMPTY = [{}, None, (), jnp.ones((0, 3))]
BATCHES = [*EMPTY, "text", 3, THING, jnp.ones(()), [np.ones(3), "a"], np.array(["a"] * 4)]
BATCHES += [{"x": jnp.ones((4, 3)), "y": y} for y in (jnp.ones(3), "text")]
# JAX takes legacy keys, and so may a loss.
NO_KEYS = [key for key in KEYS if getattr(key, "dtype", None) != np.uint32]
OF_LOSS = {
    "loss": Arg(loss_of, LOSSES + PER_EXAMPLE),
    "batch": Arg(jnp.ones((4, 3)), BATCHES),
    "params": Arg(X, SHAPELESS[2:]),
    "key": Arg(KEY, NO_KEYS),
}
TO_SKETCH = Arg(
    ordering.make_sketch(KEY, size=2),
    wrong_functions(lambda g: None, lambda g: "text", ordering.make_sketch),
)
CALLS |= {
    "per_example_grads": call(gradients(ordering.per_example_grads), has_aux=Arg(False, [True]),
                        to_sketch=TO_SKETCH, **OF_LOSS),
    "per_example_grads, in turn": call(
        gradients(lambda loss: ordering.per_example_grads(loss, in_turn=True)), **OF_LOSS),
    "microbatch_grads": call(
        gradients(ordering.microbatch_grads), has_aux=Arg(False, [True]), loss=Arg(loss_of, LOSSES),
        params=OF_LOSS["params"], batch=Arg(jnp.ones((4, 3)), EMPTY[3:])),
    "group_loss": call(
        gradients(lambda loss: ordering.per_example_grads(ordering.group_loss(loss))),
        **OF_LOSS | {"loss": Arg(loss_of, LOSSES),
                     "batch": Arg(jnp.ones((4, 2, 3)), [*BATCHES, jnp.ones((4, 0, 3))])}),
    "sketched_grads": call(
        gradients(lambda loss, size: ordering.sketched_grads(loss, KEY, size=size)),
        size=2, **OF_LOSS),
    "sketched_grads, key": call(
        lambda key: gradients(lambda loss: ordering.sketched_grads(loss, key, size=2))(
            loss=loss_of, params=X, batch=jnp.ones((4, 3))), key=KEY),
    "init_workers": call(
        ordering.init_workers, order=Arg(GRAB, [None, 3, "grab", THING, ordering.grab]), key=KEY,
        like=Arg(X, SHAPELESS), workers=Arg(W, but_none(whole()))),
    "check_separable": call(
        lambda loss, params, batch: ordering.check_separable(loss, params, batch, key=KEY),
        **{name: arg for name, arg in OF_LOSS.items() if name != "key"}),
    "sketch_plan": call(
        lambda loss, params, batch, **args: len(
            ordering.sketch_plan(loss, params, batch, **args)), size=2,
        **OF_LOSS | {"key": Arg(KEY, [None, "0", THING])}),
}  # fmt: skip
ADAM, LEAVES = optax.adam(0.1), [ordering.SketchLeaf("w", (3,), "formed", "product")]
ONE = [{}, None, {"w": [1.0, "a"]}, {"w": 1j * jnp.ones(3)}, *leaves_of(3)]
VECTORS, ORDER = jnp.arange(12.0).reshape(4, 3), jnp.arange(4)
TWO = jax.random.split(KEY, 2)
ALL = jax.vmap(GRAB.init, (0, None))(TWO, X)
SHUFFLED = jax.vmap(ordering.random_reshuffling(M).init, (0, None))(TWO, None)
CALLS |= {
    "index_shuffle": call(
        ordering.index_shuffle, key=KEY, epoch=Arg(1, whole(0)),
        num_units=Arg(M, [2, *LARGE.bad]),
        index=Arg(np.arange(M), [M, -1, 0.5, "0", None, THING, {}, X, [M], [0.0], [[0], [1, 2]],
                                 [True], jnp.arange(3.0)])),
    "make_sketch": call(
        traced(lambda tree, **args: ordering.make_sketch(**args)(tree)), key=KEY, size=4,
        specs=None,
        tree=Arg({"w": jnp.ones(8)}, ONE)),
    "second_moment_scale": call(
        lambda **args: over_workers(lambda w: ordering.second_moment_scale(**args)),
        optimizer=Arg(ADAM, [None, 3, "text", THING, optax.adamax(1.0)]),
        opt_state=Arg(ADAM.init(X), [None, 3, "text", {}, THING, X, optax.sgd(0.1).init(X),
                                     ADAM.init({"w": jnp.ones(4)}), ADAM.init({"v": jnp.ones(3)}),
                                     [ADAM.init(X)] * 2]),
        leaves=Arg(None, [3, "text", [], [3], THING, {}, LEAVES * 2]), params=X, eps=0.1,
        power=Arg(0.25, [0, 0.6, *KINDS["eps"]]),
        axis_name=AXIS),
    "sketched, scale": call(
        lambda scale: gradients(lambda loss: functools.partial(
            ordering.sketched_grads(loss, KEY, size=2), scale=scale))(
            loss=loss_of, params=X, batch=jnp.ones((4, 3))),
        scale=Arg(X, but_none(LIKE_PARAMS))),
    "resize": call(
        ordering.resize, state=Arg(ALL, [None, 3, "text", THING, {}, X, GRAB.init(KEY, X)]),
        fresh=Arg(ALL, [None, 3, "text", THING, {}, X, GRAB.init(KEY, X), SHUFFLED]),
        order=Arg(GRAB, []),
        units=Arg(np.arange(2 * M).reshape(2, M), [None, 3, "text", THING, {}]),
        units_per_step=Arg(2, [M + 1, *whole()]), visited=Arg(0, [M + 1, *whole(0)])),
    "herding_bound": call(
        ordering.baselines.herding_bound,
        vectors=Arg(VECTORS, [None, 3, "text", jnp.ones(4), jnp.ones((5, 3)), THING, {},
                              jnp.ones((4, 3, 2)), jnp.ones((0, 3)), [[1.0]], 1j * VECTORS,
                              np.array([["a"]] * 4)]),
        orders=Arg(ORDER, [None, 3, "text", jnp.arange(5), 0 * ORDER, 1.0 * ORDER, ORDER + 1,
                           -ORDER, ORDER > 0, jnp.zeros((2, 4), int), np.array(["a"] * 4), THING,
                           {}, GRAB.init(KEY, X)]),
        norm=Arg(2, [1, 3, "2", None, NAN, -INF, 0, THING, [2], np.arange(2), 2.5, "inf"])),
}  # fmt: skip
