"""Workers of several devices: what their programs send, keep on a device, and restore."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ordering
from benchmarks.topologies import LIBTPU, slice_of, uncached
from syncopate.mesh import like
from tests.compiled_runs import lines_of, marks_of
from tests.problems import assert_bitwise_equal, copies
from tests.shards import (
    BATCH,
    HIDDEN,
    SKETCH,
    SPECS,
    UNITS,
    WAYS,
    assert_in_their_places,
    data_of,
    left_to_the_compiler,
    loss,
    mesh_of,
    network,
    per_worker,
    placed,
    sketched,
)

AXES = ("worker", "model")


def keys_of(workers):
    return jax.random.split(jax.random.key(7), workers)


def abstract(tree, specs, mesh):
    """Shapes with a leading worker axis, in their places."""

    def shape(spec, x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(shape, like(per_worker(specs), tree), tree)


def compiled(programs, mesh, hidden=HIDDEN):
    """The step and the sync, compiled from shapes without devices."""
    workers = mesh.shape["worker"]
    params = abstract(copies(network(hidden), workers), SPECS, mesh)
    result = jax.eval_shape(programs.init, params, jax.eval_shape(lambda: keys_of(workers)))
    held = params, *map(lambda x, specs: abstract(x, specs, mesh), result, programs.places)
    starts = jax.ShapeDtypeStruct((workers,), np.int32)
    step = programs.step.lower(*held, abstract(data_of(workers), P(), mesh), starts)
    with uncached():
        return step.compile(), programs.sync.lower(*held).compile()


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    "way,workers,chips",
    [
        ("compiler", 4, None),
        pytest.param("by hand", 2, None, marks=pytest.mark.slow),
        pytest.param("compiler", 2, "v5e:2x4", marks=marks_of(LIBTPU)),
    ],
)
def test_a_sync_sends_shards_and_a_step_communicates_only_within_its_worker(way, workers, chips):
    """Nothing is gathered; workers exchange the shards, and k numbers per pair."""
    mesh, model = mesh_of(workers), 8 // workers
    if chips is None:
        programs = sketched(WAYS[way](workers), size=128)
    else:
        devices = slice_of(chips, 8)[0].devices.reshape(workers, model)
        mesh = jax.sharding.Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)
        programs = sketched(left_to_the_compiler(workers, mesh=mesh), size=128)
    step, sync = compiled(programs, mesh)
    inside, result = lines_of(step, mesh), lines_of(sync, mesh)
    assert inside and {axes for _, _, axes in inside} == {"model"}
    drift = [size for _, size, axes in result if axes == "model"]
    assert sum(drift) <= 4 * 2 * len(SPECS), "a number or two per leaf"
    between = [(name, size) for name, size, axes in result if axes == "worker"]
    assert len(result) == len(between) + len(drift)
    sizes = jax.tree.map(lambda x, spec: x.size // (model if spec else 1), network(), SPECS)
    sums = [size for name, size in between if name == "all-reduce"]
    assert sum(sums) == 4 * sum(jax.tree.leaves(sizes)), "shards"
    if chips is None:
        pairs = min(16, UNITS // 2)
        gathers = [(name, size) for name, size in between if name != "all-reduce"]
        assert gathers == [("all-gather", 4 * 128 * pairs * workers)] and len(sums) == 1
        assert {name for name, _, _ in inside} == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_a_device_of_four_keeps_a_quarter():
    """Of parameters and momentum; the rest, 3 of 65,539 entries, is small."""
    results = []
    for model in (1, 4):
        devices = jax.devices()[: 2 * model]
        mesh = jax.make_mesh((2, model), AXES, (AxisType.Auto,) * 2, devices=devices)
        programs = sketched(left_to_the_compiler(2, mesh=mesh))
        results.append([c.memory_analysis() for c in compiled(programs, mesh, hidden=4096)])
    for one, four in zip(*results, strict=True):
        one, four = one.argument_size_in_bytes, four.argument_size_in_bytes
        assert one > 2 * 4 * 65539
        assert 0.25 <= four / one < 0.28
    step, sharded_step = (analyses[0].temp_size_in_bytes for analyses in results)
    assert sharded_step < 0.4 * step, "gradients of units are in shards"
    step, sharded_step = (analyses[0].peak_memory_in_bytes for analyses in results)
    assert 0.25 <= sharded_step / step < 0.4


@pytest.mark.usefixtures("optimised")
def test_sketches_gather_no_gradient():
    """From the backward pass or, with specs, from gradients: the compiler only adds sums up.

    In bytes these are fewer than what the hidden layer passes on, let alone than its gradients.
    """
    mesh, activations = mesh_of(2), BATCH * 1024 * 4
    params = placed(copies(network(1024), 2), SPECS, mesh)
    data = placed(jax.tree.map(lambda x: x[:, :BATCH], data_of(2)), P(), mesh)
    made = ordering.sketched_grads(loss, SKETCH, size=128)
    to_sketch = ordering.make_sketch(SKETCH, size=128, specs=SPECS)

    def backward(params, batch):
        return made(params, batch, key=jax.random.key(0))[2]

    def of_gradients(params, batch):
        rows = ordering.per_example_grads(loss)(params, batch, key=jax.random.key(0))[2]
        return jax.vmap(to_sketch)(rows)

    over, _ = left_to_the_compiler(2, check_vma=False)
    for rows_of in (backward, of_gradients):
        actual = lines_of(over(rows_of).lower(params, data).compile(), mesh, least=40)
        assert {(name, axes) for name, _, axes in actual} == {("all-reduce", "model")}
        assert sum(size for _, size, _ in actual) < activations / 2
    expected = jax.jit(jax.vmap(backward))(copies(network(1024), 2), jax.device_get(data))
    rounding = 1e-5 * np.abs(expected).max()  # of sums that cancel
    np.testing.assert_allclose(over(backward)(params, data), expected, rtol=0, atol=rounding)


def test_a_checkpoint_keeps_values_and_sharding(tmp_path):
    """In the middle of a round and of a pair; the resumed run is bitwise the same."""
    way, workers = "compiler", 2
    programs, mesh = sketched(WAYS[way](workers), units=3), mesh_of(workers)
    params = placed(copies(network(), workers), SPECS, mesh)
    data = placed(data_of(workers), P(), mesh)
    step = lambda at, *split: programs.step(*split, data, np.full(workers, at))[:3]  # noqa: E731
    saved = step(0, params, *programs.init(params, keys_of(workers)))
    assert np.abs(saved[2].pending).max() > 0
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved
        )
        result = checkpointer.restore(tmp_path / "state", shapes)
    assert jax.tree.structure(result) == jax.tree.structure(saved)
    assert_bitwise_equal(result, saved)
    for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(saved), strict=True):
        assert a.sharding == b.sharding
    assert_in_their_places(result[0], per_worker(SPECS))
    on, again = (programs.sync(*step(3, *state)) for state in (saved, result))
    assert_bitwise_equal(again, on)
