"""Workers of several devices train as workers of one device, and keep their arrays sharded."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ordering
from tests.cases import mostly_slow
from tests.shards import (
    MESHES,
    SPECS,
    UNITS,
    WAYS,
    alone,
    assert_in_their_places,
    assert_same_run,
    by_hand,
    mesh_of,
    network,
    on_one,
    per_worker,
    sharded,
    sketched,
)

# Each kind, way and mesh in at least one case; all combinations by `pytest -m slow`.
SOME = [(sketched, "by hand", 2), (alone, "compiler", 2)]
CASES = itertools.product((sketched, alone), WAYS, MESHES)


@pytest.mark.parametrize("kind,way,workers", mostly_slow(CASES, quick=SOME))
def test_workers_of_several_devices_train_as_workers_of_one(kind, way, workers):
    actual = sharded(kind(WAYS[way](workers)), workers)
    expected = on_one(kind, workers)
    assert_same_run(actual, expected)
    _, _, params, state, orders = actual
    assert_in_their_places(params, per_worker(SPECS))
    assert_in_their_places(state.inner[0].trace, per_worker(SPECS))
    assert_in_their_places(orders, jax.tree.map(lambda _: P("worker"), orders))
    np.testing.assert_allclose(state.drift, expected[3].drift, rtol=1e-4)
    assert state.drift.min() > 0


@pytest.mark.parametrize("workers", mostly_slow(MESHES, quick=(2,)))
def test_all_devices_of_a_worker_agree_on_sketches_of_many_entries(workers):
    """259 entries in 128 numbers: the map depends on the split, but not on the device."""
    programs = sketched(by_hand(workers), size=128)
    losses, orders, _, _, last = sharded(programs, workers)
    assert_in_their_places(last.current, P("worker"))
    assert_in_their_places(last.running_sum, P("worker"))
    assert np.isfinite(losses).all() and (np.sort(orders) == np.arange(UNITS)[None, None]).all()


@pytest.mark.parametrize("size", [64, 512])
def test_sketches_of_shards_keep_inner_products(size):
    """Over many keys and any split; sketches of 512 numbers keep the 259 entries as they are."""
    mesh = mesh_of(2)
    rng = np.random.default_rng(0)
    trees = [jax.tree.map(lambda x: rng.normal(size=x.shape), network()) for _ in range(2)]
    trees = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), trees)

    def product(one, other):
        return float(sum(jax.tree.leaves(jax.tree.map(jnp.vdot, one, other))))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), [SPECS] * 2), out_specs=P())
    def sketches(keys, trees):
        def one(key):
            return [ordering.make_sketch(key, size=size, specs=SPECS)(tree) for tree in trees]

        return jax.lax.map(one, keys)

    first, second = sketches(jax.random.split(jax.random.key(0), 400), trees)
    for a, b in ((0, 0), (0, 1)):
        result = np.sum(np.asarray([first, second][a]) * np.asarray([first, second][b]), axis=1)
        exact = product(trees[a], trees[b])
        norms = [product(trees[i], trees[i]) ** 0.5 for i in (a, b)]
        spread = norms[0] * norms[1] * (0 if size == 512 else (2 / size) ** 0.5)
        assert abs(result.mean() - exact) <= 4 * spread / 400**0.5 + 1e-4 * abs(exact) + 1e-3
        assert result.std() <= 1.2 * spread + 1e-3


def observed(mesh, order, tree, specs, **options):
    """The next order [worker, M] after one step of two pairs."""

    def run(key, tree):
        rows = jax.tree.map(lambda x: x[0], tree)
        state = order.init(key[0], jax.tree.map(lambda x: x[0], rows))
        return order.observe(state, rows).next[None]

    over = jax.shard_map(
        run, mesh=mesh, in_specs=(P("worker"), specs), out_specs=P("worker"), **options
    )
    return jax.jit(over)(jax.random.split(jax.random.key(0), mesh.shape["worker"]), tree)


GRADIENTS = np.random.default_rng(2).normal(size=(2, 4, 8)).astype(np.float32)
WHOLE, SPLIT, BY_COMPILER = P("worker"), P("worker", None, "model"), {"axis_names": {"worker"}}
BESIDE = r"mesh axes \['model'\] beside the workers' 'worker'.*ordering.make_sketch\(specs=\)"


@pytest.mark.parametrize(
    "gathers,specs,options",
    [
        (None, SPLIT, {}),
        (None, WHOLE, {"check_vma": False}),
        (None, WHOLE, BY_COMPILER),
        ("step", SPLIT, {}),
        ("step", SPLIT, {"check_vma": False}),
        ("sync", WHOLE, {"check_vma": False}),
    ],
)
def test_meshes_where_devices_of_a_worker_could_disagree_are_refused(gathers, specs, options):
    order = ordering.cd_grab(4, units_per_step=4, gathers=gathers)
    with pytest.raises(ValueError, match=BESIDE):
        observed(mesh_of(2), order, GRADIENTS, specs, **options)


@pytest.mark.parametrize("specs,options", [(WHOLE, {}), (WHOLE, BY_COMPILER)])
def test_rows_that_are_whole_are_gathered_on_any_mesh(specs, options):
    """By hand where types prove it; what the compiler holds is one array."""
    order = ordering.cd_grab(4, units_per_step=4, gathers="step")
    exact = ordering.cd_grab(4, units_per_step=4)
    next_of = lambda key, g: exact.observe(exact.init(key, g[0]), g).next  # noqa: E731
    expected = jax.jit(jax.vmap(next_of, axis_name="worker"))(
        jax.random.split(jax.random.key(0), 2), GRADIENTS
    )
    np.testing.assert_array_equal(
        observed(mesh_of(2), order, GRADIENTS, specs, **options), expected
    )
