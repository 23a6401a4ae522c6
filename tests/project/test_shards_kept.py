"""Checkpoints and explicit axes of workers that are several devices."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.problems import assert_bitwise_equal, copies
from tests.shards import (
    MESHES,
    SPECS,
    WAYS,
    assert_in_their_places,
    assert_same_run,
    data_of,
    exact,
    left_to_the_compiler,
    mesh_of,
    network,
    on_one,
    owned,
    placed,
    sharded,
)


@pytest.mark.parametrize("workers", MESHES)
@pytest.mark.parametrize("way", ["compiler", "by hand"])
def test_a_checkpoint_keeps_bits_and_places(way, workers, tmp_path):
    """In the middle of a round and of a pair: what goes on from it is bitwise the run itself."""
    programs, mesh = exact(WAYS[way](workers), units=3), mesh_of(workers)
    params = placed(copies(network(), workers), SPECS, mesh)
    data = placed(data_of(workers), P(), mesh)
    step = lambda at, *owned: programs.steps[3](*owned, data, np.full(workers, at))[:3]  # noqa: E731
    keys = jax.random.split(jax.random.key(7), workers)
    saved = step(0, params, *programs.init(params, keys))
    pending = saved[2].pending
    assert np.abs(pending).max() > 0
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), saved
        )
        found = checkpointer.restore(tmp_path / "state", shapes)
    assert jax.tree.structure(found) == jax.tree.structure(saved)
    assert_bitwise_equal(found, saved)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(saved), strict=True):
        assert a.sharding == b.sharding
    assert_in_their_places(found[0], owned(SPECS))
    assert_in_their_places(found[2].running_sum, P("worker", "model"))
    assert_in_their_places(found[2].pending, P("worker", None, "model"))
    on, again = (programs.sync(*step(3, *state)) for state in (saved, found))
    assert_bitwise_equal(again, on)


@pytest.mark.parametrize("workers", MESHES)
def test_on_explicit_axes_the_run_is_the_same(workers):
    found = sharded(
        exact(left_to_the_compiler(workers, AxisType.Explicit)), workers, AxisType.Explicit
    )
    assert_same_run(found, on_one(exact, workers))
    assert_in_their_places(found[2], owned(SPECS))
    assert_in_their_places(found[3].inner[0].trace, owned(SPECS))
    assert_in_their_places(found[4].running_sum, P("worker", "model"))
