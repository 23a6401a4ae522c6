"""Every order in the table: epochs are permutations, equal to the reference, compiled once."""

import functools
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType

import ordering
from ordering import base, signs
from ordering.shuffles import permutation
from tests import tables
from tests.cases import mostly_slow, times

EXACT = (*tables.REFERENCES, "cd_grab", "cd_grab, gathered", "cd_grab, at syncs", "grab")


# Pairs that two steps share, a single unit, and even steps, in which workers send differences; with
# one unit per step in test_global_orders.py and test_teams.py.
SHAPES = [(name, (7, 3)) for name in tables.ORDERS]
QUICK = SHAPES + [("cd_grab", (1, 1)), ("cd_grab", (9, 4)), ("grab", (5, 1))]
SHAPES += [(name, (1, 1)) for name, row in tables.ORDERS.items() if row.observes]
SHAPES += [(name, (9, 4)) for name in tables.ORDERS if name in EXACT and "cd" in name]
SHAPES += [("pair_balance", (9, 4))]
SHAPES += [(name, (5, 1)) for name in ("grab", "greedy_herding")]


@pytest.mark.parametrize("name,shape", mostly_slow(SHAPES, quick=QUICK))
def test_every_epoch_is_a_permutation_and_equals_the_reference(name, shape):
    num_units, units_per_step = shape
    order = tables.ORDERS[name].make(num_units, units_per_step)
    gradients = tables.whole_numbers((3, num_units, 6), seed=num_units, high=50)
    # Means of a power of two many whole numbers are exact; others round, so avoid ties there.
    if name in ("grab", "greedy_herding") and num_units & (num_units - 1):
        gradients = np.random.default_rng(num_units).normal(size=gradients.shape)
    gradients = gradients.astype(np.float32)
    orders = tables.run_workers(order, gradients, units_per_step, epochs=3)
    assert (np.sort(orders, axis=-1) == np.arange(num_units)).all()
    if name in EXACT:
        expected = tables.reference_orders(name, orders[0], gradients, epochs=3)
        np.testing.assert_array_equal(orders, expected)


@pytest.mark.parametrize("size,wrong", [(1, np.nan), (2, np.inf), (5, -np.inf)])
def test_the_mean_of_grab_is_that_of_the_finite_gradients(size, wrong):
    """Not of units beyond the epoch; with none that is finite it stays as it was."""
    order = ordering.grab(5, units_per_step=size)
    gradients = tables.whole_numbers((5, 3), seed=2).astype(np.float32)
    gradients[[1, 4], [0, 2]] = wrong
    state = order.init(jax.random.key(0), jnp.zeros(3))

    @jax.jit
    def epoch(state, gradients):
        beyond = jnp.full((size + 5, 3), 7.0)
        rows = jnp.concatenate([gradients[state.current], beyond])
        for start in range(0, 5 + size, size):
            state = order.observe(state, rows[start : start + size])
        return order.next_epoch(state)

    state = epoch(state, gradients)
    expected = gradients[[0, 2, 3]].mean(axis=0)
    np.testing.assert_allclose(state.mean, expected, rtol=1e-6)
    state = epoch(state, np.full_like(gradients, wrong))
    np.testing.assert_allclose(state.mean, expected, rtol=1e-6)
    np.testing.assert_allclose(order.next_epoch(state).mean, expected, rtol=1e-6)


def test_orders_run_without_transfers_and_begin_equal_under_one_key():
    key, params, rows = jax.random.key(3), jnp.zeros(3), jnp.ones((2, 3))
    firsts = []
    for name, row in tables.ORDERS.items():
        if not row.coordinated:
            order = row.make(4, 2)
            methods = order.init, order.observe, order.next_epoch
            init, observe, next_epoch = map(jax.jit, methods)
            with jax.transfer_guard("disallow"):
                first = init(key, params)
                state = next_epoch(observe(first, rows))
            assert sorted(state.current.tolist()) == [0, 1, 2, 3], name
            firsts.append(first.current.tolist())
    assert firsts == [firsts[0]] * len(firsts)


@pytest.mark.parametrize("name", ["kh", "cd_grab_walk"])
def test_units_per_step_does_not_change_the_order(name):
    """For the rules without a reference."""
    gradients = tables.whole_numbers((2, 12, 5))
    one, other = (
        tables.run_workers(tables.ORDERS[name].make(12, b), gradients, b, epochs=3) for b in (2, 5)
    )
    np.testing.assert_array_equal(one, other)


