"""Moves arrays of all workers between host and devices; a process places only its own rows."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding

from experiments.cluster import agree
from local_opt.workers import AXIS


def _is_key(x) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def place(tree, sharding: Sharding | None):
    """Places arrays [W, ...], equal on all processes, on the devices, without a collective.

    Args:
      tree: on the host; typed PRNG keys too.
      sharding: as from `local_opt.workers.owned_sharding`; None is the default device.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put(x):
        if _is_key(x):
            wrap = jax.jit(jax.random.wrap_key_data, static_argnames="impl")
            return wrap(put(jax.random.key_data(x)), impl=jax.random.key_impl(x))
        x = np.asarray(x, jax.dtypes.canonicalize_dtype(np.result_type(x)))
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(put, tree)


def place_as(tree, like):
    """`place`, each array with the sharding of the one in `like`, of arrays or their shapes."""
    return jax.tree.map(lambda x, y: place(x, y.sharding), tree, like)


def place_rows(tree, sharding: Sharding | None):
    """Places arrays [W, ...] of which each process has the rows [w, ...] of its own workers."""
    if sharding is None:
        return jax.device_put(tree)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), tree)


def own(x: jax.Array) -> jax.Array:
    """The rows [w, ...] of this process's own workers, without a copy."""
    if x.is_fully_addressable:
        return x
    return multihost_utils.global_array_to_host_local_array(x, x.sharding.mesh, x.sharding.spec)


def own_workers(mesh: Mesh | None, workers: int) -> list[int]:
    """The workers of this process's devices: their positions on the mesh's axis "worker"."""
    if mesh is None:
        return list(range(workers))
    axis, own = mesh.axis_names.index(AXIS), jax.process_index()
    devices = np.ndenumerate(mesh.devices)
    return sorted({at[axis] for at, device in devices if device.process_index == own})


def on_host(tree):
    """NumPy copies of all values, on every process; of typed PRNG keys their uint32 data.

    If values are spread over processes this is a collective, which all processes must call.
    """

    def get(x):
        x = jax.random.key_data(x) if _is_key(x) else x
        here = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
        return np.asarray(x) if here else multihost_utils.process_allgather(x, tiled=True)

    with agree.for_others("values that all of them hold"):
        return jax.tree.map(get, tree)
