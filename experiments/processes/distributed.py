"""Several processes, each with its own workers: how they start, and what each of them does.

    python -m experiments.qsr --run=mesh --workers=2 \
        --coordinator_address=HOST:PORT --num_processes=2 --process_id=0   # and 1, elsewhere

Every process runs the same program. Workers are the devices of a mesh over all processes; a process
places its own workers' data alone. Process 0 writes all files, so that the output folder must be
one that all processes can read. `experiments.launch` starts several on one machine.
"""

import functools
import json
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from tqdm import tqdm

from experiments.processes import agreement, waits
from experiments.processes.cluster import start as start
from experiments.processes.waits import several as several
from local_opt import runners


def is_first() -> bool:
    """Whether this is process 0, which alone writes files and talks to people."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def place(tree, sharding: Sharding | None):
    """Host arrays [W, ...] onto the devices; every process hands over its own workers' rows alone.

    Args:
      tree: the same arrays on all processes, or anything with `shape`, `dtype` and slices, of
        which only the rows of own workers are read; typed PRNG keys too.
      sharding: as from `runners.owned_sharding`; None is the default device.

    Returns:
      JAX arrays. No process waits for another.

    Example:
      >>> import numpy as np
      >>> from experiments.processes import distributed
      >>> distributed.place({"x": np.ones((4, 2))}, None)["x"].shape
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
    mesh = Mesh(np.array([shard.device for shard in shards]), (runners.AXIS,))
    sharding = NamedSharding(mesh, PartitionSpec(runners.AXIS))
    return jax.make_array_from_single_device_arrays(shape, sharding, [s.data for s in shards])


def gathered(tree):
    """The same arrays [W, ...], whole on every process. A collective that the host only starts."""

    def whole(x):
        if not several() or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return _identity(runners.shared_sharding(x.sharding.mesh))(x)

    return jax.tree.map(whole, tree)


@functools.cache
def _identity(sharding):
    return jax.jit(lambda x: x, out_shardings=sharding)


def stacked_on_host(arrays: Sequence[jax.Array]) -> np.ndarray:
    """`np.stack` of many arrays [W, ...] of one shape, by one collective: see `on_host`."""
    if not several():
        return np.stack(jax.device_get(arrays))
    rows = np.stack(jax.device_get([own(x) for x in arrays]), axis=1)
    placed = place_rows(rows, arrays[0].sharding, arrays[0].shape[0])
    return on_host(placed).swapaxes(0, 1)


def on_host(tree):
    """NumPy copies of all values, on every process.

    A collective where values are spread over processes: all processes must call it, in the same
    place. What is here already, or equal everywhere, is copied without one.

    Args:
      tree: arrays; typed PRNG keys become their uint32 data, as of `jax.random.key_data`.

    Example:
      >>> import jax.numpy as jnp
      >>> from experiments.processes import distributed
      >>> distributed.on_host({"x": jnp.arange(3)})
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
    if not several():
        return jax.tree.map(np.asarray, jax.device_get(tree))
    with waits.for_others("values that all of them hold"):
        return jax.tree.map(get, tree)


def local(tree):
    """What this process alone can compute with: the tree itself, or its `on_host` of several."""
    return on_host(tree) if several() else tree


def of_first(value):
    """What process 0 has, on every process: what they decide by must be the same. A collective.

    Args:
      value: made of what JSON knows; floats survive exactly.

    Example:
      >>> from experiments.processes import distributed
      >>> distributed.of_first({"seconds": 0.1})
      {'seconds': 0.1}
    """
    if not several():
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with waits.for_others("what process 0 has found"):
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
        padded = np.zeros(-(-size // 1024) * 1024, np.uint8)  # few shapes, for each is compiled
        if is_first():
            padded[:size] = text
        return json.loads(multihost_utils.broadcast_one_to_all(padded)[:size].tobytes())


def wait(name: str) -> None:
    """Waits until all processes have come here; `name` tells places apart."""
    if several():
        with waits.for_others(f"all to come to this: {name}"):
            multihost_utils.sync_global_devices(name)


def check_data(task) -> None:
    """Raises ValueError, on all processes, where they have loaded different data."""
    if several():
        agreement.check_data(task)


def mesh_of(run: str, workers: int) -> Mesh | None:
    """The mesh of `--run=mesh`, or None.

    Raises:
      ValueError: for another way to run in several processes; as of `runners.worker_mesh`.
    """
    if run == "mesh":
        return runners.worker_mesh(workers)
    if several():
        raise ValueError(
            f"--run is {run} in {jax.process_count()} processes: each would do the whole work. "
            "Pass --run=mesh, or start one process."
        )
    return None


def own_workers(mesh: Mesh | None, workers: int) -> list[int]:
    """The workers of this process's devices: their positions on the mesh's axis "worker".

    Args:
      mesh: None if all workers are on the one device.
      workers: W.

    Example:
      >>> from experiments.processes import distributed
      >>> distributed.own_workers(None, 3)
      [0, 1, 2]
    """
    if mesh is None:
        return list(range(workers))
    axis, own = mesh.axis_names.index(runners.AXIS), jax.process_index()
    devices = np.ndenumerate(mesh.devices)
    return sorted({at[axis] for at, device in devices if device.process_index == own})


def say(text: str) -> None:
    """Prints, by process 0."""
    if is_first():
        print(text)


def bar(**options) -> tqdm:
    """A progress bar, where somebody looks: `tqdm(**options)` of process 0."""
    return tqdm(disable=not is_first(), **options)
