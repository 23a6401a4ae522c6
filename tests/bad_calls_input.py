"""The calls of `ordering.data`, echoing and mixtures: valid arguments, and bad ones for each."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np

import local_opt
import ordering
from ordering import echo
from tests.bad_values import (
    FRESH,
    KEY,
    NAN,
    NOT_FRESH,
    NOTHING,
    THING,
    Arg,
    Foreign,
    T,
    also,
    arguments,
    but_none,
    call,
    one_number,
    whole,
    word,
)
from tests.public import returning


def first(iterator, count=3):
    """What it brings at first; a loader's thread ends."""
    results = [batch for batch, _ in zip(iterator, range(count), strict=False)]
    getattr(iterator, "close", lambda: None)()
    return results


def made(value):
    """What a function without arguments makes, or the value."""
    return value() if value is batches else value


def batches(count=T):
    return (np.full(2, i) for i in range(count))


PLAN = echo.fixed(2, total_steps=T)
SYNCS = local_opt.constant(2, total_steps=T)
POLICIES = [*NOTHING, echo.fixed, echo.EchoPlan, SYNCS, FRESH, lambda t: True]
NO_LOADS = [None, {}, "text", np.array(["a"]), THING, {"x": THING}]
LOADS = [3, "text", THING, {}, {"x": np.ones(2)}, *([load] * T for load in NO_LOADS)]


def echoed(loads=batches, plan=PLAN, **args):
    return first(echo.repeat(made(loads), plan, **args), T)


DECIDED = [True, False]
CALLS = {
    name: call(make, **arguments(make, p=0.5, total_steps=T, key=KEY))
    for name, make in returning(echo.EchoPlan, echo).items()
}
CALLS |= {
    "EchoPlan": call(echo.EchoPlan, fresh=Arg(FRESH, [None, [], *NOT_FRESH])),
    "EchoPlan.loads_before": call(PLAN.loads_before, step=Arg(2, [T + 1, *one_number(whole(0))])),
    "EchoPlan.first_load": call(PLAN.first_load, step=also("step", 2, T + 1)),
    "fixed": call(echo.fixed, factor=2, total_steps=Arg(T, but_none(whole()))),
    "adaptive": call(
        lambda **args: echo.adaptive(**args).decided,
        max_factor=2,
        total_steps=Arg(T, but_none(whole())),
        decided=Arg(DECIDED, [None, np.ones(T + 1, bool), *NOT_FRESH]),
    ),
    "repeat": call(
        echoed,
        plan=Arg(PLAN, [*POLICIES, echo.adaptive(total_steps=T, max_factor=2)]),
        loads=Arg(batches, [*LOADS, [], batches(2)]),
        minibatches=Arg(2, [3, *whole()]),
        key=KEY,
        axis=Arg(0, [1, *whole(0)]),
        first_step=also("first_step", 0, 2 * T + 1),
    ),
}


# Mixtures.
NAMED = [None, 3, "text", [1, 2], {}, {"a": 1}, {"a": THING, "b": 1}, {"a": NAN, "b": 1}, THING]
CALLS["mixture"] = call(
    ordering.mixture,
    sizes=Arg({"a": 9, "b": 3}, [*NAMED, {"a": 0, "b": 1}, {1: 2, 2: 3}, {"a": 2.5, "b": 1}]),
    weights=Arg({"a": 1, "b": 0.5}, [*NAMED, {"a": -1, "b": 1}, {"a": 0, "b": 0}]),
    batch_size=2,
    total_steps=8,
    tokens=Arg(None, but_none([*NAMED, {"a": 0, "b": 1}, {"a": [1, 2], "b": 1}])),
    exhausted=Arg("end", word()),
    examples_read=Arg(None, but_none([*NAMED, {"a": -1, "b": 1}, {"a": 0.5, "b": 0}])),
)


