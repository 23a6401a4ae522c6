"""One per-worker function, three ways to run it: vmap, one after another, shard_map over a mesh.

A function is written for one worker with the named axis "worker". Its arguments and results are
either shared (the same for all workers) or owned (with a leading worker axis outside, without it
inside).
"""

from collections.abc import Callable, Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from syncopate import plans

AXIS = "worker"


def simulate(
    function: Callable, *, owned_in: Sequence[bool], owned_out: Sequence[bool], axis_name=AXIS
):
    """Runs all workers on one device by `jax.vmap`."""
    return jax.vmap(
        function,
        in_axes=tuple(0 if owned else None for owned in owned_in),
        out_axes=tuple(0 if owned else None for owned in owned_out),
        axis_name=axis_name,
    )


def in_turn(function: Callable, *, owned_in: Sequence[bool], owned_out: Sequence[bool]):
    """Runs the workers one after another on one device, for functions without collectives.

    Each worker's own parameters in a batched convolution make it a grouped one, which CPUs do
    badly; one worker at a time is as fast as training that worker alone.

    Raises:
      ValueError: for a shared result, which would need a collective.
    """
    if not all(owned_out):
        raise ValueError(f"owned_out is {tuple(owned_out)}: workers in turn share no result.")

    def run(*args):
        owned = tuple(a for a, own in zip(args, owned_in, strict=True) if own)

        def one(owned):
            mine = iter(owned)
            return function(*(next(mine) if o else a for a, o in zip(args, owned_in, strict=True)))

        return jax.lax.map(one, owned)

    return run


def over_mesh(mesh: Mesh, *, axis_name: str = AXIS):
    """Runs one worker per place on an axis of `mesh`, by `jax.shard_map`.

    Other axes are left to the compiler: a worker is then several devices.
    """
    owned = PartitionSpec(axis_name)

    def run(function: Callable, *, owned_in: Sequence[bool], owned_out: Sequence[bool]):
        def per_device(*args):
            inside = [
                jax.tree.map(lambda x: x[0], a) if own else a
                for a, own in zip(args, owned_in, strict=True)
            ]
            out = function(*inside)
            return tuple(
                jax.tree.map(lambda x: x[None], o) if own else o
                for o, own in zip(out, owned_out, strict=True)
            )

        # check_vma=True would make jax.grad of shared parameters insert a psum, and the rows
        # would no longer be this worker's own.
        return jax.shard_map(
            per_device,
            mesh=mesh,
            axis_names={axis_name},
            in_specs=tuple(owned if o else PartitionSpec() for o in owned_in),
            out_specs=tuple(owned if o else PartitionSpec() for o in owned_out),
            check_vma=False,
        )

    return run


def worker_mesh(workers: int) -> Mesh:
    """A mesh of the first `workers` devices, of all processes.

    Raises:
      ValueError: if there are fewer devices, or a process has none of them.
    """
    if not plans.is_whole(workers) or workers < 1:
        raise ValueError(f"there are {workers!r} workers: pass a whole number >= 1.")
    devices = jax.devices()
    if workers > len(devices):
        raise ValueError(
            f"{workers} workers need as many devices, and {len(devices)} are here: take fewer "
            "workers, or use one device to simulate them (without --run=mesh). On a CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={workers} makes more."
        )
    taking_part = {device.process_index for device in devices[:workers]}
    if len(taking_part) < jax.process_count():
        raise ValueError(
            f"{workers} workers leave processes without one, of {jax.process_count()} with "
            f"{len(devices)} devices: use as many workers as devices, or start fewer processes."
        )
    return jax.make_mesh((workers,), (AXIS,), (AxisType.Auto,), devices=devices[:workers])


def owned_sharding(mesh: Mesh | None):
    """Where arrays with a leading worker axis live: one slice per device, or the one device."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(AXIS))


def shared_sharding(mesh: Mesh | None):
    """Where arrays live that are the same for all workers: whole on every device."""
    return None if mesh is None else NamedSharding(mesh, PartitionSpec())
