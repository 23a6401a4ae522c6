"""The same state for all workers."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PyTree

from local_opt import nnx
from local_opt.workers import check_synced, is_module, joined, parted
from syncopate.mesh import is_key, is_legacy, name_of
from syncopate.workers import count_of

KEYS = (None, "fold", "copy")


@jax.transfer_guard("allow")
def replicate(
    tree: PyTree,
    workers: int | Mesh | None = None,
    *,
    axis_name: str | None = None,
    keys: str | None = None,
) -> PyTree:
    """The same start for every worker: leaves [W, ...], on the devices of their workers.

    x_w = x for w = 0 .. W - 1, in new memory, so that a step may donate it.

    Random keys in the tree are copied, too: with a dropout key in the state of a `flax.nnx` model,
    all workers drop the same units. `keys="fold"` gives each worker its own key, fold_in(key, w).
    It refuses legacy keys, which cannot be distinguished from other pairs of numbers.

    Args:
      tree: arrays, such as parameters or a whole training state. Whole numbers become arrays,
        except in an equinox module, where they are sizes. Other leaves pass through.
      workers, axis_name: as in `map_workers`; on a mesh every process passes the same tree. Arrays
        that are split over other axes of the mesh stay split.
      keys: "fold" or "copy"; None copies with a warning.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: for unknown `keys`, legacy keys with `keys="fold"`, no mesh in scope, or values
        that differ between processes.

    Warns:
      UserWarning: if a key is copied and `keys` is None.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from syncopate import local_opt
      >>> local_opt.replicate({"w": jnp.arange(2), "step": 0}, 3)["w"].tolist()
      [[0, 1], [0, 1], [0, 1]]
      >>> key = local_opt.replicate(jax.random.key(0), 2, keys="fold")
      >>> bool(key[0] == key[1])
      False
    """
    count, axis_name, mesh = count_of(workers, axis_name)
    if keys not in KEYS:
        raise ValueError(f"keys is {keys!r}: pass 'fold' for different keys, or 'copy' for equal.")
    arrays, rest = parted(_counters(tree))
    copies = _spread(arrays, count, mesh, axis_name)
    if mesh is not None and jax.process_count() > 1:
        check_synced(copies, what="state", ulps=0)
    of_keys = jax.tree.map(lambda x: x if is_key(x) else None, arrays)
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    legacy = [name_of(path) for path, x in leaves if is_legacy(x)]
    if legacy and keys == "fold":
        raise ValueError(
            f"leaf {legacy[0]} is uint32[2], a legacy key or any two numbers: make it a typed key "
            "by jax.random.wrap_key_data, or keep other numbers in another type."
        )
    if keys is None and (named := legacy + [name_of(path) for path, x in leaves if is_key(x)]):
        warnings.warn(
            f"every worker gets the same key {', '.join(named)}, and will drop the same units: "
            "pass keys='fold' for a key of each worker, or keys='copy' to keep them equal.",
            stacklevel=3,  # beyond the transfer guard
        )
    if keys == "fold":
        keys_of = _spread(of_keys, count, mesh, axis_name, folds=True)
        copies = joined(keys_of, copies)
    return nnx.share_as(tree, joined(copies, rest))


def _counters(tree):
    """The tree with arrays in place of whole numbers, except for sizes in equinox' modules."""

    def number(x):
        if isinstance(x, bool) or not isinstance(x, int):
            return x
        return jnp.asarray(x, jnp.result_type(x))  # the first step would change a weak type

    return jax.tree.map(number, tree, is_leaf=is_module)


def _spread(tree, count, mesh, axis_name, *, folds=False):
    """The arrays of all workers, on their devices."""
    leaves, structure = jax.tree.flatten(tree)
    if mesh is None:
        return structure.unflatten(_repeat(count, folds, None)(leaves))

    def place(x, *first):
        spec = spec_of(x)
        # One entry per axis, as the results of a step have, so that the second step does not
        # compile again.
        spec += (None,) * (jnp.ndim(x) - len(spec)) if mesh.explicit_axes else ()
        return NamedSharding(mesh, PartitionSpec(*first, *spec))

    places = tuple(place(x, axis_name) for x in leaves)
    if jax.process_count() == 1:  # one copy per device, never all copies on one
        leaves = jax.device_put(leaves, list(map(place, leaves)))
    else:  # each process has its own tree, which may differ
        leaves = [x if is_key(x) else np.asarray(x) for x in leaves]
    return structure.unflatten(_repeat(count, folds, places)(leaves))


@functools.lru_cache(maxsize=64)
def _repeat(count, folds, places):
    """Compiles arrays -> the arrays of all workers, once for equal places."""

    def repeat(arrays):
        arrays = [jnp.broadcast_to(x, (count, *x.shape)) for x in arrays]
        return list(map(fold_in_workers, arrays)) if folds else arrays

    return jax.jit(repeat, out_shardings=None if places is None else list(places))


def fold_in_workers(keys: Key[Array, "W ..."]) -> Key[Array, "W ..."]:
    """fold_in(key_w, w), the keys of worker w."""

    def of_worker(keys, worker):
        flat = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), worker)
        return flat.reshape(keys.shape)

    return jax.vmap(of_worker)(keys, jnp.arange(len(keys)))


def spec_of(x: Any) -> tuple:
    """How an array is split over a mesh; () if it is whole."""
    sharding = getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