# Sources and their orders.
SOURCE = {"x": np.arange(12.0), "y": np.arange(12)}
NO_SOURCES = [
    *NOTHING, b"text", [], (), np.ones(()), np.ones((0, 3)), {"x": "text"},
    {"x": np.ones(3), "y": np.ones(4)}, {"x": 3}, {"x": [1, 2, 3]}, dict, iter([1, 2]), {1, 2},
    (3, 4), {"x": None}, {"x": KEY}, KEY, {"x": np.ones(3), "y": 4}, [[1, 2], [1]],
    [{"x": 1}, {"y": 1}], [None, 1], ["a", 1], [np.ones(2), np.ones(3)], Foreign(3, 2),
    {"x": THING}, [{"x": 1}, 3],
]  # fmt: skip
NO_INDEX = [0.5, [0], 12, -13, NAN, "a", 2**40, None]
NO_INDICES = [*NOTHING, 1.0, 1j, [0.0, 1.0], [True, False], Foreign(2), *([i] for i in NO_INDEX)]
ORDER = ordering.random_reshuffling(6, units_per_step=2)
STATE = ORDER.init(KEY, None)
PLACE = ordering.data.ReadState(ordering.init_workers(ORDER, KEY, None, 2))
ROWS_OF_ONE = ordering.init_workers(ORDER, KEY, None, 1)
ORDERS = np.array([[1, 0, 2, 3, 5, 4], [0, 1, 2, 3, 4, 5]])
NO_ORDERS = [
    None, 3, "text", 0.5, ORDERS * 1.0, ORDERS + 1, ORDERS * 0, -ORDERS, ORDERS[None], THING, {},
    [["a"] * 6] * 2, [[0, 1], [0]], ORDERS > 0, 1j * ORDERS, STATE, ORDER, np.full((2, 6), NAN),
    np.full((2, 6), 2**40), Foreign(2, 6), KEY,
]  # fmt: skip
UNITS = also("units_per_step", 2, 7, 2**31)
SIZES = {
    "orders": Arg(ORDERS, NO_ORDERS),
    "units_per_step": UNITS,
    "unit_size": 1,
    "num_units": Arg(6, [5, *but_none(whole())]),
}
GLOBAL = {**SIZES, "orders": Arg(np.arange(12).reshape(2, 6), NO_ORDERS[:6]), "total": 12}
SHARDINGS = [3, "cpu", THING, jax.P("worker"), {"x": 3}, jax.devices]


def tf_data():
    return importlib.import_module("tensorflow").data.Dataset


def loaded(batches=batches, **args):
    with ordering.data.prefetch_to_device(made(batches), **args) as loader:
        return first(loader)


def epochs(units_per_step=2, **args):
    args = {"order": ordering.random_reshuffling(6, units_per_step=units_per_step)} | args
    with ordering.data.read_epochs(**args) as reads:
        return first(reads, 2)


def observed(rows):
    order = ordering.pair_balance(6, units_per_step=2)
    with ordering.data.read_epochs(np.arange(6), order, KEY, like=jnp.zeros(3)) as reads:
        next(reads)
        reads.observe(rows)


CALLS |= {
    "Epochs.observe": call(observed, rows=Arg(jnp.ones((2, 3)), [
        None, 3, "text", THING, {}, jnp.ones((3, 3)), jnp.ones((2, 4)), jnp.ones(()),
        1j * jnp.ones((2, 3))])),
    "as_source": call(lambda source, indices: ordering.data.as_source(source)[indices],
                      source=Arg(SOURCE, NO_SOURCES), indices=Arg(np.array([0, 1]), NO_INDICES)),
    "step_indices": call(ordering.data.step_indices, **SIZES),
    "step_indices, global": call(ordering.data.step_indices, **GLOBAL),
    "grain_dataset": call(lambda **args: list(ordering.data.grain_dataset(**args).batch(2)),
                          source=Arg(SOURCE, NO_SOURCES), indices=Arg(np.arange(4), NO_INDICES)),
    "prefetch_to_device": call(loaded, batches=Arg(batches, [None, *LOADS]), depth=2, timeout=30.0,
                       sharding=Arg(None, SHARDINGS), first_load=0),
    "tf_dataset": call(lambda **args: list(ordering.data.tf_dataset(**args)),
                       source=Arg(SOURCE, NO_SOURCES), indices=Arg(np.arange(4), NO_INDICES)),
    "reordered": call(
        lambda dataset, indices: list(ordering.data.reordered(
            dataset() if inspect.isfunction(dataset) else dataset, indices)),
        dataset=Arg(lambda: tf_data().range(12), [
            *NO_SOURCES, SOURCE, lambda: tf_data().range(12).repeat(), lambda: tf_data().range(0),
            lambda: tf_data().range(12).filter(lambda i: i > 0)]),
        indices=Arg(np.arange(4), NO_INDICES)),
    "read_epochs": call(
        epochs, source=Arg(SOURCE, [
            {"x": np.ones(3)}, lambda o: [np.ones(2)], lambda o, s, e: None, lambda o, s, e: 3,
            lambda o, s, e: [], *(s for s in NO_SOURCES if s is not dict)]),
        order=Arg(ORDER, [STATE, None, 3, "text", THING, ordering.random_reshuffling]), key=KEY,
        workers=Arg(2, but_none([3, *whole()])), unit_size=1, ahead=2,
        state=Arg(None, [3, "text", THING, {}, [], STATE, {"order": STATE},
                         PLACE._replace(units=13), PLACE._replace(order=ROWS_OF_ONE)]),
        num_epochs=Arg(2, but_none(whole(0))), depth=2, timeout=30.0,
        sharding=Arg(None, SHARDINGS)),
}  # fmt: skip
