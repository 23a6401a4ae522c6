"""Arrays of all workers, between the host and the devices: a process places its own rows alone."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from experiments.cluster import agree
from local_opt.workers import AXIS


def place(tree, sharding: Sharding | None):
    """Host arrays [W, ...] onto the devices; every process hands over its own workers' rows alone.

    Args:
      tree: the same arrays on all processes, or anything with `shape`, `dtype` and slices, of
        which only the rows of own workers are read; typed PRNG keys too.
      sharding: as from `owned_sharding`; None is the default device.

    Returns:
      JAX arrays. No process waits for another.

    Example:
      >>> import numpy as np
      >>> from experiments.training import placement
      >>> placement.place({"x": np.ones((4, 2))}, None)["x"].shape
      (4, 2)
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def put(x):
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = put(np.asarray(jax.random.key_data(x)))
            wrap = jax.jit(jax.random.wrap_key_data, static_argnames="impl")
            return wrap(data, impl=jax.random.key_impl(x))
        x = x if hasattr(x, "shape") and not isinstance(x, jax.Array) else np.asarray(x)
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.make_array_from_callback(
            x.shape, sharding, lambda index: np.asarray(x[index], dtype), dtype=dtype
        )

    return jax.tree.map(put, tree)


def place_rows(tree, sharding: Sharding | None, workers: int):
    """Arrays [W, ...] of which every process has its own workers' rows alone.

    Args:
      tree: leaves [w, ...], the rows of `own_workers`, in their order.
      sharding: of the whole [W, ...], by its first axis; None is the default device, for w = W.
      workers: W.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x, (workers, *x.shape[1:])),
        tree,
    )


def own(x: jax.Array) -> jax.Array:
    """The rows [w, ...] of this process's own workers, where they are; nothing is copied."""
    if x.is_fully_addressable:
        return x
    shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    shape = (sum(shard.data.shape[0] for shard in shards), *x.shape[1:])
    mesh = Mesh(np.array([shard.device for shard in shards]), (AXIS,))
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.make_array_from_single_device_arrays(shape, sharding, [s.data for s in shards])


def own_workers(mesh: Mesh | None, workers: int) -> list[int]:
    """The workers of this process's devices: their positions on the mesh's axis "worker".

    Args:
      mesh: None if all workers are on the one device.
      workers: W.

    Example:
      >>> from experiments.training import placement
      >>> placement.own_workers(None, 3)
      [0, 1, 2]
    """
    if mesh is None:
        return list(range(workers))
    axis, own = mesh.axis_names.index(AXIS), jax.process_index()
    devices = np.ndenumerate(mesh.devices)
    return sorted({at[axis] for at, device in devices if device.process_index == own})


def on_host(tree):
    """NumPy copies of all values, on every process.

    A collective where values are spread over processes: all processes must call it, in the same
    place. What is here already, or equal everywhere, is copied without one.

    Args:
      tree: arrays; typed PRNG keys become their uint32 data, as of `jax.random.key_data`.

    Example:
      >>> import jax.numpy as jnp
      >>> from experiments.training import placement
      >>> placement.on_host({"x": jnp.arange(3)})
      {'x': array([0, 1, 2], dtype=int32)}
    """

    def data(x):
        key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if key else x

    def get(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return multihost_utils.process_allgather(x, tiled=True)

    tree = jax.tree.map(data, tree)
    if not agree.several():
        return jax.tree.map(np.asarray, jax.device_get(tree))
    with agree.for_others("values that all of them hold"):
        return jax.tree.map(get, tree)
