"""The same start for every worker, and which leaves of a tree get a worker axis."""

import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Key, PyTree

from local_opt.workers import AXIS, check_synced, count_of
from syncopate.mesh import is_key

KEYS = (None, "fold", "copy")


def owned(
    tree: PyTree, workers: int | Mesh, *, axis_name: str = AXIS, keys: str | None = None
) -> PyTree:
    """The same start for every worker: leaves [W, ...], on the devices of their workers.

    x_w = x for w = 0 .. W - 1, in new memory, so that a step may donate it.

    A random key in the tree, as for dropout in the state of a `flax.nnx` model, is copied like
    other leaves, so that all workers drop the same units. `keys="fold"` gives each worker its own
    key, fold_in(key, w). Only typed keys are recognised: a legacy key of `jax.random.PRNGKey` looks
    like any other array.

    Args:
      tree: parameters, optimizer state, a whole training state. Whole numbers, as a TrainState's
        step, become arrays; other leaves that are not arrays, as the rate of an equinox dropout,
        stay. Arrays that are split over other axes of a mesh stay split.
      workers, axis_name: as in `lift`.
      keys: "fold" for each worker's own, "copy" for the same on all; None copies and warns.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: for unknown `keys`, or if processes have different values.

    Warns:
      UserWarning: if a key is copied and `keys` is None.

    Examples:
      >>> import jax, jax.numpy as jnp, local_opt
      >>> local_opt.owned({"w": jnp.arange(2), "step": 0}, 3)["w"].tolist()
      [[0, 1], [0, 1], [0, 1]]
      >>> key = local_opt.owned(jax.random.key(0), 2, keys="fold")
      >>> bool(key[0] == key[1])
      False
    """
    count = count_of(workers, axis_name)
    if keys not in KEYS:
        raise ValueError(f"keys is {keys!r}: pass 'fold', for a key of each worker, or 'copy'.")

    def number(x):
        if isinstance(x, bool) or not isinstance(x, int):
            return x
        return jnp.asarray(x, jnp.result_type(x))  # not a weak type, which the first step changes

    def repeated(arrays):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), arrays)

    (arrays,), (rest,) = parted([jax.tree.map(number, tree)], ["owned"])
    found = _spread(repeated, arrays, workers, axis_name)
    if isinstance(workers, Mesh) and jax.process_count() > 1:
        check_synced(found, what="state", ulps=0)
    of_keys = jax.tree.map(lambda x: x if is_key(x) else None, arrays)
    if keys is None:
        _warn_of_copies(of_keys)
    if keys == "fold":
        own = _spread(lambda x: jax.tree.map(folded, repeated(x)), of_keys, workers, axis_name)
        found = joined(own, found)
    return joined(found, rest)


def _warn_of_copies(of_keys):
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(of_keys)]
    if names:
        warnings.warn(
            f"every worker gets the same key {', '.join(names)}, and will drop the same units: "
            "pass keys='fold' for a key of each worker's own, or keys='copy' to keep them equal.",
            stacklevel=3,
        )


def _spread(function, arrays, workers, axis_name):
    """The result of a function that adds a worker axis, on the devices of the workers."""
    if not isinstance(workers, Mesh):
        return jax.jit(function)(arrays)
    explicit = AxisType.Explicit in workers.axis_types

    def place(x, *first):
        spec = spec_of(x)
        # As long as the shape, as a step's results are there: else its second call would compile.
        spec += (None,) * (jnp.ndim(x) - len(spec)) if explicit else ()
        return NamedSharding(workers, PartitionSpec(*first, *spec))

    if jax.process_count() == 1:  # one copy per device, never all on one
        given = jax.device_put(arrays, jax.tree.map(place, arrays))
    else:  # each process's own, which may differ
        given = jax.tree.map(lambda x: x if is_key(x) else np.asarray(x), arrays)
    places = jax.tree.map(lambda x: place(x, axis_name), arrays)
    return jax.jit(function, out_shardings=places)(given)


def parted(trees: Iterable[PyTree], words: Iterable[str]) -> tuple[tuple, tuple]:
    """The trees' arrays, and their other leaves; None in place of those of the other kind."""
    kinds = jax.Array | np.ndarray | np.generic

    def is_array(x, word):
        return isinstance(x, kinds) or (
            word in ("mean", "sum") and isinstance(x, int | float | complex)
        )

    pairs = list(zip(trees, words, strict=True))
    arrays = [jax.tree.map(lambda x, w=w: x if is_array(x, w) else None, t) for t, w in pairs]
    rest = [jax.tree.map(lambda x, w=w: None if is_array(x, w) else x, t) for t, w in pairs]
    return tuple(arrays), tuple(rest)


def joined(arrays: PyTree, rest: PyTree) -> PyTree:
    """The inverse of `parted`, for one tree."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, arrays, rest, is_leaf=lambda x: x is None
    )


def folded(keys: Key[Array, "W ..."]) -> Key[Array, "W ..."]:
    """fold_in(key_w, w), the keys of worker w."""

    def of_worker(keys, worker):
        flat = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), worker)
        return flat.reshape(keys.shape)

    return jax.vmap(of_worker)(keys, jnp.arange(len(keys)))


def spec_of(x: Any) -> tuple:
    """How an array is split over a mesh; () if it is whole."""
    sharding = getattr(jax.typeof(x) if isinstance(x, Tracer) else x, "sharding", None)
    return tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