# Odd steps split pairs, which is the harder case; in even steps workers send differences.
STEPS = [(3, "pair_balance_walk"), (3, "cd_grab"), (2, "cd_grab"), (2, "cd_grab_walk")]
STEPS += [(2, "cd_grab, gathered"), (3, "cd_grab, at syncs")]


@pytest.mark.parametrize("units_per_step,name", mostly_slow(STEPS, quick=STEPS[1::2]))
def test_vmap_equals_shard_map(name, units_per_step):
    order = tables.ORDERS[name].make(10, units_per_step)
    gradients = tables.whole_numbers((8, 10, 7))
    vmapped = tables.run_workers(order, gradients, units_per_step)
    sharded = tables.run_workers(order, gradients, units_per_step, run=tables.shard_map_workers)
    np.testing.assert_array_equal(vmapped, sharded)


@pytest.mark.parametrize("units_per_step", mostly_slow((2, 3), quick=(3,)))
def test_when_workers_sync_does_not_change_the_order(units_per_step):
    """Gathers at syncs, of more and fewer pairs than a window has, equal gathers in every step."""
    num_units = 75
    gradients = tables.whole_numbers((2, num_units, 3))
    make = functools.partial(ordering.cd_grab, num_units, units_per_step=units_per_step)
    expected = tables.run_workers(make(gathers="step"), gradients, units_per_step)
    order = make(gathers="sync")
    for steps in ((), (1, 4, 5, 24)):

        def observe(self, state, rows, steps=steps):
            state = order.observe(state, rows)
            syncs = jnp.isin(state.position, units_per_step * jnp.array(steps, int))
            return jax.lax.cond(syncs, order.sync, lambda state: state, state)

        synced = tables.with_methods(order, observe=observe)
        actual = tables.run_workers(synced, gradients, units_per_step)
        np.testing.assert_array_equal(actual, expected)


OBSERVING = [name for name, row in tables.ORDERS.items() if row.observes]


@functools.cache
def compiled(name, num_units, units_per_step):
    """First states, observe, sync and next_epoch of two workers, compiled once for all examples."""
    order = tables.ORDERS[name].make(num_units, units_per_step)
    keys = jax.random.split(jax.random.key(0), 2)
    init = tables.vmap_workers(lambda key: order.init(key, jnp.zeros(2)))
    observe = tables.vmap_workers(lambda state, g: order.observe(state, g))
    at_syncs = name == "cd_grab, at syncs"
    sync = tables.vmap_workers(order.sync) if at_syncs else lambda state: state
    return init(keys), observe, sync, tables.vmap_workers(order.next_epoch)


@pytest.mark.parametrize("name", mostly_slow(OBSERVING, quick=OBSERVING[::2]))
def test_front_of_the_next_order_is_final(name):
    gradients = tables.whole_numbers((2, 7, 2))
    state, observe, sync, next_epoch = compiled(name, 7, 3)
    fronts, workers = [], np.arange(2)[:, None]
    for start, stop in tables.steps(7, 3):
        units = np.asarray(state.current)[:, start:stop]
        state = sync(observe(state, gradients[workers, units]))
        fronts.append((np.broadcast_to(state.left, 2), np.asarray(state.next)))
    final = np.asarray(next_epoch(state).current)
    for left, entries in fronts:
        for w in range(2):
            np.testing.assert_array_equal(entries[w, : left[w]], final[w, : left[w]])
    places_pairs = name.startswith(("grab", "pair_balance", "kh", "cd_grab"))
    assert sum(fronts[-1][0]) > 0 or not places_pairs


@pytest.mark.parametrize("name", OBSERVING)
@settings(max_examples=times(5))
@given(st.data())
def test_epochs_with_too_many_or_too_few_steps_lose_no_unit(name, data):
    state, observe, _, next_epoch = compiled(name, 7, 3)
    gradients = tables.whole_numbers((2, 4, 2))
    for epoch in (1, 2):
        for size in data.draw(st.lists(st.sampled_from([3, 1]), max_size=7)):
            state = observe(state, gradients[:, :size])
        state = next_epoch(state)
        assert (np.sort(state.current, axis=-1) == np.arange(7)).all()
        assert state.epoch.tolist() == [epoch] * 2 and state.epoch.dtype == jnp.int32


