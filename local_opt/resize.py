"""Converts parameters and states of W workers for another number, to resume a run.

On the host, in NumPy; all leaves are [W, ...]. The conversion is an additional sync, also in the
middle of a round, which then continues from the mean.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from local_opt.replication import fold_in_workers
from local_opt.rounds import AccumulateState, LocalState
from local_opt.workers import check_leading, first
from syncopate.mesh import is_key, name_of
from syncopate.plans import check_like, check_whole

MEAN, RESET, FIRST = "mean", "reset", "first"
POLICIES = (MEAN, RESET, FIRST)  # for the workers' own optimizer states


@jax.transfer_guard("allow")
def mean_of(tree: PyTree, workers: int) -> PyTree:
    """The mean over W workers, for each of W' workers; integers are those of worker 0.

    Keys that are equal on all workers stay equal. Keys that differ are replaced by
    fold_in(key_0, w), so that no two workers share a stream.

    Args:
      tree: leaves [W, ...].
      workers: W' >= 1.

    Returns:
      NumPy arrays [W', ...], summed in float64; and keys.

    Raises:
      ValueError: for leaves without a worker axis, or legacy keys that differ between workers.
    """
    check_whole("workers", workers, 1)
    check_leading(tree, "worker")

    def mean(path, x):
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return _first_of(path, x, workers)
        x = np.asarray(x)
        wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
        return _to_all(np.mean(x.astype(wide), axis=0).astype(x.dtype), workers)

    return jax.tree_util.tree_map_with_path(mean, tree)


@jax.transfer_guard("allow")
def resize(
    state: LocalState | AccumulateState, fresh: Any, workers: int, policy: str
) -> LocalState | AccumulateState:
    """Converts the state of rounds of W workers for W' workers.

    Fields that are equal on all workers are kept: the steps since the last sync, the outer
    optimizer and the anchor. Residuals of compression are averaged. Corrections of drift start
    anew, because the workers' data change. Keys of the inner optimizers are as in `mean_of`.

    Args:
      state: the state of `local_rounds` or `accumulated_rounds` of W workers, leaves [W, ...].
      fresh: an initial state of the same rounds at the new parameters, leaves [W', ...].
      workers: W' >= 1.
      policy: what becomes of the inner optimizers' states: "mean", with the integers of worker 0;
        "reset", to initial values; or "first", those of worker 0. With accumulated gradients there
        is one optimizer, whose state is kept.

    Raises:
      ValueError: for a state of other rounds, or an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}: it must be one of {', '.join(POLICIES)}.")
    check_whole("workers", workers, 1)
    check_leading(state, "worker")

    def of_first(tree, shared=False):
        each = functools.partial(_first_of, workers=workers, shared=shared)
        return jax.tree_util.tree_map_with_path(each, tree)

    of_all = functools.partial(of_first, shared=True)
    if isinstance(state, AccumulateState):
        return AccumulateState(
            of_first(state.since), of_first(state.inner), mean_of(state.mean, workers)
        )
    if not isinstance(state, LocalState):
        raise ValueError(
            f"{type(state).__name__} is not a state of local_rounds or accumulated_rounds, and no "
            "other can be resized: pass one of these, or resume with as many workers as before."
        )
    resized = lambda x: jax.ShapeDtypeStruct((workers, *np.shape(x)[1:]), x.dtype)  # noqa: E731
    check_like("inner", jax.tree.map(resized, state.inner), fresh.inner, "the fresh state")
    inner, none = fresh.inner, lambda part: type(part) is tuple and not part
    if policy != RESET:
        inner = mean_of(state.inner, workers) if policy == MEAN else of_first(state.inner)
    return LocalState(
        since=of_all(state.since),
        inner=inner,
        # Without an outer optimizer and residuals, the round continues from the new parameters.
        anchor=fresh.anchor if none(state.outer) and none(state.residual) else of_all(state.anchor),
        outer=of_all(state.outer),
        residual=mean_of(state.residual, workers),
        drift=mean_of(state.drift, workers),
        correction=fresh.correction,
    )


def _first_of(path, x, workers, shared=False):
    """Worker 0's part of a leaf, for all workers; keys that differ are replaced by new ones."""
    if is_key(x):
        data = np.asarray(jax.random.key_data(x))
        keys = jnp.broadcast_to(first(x), (workers, *x.shape[1:]))
        differ = len(x) == 1 or (data != data[0]).any()
        return fold_in_workers(keys) if differ and not shared else keys
    x = np.asarray(x)
    if x.dtype == np.uint32 and x.ndim > 1 and x.shape[-1] in (2, 4) and (x != x[0]).any():
        raise ValueError(
            f"leaf {name_of(path)} is uint32{list(x.shape)} and differs between workers, so it "
            "may hold legacy keys, which all workers would share: make them typed keys by "
            "jax.random.wrap_key_data, or leave the leaf out and give each worker a new key."
        )
    return _to_all(x[0], workers)


def _to_all(x, workers):
    return np.broadcast_to(x, (workers, *np.shape(x))).copy()
