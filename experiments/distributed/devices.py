"""The mesh of an experiment's workers, one device each, and how arrays lie on it."""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.distributed.deadlines import several
from syncopate.plans import check_whole
from syncopate.refusals import UserError
from syncopate.workers import AXIS


def mesh_of(run: str, workers: int) -> Mesh | None:
    """The mesh of `--run=mesh`, or None."""
    if run == "mesh":
        return worker_mesh(workers)
    if several():
        raise UserError(
            f"--run is {run} in {jax.process_count()} processes, each of which would do the whole "
            "work: pass --run=mesh, or start one process."
        )
    return None


def worker_mesh(workers: int) -> Mesh:
    """A mesh of the first `workers` devices of all processes."""
    workers, devices = check_whole("workers", workers, 1), jax.devices()
    if workers > len(devices):
        raise UserError(
            f"{workers} workers need as many devices, and {len(devices)} are here: take fewer "
            "workers, or use one device to simulate them (without --run=mesh). On a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={workers} makes more."
        )
    taking_part = {device.process_index for device in devices[:workers]}
    if len(taking_part) < jax.process_count():
        raise UserError(
            f"{workers} workers leave processes without one, of {jax.process_count()} with "
            f"{len(devices)} devices: use as many workers as devices, or start fewer processes."
        )
    return jax.make_mesh((workers,), (AXIS,), (AxisType.Auto,), devices=devices[:workers])


def worker_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of arrays with a leading worker axis; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(AXIS))


def replicated_sharding(mesh: Mesh | None) -> NamedSharding | None:
    """The sharding of arrays that are the same for all workers; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())