@pytest.mark.parametrize("name", ["grab", "cd_grab"])
def test_non_finite_gradients_do_not_poison_the_state(name):
    gradients = tables.whole_numbers((2, 7, 2))
    gradients[0, 3], gradients[1, 5] = np.nan, np.inf
    state, observe, _, next_epoch = compiled(name, 7, 3)
    for start, stop in tables.steps(7, 3):
        units = np.asarray(state.current)[:, start:stop]
        state = observe(state, gradients[np.arange(2)[:, None], units])
    after = next_epoch(state)
    assert np.isfinite(state.running_sum).all()
    assert name != "grab" or np.isfinite(after.mean).all()
    assert (np.sort(after.current, axis=-1) == np.arange(7)).all()


def test_blocks_stay_together_and_odd_epochs_are_reversed():
    def epochs(order, count=6):
        state, seen = order.init(jax.random.key(1), None), []
        following = jax.jit(order.next_epoch)
        for _ in range(count):
            seen.append(state.current.tolist())
            state = following(state)
        return seen

    for size in (1, 3):  # 1 is FlipFlop
        seen = epochs(ordering.baselines.block_reshuffling(11, block_size=size))
        assert seen[1::2] == [order[::-1] for order in seen[::2]] and seen[0] != seen[2]
    blocks = [seen[0][i : i + 3] for i in range(0, 11, 3)]
    for order in seen[::2]:
        of_units = sorted(blocks, key=lambda block: order.index(block[0]))
        assert sum(of_units, []) == order


@pytest.mark.parametrize("size", [1, 1625, 1626, 70_000])
def test_a_random_order_is_the_permutation_that_jax_draws(size, key):
    """Without a sort, in one round and in two."""
    assert jnp.array_equal(permutation(key, size), jax.random.permutation(key, size))


MESHES = {"simulated": None, "a mesh": (4,), "auto": (4, 2), "explicit": (4, 2)}
STARTS = {
    "coordinated": lambda: ordering.cd_grab(6, units_per_step=2),
    "global": lambda: ordering.global_order(ordering.cd_grab(6, units_per_step=2), 6),
    "of one": lambda: ordering.grab(6),
    "random": lambda: ordering.global_reshuffling(6),
}


WHERE = [("coordinated", "simulated"), ("coordinated", "explicit"), ("global", "auto")]
WHERE += [("of one", "simulated"), ("of one", "explicit"), ("random", "a mesh")]


@pytest.mark.parametrize("name,where", WHERE)
def test_all_workers_begin_as_each_would_by_itself(name, where):
    order, workers, shape, key = STARTS[name](), 4, MESHES[where], jax.random.key(3)
    if shape:
        kinds = (AxisType.Explicit if where == "explicit" else AxisType.Auto,) * len(shape)
        workers = jax.make_mesh(shape, ("worker", "data")[: len(shape)], axis_types=kinds)
    like = jnp.zeros(8) if name != "random" else None
    actual = ordering.init_workers(order, key, like, workers)
    keys = jnp.stack([jax.random.fold_in(key, w) for w in range(4)])
    init = jax.jit(jax.vmap(order.init, (0, None), axis_name="worker"))
    expected = init(keys, like)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = map(jax.random.key_data, (x, y))
        np.testing.assert_array_equal(x, y)
    if shape:
        rows = jax.NamedSharding(workers, jax.P("worker"))
        with jax.set_mesh(workers):
            scoped = ordering.init_workers(order, key, like)
            traced = jax.jit(lambda key: ordering.init_workers(order, key, like).current)(key)
        assert scoped.current.sharding.is_equivalent_to(rows, 2)
        assert actual.current.sharding.is_equivalent_to(rows, 2)
        np.testing.assert_array_equal(scoped.current, actual.current)
        np.testing.assert_array_equal(traced, actual.current)
    if name == "of one":
        alone = ordering.init_workers(order, key, jax.eval_shape(lambda: like))
        np.testing.assert_array_equal(alone.current, order.init(key, jnp.zeros(8)).current)


