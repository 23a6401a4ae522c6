"""The number of workers and their mesh, from the argument `workers` of all functions."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key, PyTree

from syncopate import mesh
from syncopate.plans import check_key, is_whole

AXIS = "worker"
ONE = (
    "pass one worker's key: under jax.vmap or local_opt.map_workers each gets its own; in "
    "jax.shard_map pass key[0]."
)


class Workers(NamedTuple):
    """Where the workers are."""

    count: Any  # W; None for one worker without an axis
    axis_name: str = AXIS
    mesh: Any = None  # None where they are simulated

    @property
    def of_process(self) -> np.ndarray:
        """The numbers of the workers whose devices belong to this process."""
        if self.mesh is None:
            return np.arange(self.count or 1)
        axis, process = self.mesh.axis_names.index(self.axis_name), jax.process_index()
        devices = np.ndenumerate(self.mesh.devices)
        return np.unique([at[axis] for at, device in devices if device.process_index == process])

    @property
    def sharding(self) -> NamedSharding | None:
        """The sharding of arrays [W, ...] on the workers' devices; None for the default device."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(self.axis_name))

    def map(self, function: Callable) -> Callable:
        """Maps a function of one worker's trees over all workers, leaves [W, ...]."""
        if self.count is None:
            return function
        if self.mesh is None:
            return jax.vmap(function, axis_name=self.axis_name)

        def on_device(*trees):
            result = function(*jax.tree.map(lambda x: x[0], trees))
            return jax.tree.map(lambda x: x[None], result)

        spec = P(self.axis_name)
        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=spec,
            out_specs=spec,
            axis_names={self.axis_name},
            check_vma=False,
        )


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


def shared_key(key: Key[Array, ""], axis_name: str) -> Key[Array, ""]:
    """Worker 0's key on every worker, for random numbers that are equal on all of them."""
    mesh.axis_size(axis_name)  # raises outside of the axis
    return _of_first(check_key(key, ONE), axis_name)


def _of_first(x, axis_name):
    """Worker 0's array, on every worker."""
    if mesh.is_key(x):
        data = _of_first(jax.random.key_data(x), axis_name)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    mine = jnp.where(jax.lax.axis_index(axis_name) == 0, x, jnp.zeros_like(x))
    return jax.lax.psum(mine, axis_name).astype(x.dtype)


def simulated(axis_name: str) -> bool:
    """Whether the workers are on one device, under `jax.vmap`."""
    return not {*mesh.names_of(axis_name)} & {*jax.sharding.get_abstract_mesh().manual_axes}


def equal_once(tree: PyTree, axis_name: str) -> PyTree:
    """A tree that is equal on all workers; for simulated workers one unbatched copy."""
    if not simulated(axis_name):
        return tree
    return jax.tree.map(lambda x: _of_first(x, axis_name), tree)
