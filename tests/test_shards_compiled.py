"""What the programs of workers that are several devices send, and keep on a device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.problems import copies
from tests.shards import (
    BATCH,
    MESHES,
    SPECS,
    UNITS,
    WAYS,
    data_of,
    lines_of,
    mesh_of,
    network,
    placed,
    sketched,
)

pytestmark = pytest.mark.usefixtures("optimised")  # what users compile


def size_of_shards(params, model):
    """Bytes of one worker's parameters on one of its devices."""
    split = jax.tree.map(lambda x, spec: x.size // (model if spec else 1), params, SPECS)
    return 4 * sum(jax.tree.leaves(split))


def lowered(programs, workers, kind=AxisType.Auto):
    """The compiled step and sync."""
    mesh = mesh_of(workers, kind)
    params = placed(copies(network(), workers), SPECS, mesh)
    data = placed(data_of(workers), P(), mesh)
    state, orders = programs.init(params, jax.random.split(jax.random.key(7), workers))
    step = programs.steps[BATCH].lower(params, state, orders, data, jnp.zeros(workers, int))
    return step.compile(), programs.sync.lower(params, state, orders).compile(), mesh


@pytest.mark.parametrize("workers", MESHES)
@pytest.mark.parametrize("way", ["compiler", "by hand"])
def test_a_sync_sends_shards_and_a_hot_step_talks_inside_its_worker_alone(way, workers, optimised):
    """Nothing is gathered; over the workers go the shards, and k numbers of a pair."""
    programs = sketched(WAYS[way](workers), size=128)
    step, sync, mesh = lowered(programs, workers)
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