def test_equal_calls_make_equal_orders_and_an_order_compiles_once():
    """Also for a mesh; other types of a number are still refused."""
    mesh, like = jax.make_mesh((4,), ("worker",), devices=jax.devices()[:4]), jnp.zeros(8)
    makers = [
        lambda m: ordering.cd_grab(m, units_per_step=2, gathers="sync"),
        ordering.random_reshuffling,
        lambda m: ordering.global_order(ordering.pair_balance(m), m),
        lambda m: ordering.scored(np.arange(m)),
    ]
    for make in makers:
        order = make(6)
        assert order == make(6) == pickle.loads(pickle.dumps(order)) != make(8)
        assert len({order, make(6), make(8)}) == 2
        for _ in range(3):
            for workers in (4, mesh) if make is not makers[-1] else ():
                ordering.init_workers(order, jax.random.key(1), like, workers)
        made = vars(order).get("_programs", {})
        assert {programs.init._cache_size() for programs in made.values()} <= {1}
        kept = weakref.ref(order)
        del order, made
        gc.collect()
        assert kept() is None, "no cache outlives an order"
    for wrong in (6.0, True, [6]):
        with pytest.raises(ValueError, match="num_units is"):
            ordering.random_reshuffling(wrong)


def test_a_state_of_numpy_arrays_is_observed():
    order = ordering.grab(4, units_per_step=2)
    state = jax.tree.map(np.asarray, order.init(jax.random.key(0), jnp.zeros(3)))
    state = order.observe(state, jnp.ones((2, 3)))
    assert int(state.position) == 2
    following = order.next_epoch(jax.tree.map(np.asarray, state))
    assert sorted(following.current.tolist()) == [0, 1, 2, 3]


def test_an_order_is_the_same_in_64_bits():
    """Also compiled, where the sorts of all platforms need one type."""
    make = ordering.pair_balance
    begin = lambda: ordering.init_workers(make(40), jax.random.key(0), jnp.zeros(3), 2)  # noqa: E731
    expected = begin()
    with jax.enable_x64(True):
        state = begin()
        following = jax.jit(jax.vmap(make(40).next_epoch))(state)
    assert state.current.dtype == following.current.dtype == jnp.int32
    np.testing.assert_array_equal(state.current, expected.current)


SPREAD = [*range(28)]
EVERY = {  # of 7 units for each of 4 workers
    **{name: functools.partial(row.make, 7) for name, row in tables.ORDERS.items()},
    "teams": lambda b: ordering.cd_grab(7, units_per_step=b, gathers="sync", team_size=2),
    "global_order": lambda b: ordering.global_order(
        ordering.cd_grab(7, units_per_step=b), 7, total=30
    ),
    "global_reshuffling": lambda b: ordering.global_reshuffling(7, units_per_step=b, total=30),
    "scored": lambda b: ordering.scored(
        SPREAD, workers=4, pattern="saw", jitter=3, units_per_step=b
    ),
    "segments": lambda b: ordering.scored(SPREAD, workers=4, pattern="segments", units_per_step=b),
}


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


@pytest.mark.parametrize("units_per_step", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_order_keeps_its_types_under_settings_of_jax(units_per_step):
    """64 bits, strict promotion, no transfers that are not asked for: two epochs of 4 workers."""
    rows, like, key = jnp.asarray(tables.whole_numbers((4, 7, 5))), jnp.zeros(5), jax.random.key(0)
    parts = [rows[:, a:b] for a, b in tables.steps(7, units_per_step)]
    no_transfers = jax.transfer_guard("disallow")
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), no_transfers:
        for name, make in EVERY.items():
            order = make(units_per_step)
            state = ordering.init_workers(order, key, like, 4)
            types, programs = kinds(state), order.programs(base.workers_of(4, "worker"))
            assert not any("64" in str(x.dtype) for x in jax.tree.leaves(state)), name
            for _ in range(2):
                for part in parts:
                    state = programs.observe(state, part)
                state = programs.sync(state)
                following, final = order.next_units(state)
                state = programs.next_epoch(state)
                units = np.asarray(order.units(state))
                assert kinds(state) == types, name
                assert len(np.unique(units)) == 28, name
                if int(final) == 7:
                    assert units.tolist() == np.asarray(following).tolist(), name


