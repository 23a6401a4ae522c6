"""The number of workers and their mesh, from the argument `workers` of all functions."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from syncopate.plans import is_whole

AXIS = "worker"


class Workers(NamedTuple):
    """Where the workers are."""

    count: int
    axis_name: str
    mesh: Any  # None where they are simulated


def count_of(workers: int | Mesh | AbstractMesh | None, axis_name: Any) -> Workers:
    """W, the name of the workers' axis, and their mesh; see `map_workers` for the arguments."""
    workers = mesh_in_scope() if workers is None else workers
    if not isinstance(axis_name, str | None):
        raise ValueError(
            f"axis_name is {axis_name!r}: pass one name, as 'worker'; where workers are the places "
            "of two axes of a mesh, make a mesh in which these are one axis."
        )
    if isinstance(workers, Mesh | AbstractMesh):
        axis_name = axis_of(axis_name, workers.axis_names)
        if axis_name not in workers.shape:
            raise ValueError(
                f"the mesh has the axes {workers.axis_names} and the workers' is {axis_name!r}: "
                "pass axis_name=, or make the mesh with that axis."
            )
        return Workers(workers.shape[axis_name], axis_name, workers)
    if not is_whole(workers) or int(workers) < 1:
        raise ValueError(f"workers is {workers!r}: pass a whole number >= 1, or a mesh.")
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        raise ValueError(
            f"workers is {workers} in {jax.process_count()} processes, each of which would average "
            "its own: pass jax.make_mesh((jax.device_count(),), ('worker',)), or for workers of "
            "one process jax.sharding.Mesh(jax.local_devices(), ('worker',))."
        )
    return Workers(int(workers), axis_of(axis_name, ()), None)


def mesh_in_scope() -> Mesh | AbstractMesh:
    """The mesh of `jax.set_mesh`; an AbstractMesh, without devices, while a program is traced."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            "workers is None and no mesh is in scope: enter one, as by jax.set_mesh(mesh), or pass "
            "a mesh, or the number of workers to simulate."
        )
    with contextlib.suppress(ValueError):  # while a program is traced
        devices = jax.sharding.get_mesh()
        return mesh if devices.empty else devices
    return mesh


def axis_of(axis_name: Any, names: Sequence[str], *, alone: bool = False) -> Any:
    """The workers' axis: the one given, and for None the only one, or "worker" unless `alone`."""
    if alone and axis_name is None and len(names) > 1:  # a wrong axis would go unnoticed
        raise ValueError(f"axis_name is None and there are the axes {list(names)}: pass one.")
    return axis_name if axis_name is not None else names[0] if len(names) == 1 else AXIS
