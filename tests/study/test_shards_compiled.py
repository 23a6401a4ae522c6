"""What the programs of workers that are several devices send, and keep on a device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import local_opt
import ordering
from experiments.study.compile import LIBTPU, collectives_of, slice_of, uncached
from syncopate.mesh import like
from tests.compiled_runs import compiled_by, conditionals, groups_of, lines_of
from tests.problems import copies
from tests.shards import (
    BATCH,
    HIDDEN,
    SGD,
    SKETCH,
    SPECS,
    UNITS,
    WAYS,
    assert_in_their_places,
    data_of,
    exact,
    left_to_the_compiler,
    loss,
    mesh_of,
    network,
    owned,
    placed,
    rounds_of,
    sketched,
    state_specs,
)

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile


def size_of_shards(params, model):
    """Bytes of one worker's parameters on one of its devices."""
    split = jax.tree.map(lambda x, spec: x.size // (model if spec else 1), params, SPECS)
    return 4 * sum(jax.tree.leaves(split))


def lowered(programs, mesh, hidden=HIDDEN):
    """The compiled step and sync."""
    workers = mesh.shape["worker"]
    params = placed(copies(network(hidden), workers), SPECS, mesh)
    data = placed(data_of(workers), P(), mesh)
    state, orders = programs.init(params, jax.random.split(jax.random.key(7), workers))
    step = programs.steps[BATCH].lower(params, state, orders, data, jnp.zeros(workers, int))
    return step.compile(), programs.sync.lower(params, state, orders).compile()


@pytest.mark.parametrize("way,workers", [("compiler", 2), ("compiler", 4), ("by hand", 2)])
def test_a_sync_sends_shards_and_a_hot_step_talks_inside_its_worker_alone(way, workers):
    """Nothing is gathered; over the workers go the shards, and k numbers of a pair."""
    programs = sketched(WAYS[way](workers), size=128)
    mesh = mesh_of(workers)
    step, sync = lowered(programs, mesh)
    inside = lines_of(step, mesh)
    assert inside and {(name, axes) for name, _, axes in inside} == {("all-reduce", "model")}
    found = lines_of(sync, mesh)
    sums = [(size, axes) for name, size, axes in found if name == "all-reduce"]
    drift = [size for size, axes in sums if axes == "model"]
    assert sum(drift) <= 4 * 2 * len(SPECS), "a number or two per leaf"
    shards = size_of_shards(network(), 8 // workers)
    assert [size for size, axes in sums if axes == "worker"] == [shards]
    gathers = [(size, axes) for name, size, axes in found if name == "all-gather"]
    pairs = min(16, UNITS // 2)
    assert gathers == [(4 * 128 * pairs * workers, "worker")]
    assert len(found) == len(sums) + 1


def test_exact_orders_exchange_shards_between_the_same_places_of_workers():
    mesh = mesh_of(2)
    step, _ = lowered(exact(left_to_the_compiler(2)), mesh)
    found = lines_of(step, mesh)
    sent = [(size, axes) for name, size, axes in found if name == "all-to-all"]
    # A device has 4 + 48 + 12 entries of shards and 1 of the 3 that are whole: half of them, 33.
    assert sent == [(4 * 2 * (BATCH // 2) * 33, "worker")]
    assert {name for name, _, _ in found} == {"all-to-all", "all-reduce"}


def test_a_planned_step_talks_to_other_workers_in_a_branch_alone():
    """Under vmap(spmd_axis_name=) the conditional would be a select, with a mean in every step."""
    mesh = mesh_of(2)
    plan = local_opt.constant(2, total_steps=8)
    opt = local_opt.local_steps(SGD, plan, axis_name="worker", specs=SPECS)
    over, _ = left_to_the_compiler(2)

    def step(params, state):
        updates, state = opt.update(jax.tree.map(jnp.cos, params), state, params)
        return optax.apply_updates(params, updates), state

    params = placed(copies(network(), 2), SPECS, mesh)
    state, step = over(opt.init)(params), over(step)
    text = step.lower(params, state).compile().as_text()
    pairs = [[0, 4], [1, 5], [2, 6], [3, 7]]
    between = [one for one in collectives_of(text) if groups_of(one.line) == pairs]
    assert {one.kind for one in between} == {"all-reduce"}
    (conditional,) = conditionals(text)
    for one in between:
        assert re.search(rf"%{re.escape(one.where)}\b", conditional)
    for _ in range(2):
        params, state = step(params, state)
    assert state.round.tolist() == [1, 1]
    assert_in_their_places(params, owned(SPECS))


@pytest.mark.parametrize("kind", [exact, sketched], ids=lambda k: k.__name__)
def test_a_device_of_four_keeps_a_quarter(kind):
    """Of parameters, momentum and running sum; the rest, 3 of 65,539 entries, is small."""
    found = []
    for model in (1, 4):
        mesh = jax.make_mesh(
            (2, model),
            ("worker", "model"),
            (AxisType.Auto,) * 2,
            devices=jax.devices()[: 2 * model],
        )
        programs = kind(left_to_the_compiler(2, mesh=mesh))
        found.append([c.memory_analysis() for c in lowered(programs, mesh, hidden=4096)])
    for one, four in zip(*found, strict=True):
        one, four = one.argument_size_in_bytes, four.argument_size_in_bytes
        assert one > 2 * 4 * 65539
        assert 0.25 <= four / one < 0.28
    step, sharded_step = (analyses[0].temp_size_in_bytes for analyses in found)
    assert sharded_step < 0.4 * step, "gradients of units are in shards"
    step, sharded_step = (analyses[0].peak_memory_in_bytes for analyses in found)
    assert 0.25 <= sharded_step / step < 0.4


def test_sketches_gather_no_gradient():
    """Out of the backward pass or, with specs, of gradients: the compiler only adds up."""
    mesh = mesh_of(2)
    params = placed(copies(network(1024), 2), SPECS, mesh)
    data = placed(jax.tree.map(lambda x: x[:, :BATCH], data_of(2)), P(), mesh)
    made = ordering.sketched(loss, SKETCH, size=128)
    to_sketch = ordering.sketch(SKETCH, size=128, specs=SPECS)

    def backward(params, batch):
        return made(params, batch, jax.random.key(0))[2].tree

    def of_gradients(params, batch):
        rows = ordering.per_example(loss)(params, batch, jax.random.key(0))[2]
        return ordering.sketch_rows(rows, to_sketch).tree

    over, _ = left_to_the_compiler(2, check_vma=False)
    for rows_of in (backward, of_gradients):
        found = lines_of(over(rows_of).lower(params, data).compile(), mesh)
        assert {(name, axes) for name, _, axes in found} == {("all-reduce", "model")}
        assert sum(size for _, size, _ in found) < 4 * 1024
    expected = jax.vmap(backward)(copies(network(1024), 2), jax.tree.map(np.asarray, data))
    np.testing.assert_allclose(over(backward)(params, data), expected, rtol=1e-4, atol=1e-4)


@compiled_by(LIBTPU)
def test_workers_of_four_devices_on_a_slice_of_eight_chips():
    mesh = slice_of("v5e:2x4", 8)[0]
    mesh = jax.sharding.Mesh(
        mesh.devices.reshape(2, 4), ("worker", "model"), axis_types=(AxisType.Auto,) * 2
    )
    programs = sketched(left_to_the_compiler(2, mesh=mesh), size=128)
    spread = functools.partial(abstract, mesh=mesh)
    params = spread(copies(network(), 2), SPECS)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(7), 2))
    state, orders = jax.eval_shape(programs.init, params, keys)
    state, orders = spread(state, state_specs(rounds_of(SPECS))), spread(orders, P())
    with uncached():
        step = programs.steps[BATCH].lower(
            params, state, orders, spread(data_of(2), P()), jax.ShapeDtypeStruct((2,), np.int32)
        )
        inside = lines_of(step.compile(), mesh)
        found = lines_of(programs.sync.lower(params, state, orders).compile(), mesh)
    assert inside and {axes for _, _, axes in inside} == {"model"}
    large = [(name, size, axes) for name, size, axes in found if size > 4 * 2 * len(SPECS)]
    assert {axes for _, _, axes in large} == {"worker"}
    assert sum(size for name, size, _ in large if name == "all-reduce") == size_of_shards(
        network(), 4
    )


def abstract(tree, specs, *, mesh):
    """Shapes with a leading worker axis, in their places."""

    def shape(spec, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(shape, like(owned(specs), tree), tree)