@pytest.mark.parametrize("name", ["grab", "pair_balance", "greedy_herding"])
def test_two_epochs_in_a_scan_are_the_same_in_64_bits(name):
    order = tables.ORDERS[name].make(4, 2)
    rows = jnp.asarray(tables.whole_numbers((4, 3)))

    def epochs():
        def epoch(state, _):
            return tables.run_epoch(order, state, rows, 2), state.current

        return jax.lax.scan(epoch, order.init(jax.random.key(0), jnp.zeros(3)), length=3)[1]

    expected = jax.jit(epochs)()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(jax.jit(epochs)(), expected)


def test_orders_and_their_digests_differ_by_what_a_state_is_of():
    orders = [make(2) for make in EVERY.values()] + [
        ordering.pair_balance(7, rule=ordering.baselines.self_balancing_walk(bound=2.0)),
        ordering.pair_balance(7, rule=ordering.baselines.self_balancing_walk(bound=3.0)),
        ordering.pair_balance(8),
        ordering.global_reshuffling(7),
        ordering.baselines.block_reshuffling(7, block_size=2),
    ]
    assert len({int(order.digest()) for order in orders}) == len({*orders}) == len(orders)
    for name, make in EVERY.items():
        one, other = make(2), make(1)
        assert one == make(2) and one != other and pickle.loads(pickle.dumps(one)) == one, name
        assert one.digest() == other.digest() == pickle.loads(pickle.dumps(one)).digest(), name


@pytest.mark.parametrize("name", ["grab", "pair_balance", "kh"])
@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize("units_per_step", [1, 2, 3])
def test_gradients_split_over_explicit_axes_are_observed(
    name, units_per_step, block_size, monkeypatch
):
    """JAX's default mesh, whose axes are in the types of arrays; also as an accelerator signs."""
    monkeypatch.setattr(signs, "block_size_of", lambda axes=(): block_size)
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), devices=jax.devices()[:4])
    specs = {"w": jax.P("tensor", None, "fsdp"), "b": jax.P("fsdp")}
    params = {"w": jnp.zeros((2, 3, 4)), "b": jnp.zeros(4)}
    rows = jax.tree.map(lambda x: tables.whole_numbers((7, *x.shape)), params)
    order = tables.ORDERS[name].make(7, units_per_step)

    def epochs(params, rows):
        state = order.init(jax.random.key(0), params)
        for _ in range(2):
            state = tables.run_epoch(order, state, rows, units_per_step)
        return state.current

    expected = jax.jit(epochs)(params, rows)
    with jax.set_mesh(mesh):
        params = jax.tree.map(jax.device_put, params, specs)
        rows = jax.tree.map(lambda x, s: jax.device_put(x, jax.P(None, *s)), rows, specs)
        np.testing.assert_array_equal(jax.jit(epochs)(params, rows), expected)


def test_a_mesh_without_the_axis_of_workers_has_one_worker():
    order, key = ordering.random_reshuffling(8), jax.random.key(0)
    for names in ("model",), ("data", "model"):
        with jax.set_mesh(
            jax.make_mesh((2,) * len(names), names, devices=jax.devices()[: 2 ** len(names)])
        ):
            assert ordering.init_workers(order, key).current.shape == (8,)
            reads = ordering.data.read_epochs(np.arange(8), order, key)
            assert next(reads).shape == (1,)
            reads.close()


def test_the_state_of_another_order_is_refused_by_name():
    """What differs is named: the class, the number of units, a pair that waits, the sign rule."""
    key, like, rows = jax.random.key(0), jnp.zeros(3), jnp.ones((2, 3))
    make = functools.partial(ordering.pair_balance, units_per_step=2)
    walk = ordering.baselines.self_balancing_walk()
    state = make(6).init(key, like)
    for order, names in (
        (ordering.grab(6, units_per_step=2), "Grab got a PairBalanceState"),
        (make(8), "shape .6,., and PairBalance has 8 units"),
        (ordering.pair_balance(6, units_per_step=3), "pending is empty"),
        (make(6, rule=walk), "state.rule is"),
    ):
        for call in (lambda o: o.observe(state, rows), lambda o: o.next_epoch(state)):
            with pytest.raises(ValueError, match=names):
                call(order)
    with pytest.raises(ValueError, match="PairBalance"):
        make(8).units(state)
