"""What does not fit together is refused by the names of the arguments and their values.

Rules of two arguments, of examples and of states; every public function with every bad argument,
and every order with the states of the others, is in tests/project/test_bad_inputs.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ordering
from ordering import echo
from ordering.blocks import read_blocks, resize
from ordering.data import as_source, read_epochs, step_indices
from tests import block_cases, tables
from tests.block_cases import FIXED
from tests.echo_source import Uses
from tests.ordering import test_blocks_reads as block_runs
from tests.ordering.test_measured import ANSWERS, Scripted, policy
from tests.ordering.test_read_epochs import Run
from tests.refused import names
from tests.sources import Examples

M, B, W, D = 6, 2, 2, 5
ORDERS = {name: row.make(M, B) for name, row in tables.ORDERS.items()}


GLOBAL = {
    "global": ordering.global_order(ORDERS["cd_grab"], M),
    "global, at syncs": ordering.global_order(ORDERS["cd_grab, at syncs"], M),
    "global_reshuffling": ordering.global_reshuffling(M),
}
NEED_AXIS = {name: ORDERS[name] for name in ("cd_grab", "cd_grab, at syncs")} | GLOBAL
PARAMS, KEY = jnp.zeros(D), jax.random.key(0)


def over_workers(function, *args):
    """Traces a function of one worker for all workers, without compiling it."""
    return jax.eval_shape(jax.vmap(function, axis_name="worker"), *args)


def states(order, params=PARAMS):
    keys = jax.random.split(KEY, W)
    return over_workers(lambda key: order.init(key, params), keys)


@pytest.mark.parametrize("name", NEED_AXIS)
def test_calls_outside_of_the_axis_name_it(name):
    order = NEED_AXIS[name]
    needed = "'worker' .*axis_name='worker'"
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


@functools.cache
def pairs_state(workers, num_units, size):
    order = ordering.pair_balance(num_units, units_per_step=size)
    keys = jax.random.split(KEY, workers)
    return jax.jit(jax.vmap(lambda key: order.init(key, PARAMS)))(keys), order


def resized(fresh=(2, 9, 3), rule=None):
    """Orders of 3 workers with 6 units go on with those of others."""
    new, order = pairs_state(*fresh)
    if rule:
        order = ordering.pair_balance(fresh[1], units_per_step=fresh[2], rule=rule)
        new = jax.vmap(lambda key: order.init(key, PARAMS))(jax.random.split(KEY, fresh[0]))
    units = np.arange(18).reshape(3, 6)
    ordering.resize(pairs_state(3, 6, 2)[0], new, order, units, units_per_step=2, visited=0)


def observed(order, units):
    """Every worker observes so many units."""
    rows = lambda worker: jnp.zeros((units, D)) + worker  # noqa: E731
    return over_workers(
        lambda state, w: order.observe(state, rows(w)), states(order), jnp.arange(W)
    )


def of_loss(params):
    grads = ordering.per_example_grads(lambda *_: 1.0)
    return jax.eval_shape(lambda: grads(params, jnp.ones((2, D)), key=KEY)[:2])


# Sources, and readers in orders.


GRAB = Run("grab")


def reading(run=GRAB, **options):
    return next(run.reads(**options))


def saved(steps=3):
    reads = GRAB.reads()
    for _ in range(steps):
        reads.observe(next(reads)["g"])
    return reads.state()


def observed_twice():
    reads = GRAB.reads()
    rows = next(reads)["g"]
    reads.observe(rows), reads.observe(rows)


def ended_by_hand(name):
    run = Run(name, step=13)
    reads, order = run.reads(), run.make()
    for _ in range(2):
        state = tables.vmap_workers(lambda s, g: order.next_epoch(order.observe(s, g)))
        reads.advance(state(reads.order_state, next(reads)["g"]))


def of_numbers(count):
    """A source of so many examples, for two workers with 13 units each."""
    return read_epochs(np.arange(count), Run("random_reshuffling").make(), KEY, workers=2)


def scored(**options):
    return ordering.scored(np.array([3.0, 1.0, 2.0]), **options)


MIXED = ordering.mixture({"a": 9, "b": 3}, weights={"a": 2, "b": 1}, batch_size=4, total_steps=3)


def mixed_of(a, b):
    return MIXED.source({"a": a, "b": b})


def cut(load=None, **options):
    load = np.ones(4) if load is None else load
    options = {"key": KEY, "minibatches": 2} | options
    return next(echo.repeat([load] * 2, echo.fixed(2, total_steps=4), **options))


def of_minibatches(parts, act=lambda batches, batch: None, state=None):
    """Of steps of three units; `act` follows the first minibatch."""
    reads = Run("grab", units=12).reads(state)
    batches = echo.repeat(reads, echo.fixed(2), minibatches=parts, key=KEY)
    act(batches, next(batches))
    return batches.state()


def inside_a_use():
    state = of_minibatches(3, lambda batches, batch: batches.observe(batch["g"]))
    of_minibatches(1, state=state)


class OnlyCurrent(NamedTuple):
    current: jax.Array


class OnlyOrdering(ordering.Ordering):
    def init(self, key, params=None):
        return OnlyCurrent(jnp.arange(4))


ONLY_CURRENT = OnlyOrdering(num_units=4)


def split_over_four(num_units):
    sharding = jax.NamedSharding(jax.make_mesh((4,), ("data",)), jax.P("data"))
    order = ordering.random_reshuffling(num_units, units_per_step=8)
    return read_epochs(np.arange(num_units), order, KEY, sharding=sharding)


def batch_of(*columns):
    data = as_source([{"x": column} for column in columns])
    return data[np.arange(len(columns))]


class Shaped(Examples):
    """As a data set, which has a shape and is no array."""

    shape = 3, 1


def ragged():
    array = np.empty(2, object)
    array[:] = [np.arange(1), np.arange(2)]
    return array


FLOATS = as_source([1, 2.0, 3.5])
MISSING = as_source([{"x": 1}, {"x": None}, {"x": None}])

# Blocks: orders of 4 workers with 4 units each, and a state inside a window.


def in_blocks(orders=FIXED.orders[0], **settings):
    given = FIXED.settings | settings
    order = block_cases.given_order(np.stack([orders] * 2), 0, given["window"])
    return next(read_blocks(FIXED.blocks(), order, KEY, workers=len(orders), **given))


@functools.cache
def position_of():
    reads = block_cases.short_run("global_reshuffling")
    block_runs.rest(reads, 3)
    return reads.state()


def position(parts=(20, 11), unit_size=2, state=None, **settings):
    state = state or position_of()
    return block_cases.short_run("global_reshuffling", state, parts, unit_size, **settings)


def resized_blocks(workers=2, steps=3, **changes):
    name, axis = "global_reshuffling", {"axis_name": "dp"}
    state = block_runs.read(name, 2, most=steps)[1]._replace(**changes)
    order = block_runs.order_of(name, workers)
    fresh = ordering.init_workers(order, KEY, PARAMS, workers, **axis)
    return resize(state, fresh, order)


ONE = ordering.global_reshuffling(4)
ONE = jax.vmap(lambda key: ONE.init(key, None), axis_name="worker")(jax.random.split(KEY, 1))
ONCE = ordering.baselines.shuffle_once(4).init(KEY, None)
NO_WORKERS = jax.make_mesh((2, 1), ("data", "model"))
CUT, RANDOM = ordering.grab(8, units_per_step=4), ordering.random_reshuffling(16)
REFUSED = {  # the call, and what its message names: arguments, values, places in a tree
    # Orders.
    "another axis": (
        lambda: ordering.init_workers(ORDERS["unzip"], KEY, None, NO_WORKERS), "('data', 'model')"),
    "less than a step": (lambda: observed(CUT, 3), "3 units", "4 (of 8 units)"),
    "parameters of bools": (lambda: of_loss(PARAMS > 0), "dtype", "bool"),
    "fewer units": (lambda: resized((2, 4, 2)), "3 workers", "6 units", "2 of 4"),
    "another rule": (
        lambda: resized(rule=ordering.baselines.self_balancing_walk()), "sign rule"),
    "layers of sorted scores": (lambda: scored(layers=2), "layers is 2", "'sorted'"),
    "ends of a saw": (lambda: scored(pattern="saw", ends=0.1), "radius", "ends"),
    "ends that meet": (lambda: scored(pattern="segments", ends=0.6), "ends is 0.6", "[0, 0.5]"),
    "segments that are shuffled": (lambda: scored(pattern="segments", jitter=2), "jitter is 2"),
    "layers of few scores": (lambda: scored(pattern="folded", layers=4), "layers is 4"),
    "other workers than the axis": (
        lambda: ordering.init_workers(scored(workers=2), KEY, None, 3), "workers=3"),
    "no axis of workers": (lambda: scored(workers=2).init(KEY, None), "scope"),
    "groups that are mixed": (lambda: ordering.counted(12, group_size=4), "groups", "'mixed'"),
    "groups that do not divide": (
        lambda: ordering.counted(12, group_size=5, groups="spread"), "5", "num_units 12"),
    "a group of more than all": (
        lambda: ordering.counted(12, group_size=13, groups="together"), "group_size is 13"),
    "units beyond 32 bits": (lambda: ordering.random_reshuffling(2**31), "ordering.counted"),
    # Mixtures.
    "one of two sources": (lambda: MIXED.source({"a": [0] * 9}), "sources", "b"),
    "a source of another size": (lambda: mixed_of([0] * 9, [0] * 4), "4 examples", "3"),
    "a source of other examples": (lambda: mixed_of([{"x": 1}] * 9, [0] * 3), "examples of b"),
    "a tuple beside a NamedTuple": (
        lambda: mixed_of(OnlyCurrent(np.arange(9)), (np.arange(3),)), "examples of b", "Only"),
    "workers that share no batch": (lambda: MIXED.order(workers=3), "workers", "batch_size"),
    "an order of no source": (lambda: MIXED.order(orders={"c": ordering.counted(3)}), "orders"),
    "an order of other units": (
        lambda: MIXED.order(orders={"a": ordering.counted(3)}), "orders[a]", "3 units"),
    "an order of gradients": (
        lambda: MIXED.order(orders={"a": ordering.pair_balance(9)}), "orders[a]", "PairBalance"),
    "a mixture of a mixture": (
        lambda: ordering.mixture({"x": 12}, weights={"x": 1}, batch_size=2, total_steps=2).order(
            orders={"x": MIXED.order()}), "orders[x]", "Mixture"),
    "no dict of orders": (lambda: MIXED.order(orders=ordering.counted(9)), "name", "Ordering"),
    "a unit of no source": (lambda: MIXED.locate([12]), "units", "[0, 11]"),
    # Plans to echo.
    "steps of numbers": (lambda: echo.EchoPlan([1, 0]), "fresh is int64[2]"),
    "no load at first": (lambda: echo.EchoPlan([False, True]), "fresh[0] is False"),
    "a chance that becomes 0": (
        lambda: echo.bernoulli(optax.linear_schedule(1.0, 0.0, 3), total_steps=5, key=KEY), "p(3)"),
    "a step undecided": (
        lambda: Uses(Scripted(ANSWERS), policy(decided=[True, False]), first_step=3),
        "step is 3", "2 decisions",
    ),
    "what no order has": (
        lambda: echo.repeat([np.ones(1)], echo.fixed(2)).state(), "loads", "list"),
    "a step of a reader": (
        lambda: echo.repeat(GRAB.reads(), echo.fixed(2), first_step=2), "first_step is 2"),
    "minibatches without a key": (lambda: cut(key=None), "minibatches is 2", "key is None"),
    "minibatches that do not divide": (lambda: cut(minibatches=3), "4 rows", "3 minibatches"),
    "a scalar to cut": (lambda: cut({"x": np.ones(4), "n": np.float32(1)}), "batch['n']"),
    "other rows to cut": (lambda: cut((np.ones(4), np.ones(6))), "batch[1]", "6", "4"),
    "an axis to cut": (lambda: cut(axis=1), "(4,)"),
    "a step after the last": (lambda: cut(first_step=99), "first_step is 99"),
    "minibatches of a short step": (lambda: of_minibatches(4), "3 units", "4 minibatches"),
    "an order inside a use": (
        lambda: of_minibatches(3, lambda b, x: b.advance(b.order_state)), "advance"),
    "rows of another minibatch": (
        lambda: of_minibatches(3, lambda b, x: b.observe(x["g"][:, :0])), "(2, 0, 4)", "1 rows"),
    "a state inside a use": (inside_a_use, "minibatches is 1", "use"),
    "a minibatch observed twice": (
        lambda: of_minibatches(3, lambda b, x: [b.observe(x["g"])] * 2 and b.observe(x["g"])),
        "1 of 1"),
    "minibatches of blocks": (
        lambda: echo.repeat(
            read_blocks(FIXED.blocks(), RANDOM, KEY, batch_size=4), echo.fixed(2),
            minibatches=2, key=KEY), "read_epochs"),
    # Examples of a batch.
    "two indices": (lambda: as_source([0, 1])[(np.zeros(1, int), 2)], "indices", "tuple"),
    "an index below 0": (lambda: as_source([0, 1])[np.array([-1])], "-1"),
    "lengths": (lambda: batch_of([1, 2], [1, 2, 3]), "[(2,), (3,)]"),
    "inner lengths": (lambda: batch_of([[1], [1, 2]]), "[[1], [1, 2]]"),
    "no value in a list": (lambda: batch_of([1, None]), "'x'", "None"),
    "no value": (lambda: batch_of(1, None), "1['x']", "None"),
    "no value at first": (lambda: MISSING[np.array([1, 2])], "1['x']", "None"),
    "no value in the first": (lambda: as_source([{"x": None}]), "source[0]", "None"),
    "beyond 64 bits": (lambda: batch_of(1, 2**70), "x", "int64"),
    "unsigned": (lambda: batch_of(np.int64(5), np.uint64(2**63)), "uint64", "int64"),
    "floats after ints": (lambda: FLOATS[np.array([1, 2])], "1 ", "float64", "int64"),
    "floats that are not the ints": (lambda: batch_of([2**53 + 1, 0.5]), "float64"),
    "several lengths": (lambda: batch_of(ragged()), "'x'"),
    "numbers in texts": (lambda: batch_of([1, "a"]), "'x'"),
    "texts and numbers": (lambda: batch_of("a", 1), "1['x']", "int64", "texts"),
    "a dict of sources": (
        lambda: as_source(dict.fromkeys("ab", Shaped(np.arange(3)))), "source['a']", "Shaped"),
    "a long slice of all": (
        lambda: step_indices([0, 1, 2], units_per_step=1, num_units=2, total=9), "2 units"),
    "no units of all": (lambda: step_indices([], units_per_step=1), "num_units"),
    # Readers.
    "nothing like a gradient": (lambda: reading(like=None), "params"),
    "observed twice": (observed_twice, "observe"),
    "observed before": (lambda: GRAB.reads().observe(0), "observe"),
    "advanced by no state": (lambda: Run("once").reads().advance(3), "advance", "int"),
    "next_epoch by hand": (lambda: ended_by_hand("grab"), "next_epoch"),
    "next_epoch by hand, shuffled": (lambda: ended_by_hand("random_reshuffling"), "next_epoch"),
    "current alone": (lambda: read_epochs(np.arange(4), ONLY_CURRENT, KEY), "next", "left"),
    "a last batch that devices cannot share": (lambda: split_over_four(18), "(2,)", "'data'"),
    "a source that grew": (lambda: of_numbers(40), "40", "26"),
    "a source that shrank": (lambda: of_numbers(25), "25", "26"),
    "a step more": (
        lambda: read_epochs(
            np.arange(65), ordering.random_reshuffling(60, units_per_step=5), KEY), "65", "60"),
    "another order's state": (lambda: reading(Run("cd_grab"), state=saved()), "another order"),
    "of other units": (
        lambda: reading(Run("grab", units=12), state=saved()), "state", "another order"),
    "a place between steps": (
        lambda: reading(Run("grab", step=5), state=saved()), "9 of 13", "5"),
    # Blocks.
    "a large seed": (lambda: in_blocks(seed=2**31), "seed", "2147483648"),
    "units that are none": (lambda: in_blocks(FIXED.orders[0] + 1), "0 .. 15"),
    "units twice": (lambda: in_blocks(np.zeros((4, 4), int)), "0 .. 15"),
    "an observed window": (
        lambda: read_blocks(
            FIXED.blocks(), ordering.grab(16, units_per_step=4), KEY,
            like=np.zeros(2, np.float32), window=3, batch_size=2), "window is 3", "4 units"),
    "another block size": (lambda: position((30, 17), 3), "file 0", "30", "20"),
    "another window": (lambda: position(window=2), "window", "3"),
    "another batch size": (lambda: position(batch_size=3), "batch", "4", "3"),
    "another seed": (lambda: position(seed=0), "seed", "9", "0"),
    "other records": (lambda: position((20, 12)), "file 1", "12", "11"),
    "other files": (lambda: position((20, 5, 6)), "[2, 3]", "3 files"),
    "inside a window": (lambda: resized_blocks(4, steps=4), "batch 1", "window_ended"),
    "a part of a window": (lambda: resized_blocks(8, window=np.array(5)), "10 units", "8 workers"),
    "one worker's order": (
        lambda: resized_blocks(order=jax.tree.map(lambda x: x[0], ONE)), "current", "(4,)"),
    "a fixed shard": (lambda: resized_blocks(order=ONCE), "order", "ShuffleState"),
}  # fmt: skip
test_what_does_not_fit_is_refused_by_its_name = names(REFUSED)


def test_traced_orders_and_integers_are_accepted():
    """Bounds in a compiled step."""
    bound = jax.jit(ordering.baselines.herding_bound)(jnp.eye(3), jnp.arange(3))
    assert bound == ordering.baselines.herding_bound(jnp.eye(3), np.arange(3, dtype=np.uint8))
