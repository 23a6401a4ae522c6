"""Parameters and the states of rounds, from those of W workers to those of another number.

On the host, in NumPy: all leaves are [W, ...]. It is a sync that no plan has asked for, in the
middle of a round, whose steps go on from the mean.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from local_opt.accumulate import AccumulateState
from local_opt.rounds import LocalState

MEAN, RESET, FIRST = "mean", "reset", "first"
POLICIES = (MEAN, RESET, FIRST)  # of the workers' own optimizer states


class Change(NamedTuple):
    """To how many workers.

    Fields:
      workers: W' >= 1.
      policy: what becomes of the inner optimizers' states: their mean, with whole numbers of the
        first; their first values; or those of the first worker.
      fresh: the first state of `Rounds` at the new parameters, leaves [W', ...].
    """

    workers: int
    policy: str
    fresh: NamedTuple


def mean_of(tree, workers: int):
    """x <- 1/W sum_v x_v, for all of W' workers; of whole numbers those of the first.

    Args:
      tree: of W workers, leaves [W, ...]; workers: W' >= 1.

    Returns:
      NumPy arrays [W', ...], added up in float64.

    Example:
      >>> import numpy as np
      >>> from local_opt.elastic import mean_of
      >>> mean_of({"w": np.array([[1.0], [4.0]])}, 3)["w"].tolist()
      [[2.5], [2.5], [2.5]]
    """

    def mean(x):
        x = np.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return _to_all(x[0], workers)
        wide = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
        return _to_all(np.mean(x.astype(wide), axis=0).astype(x.dtype), workers)

    return jax.tree.map(mean, tree)


@functools.singledispatch
def resized(state, change: Change):
    """The state of rounds of W' workers; a row for every type of state.

    What is equal on all workers stays: the steps since the last sync, an outer optimizer and the
    anchor of the changes that it is told. What a wire has lost is averaged, so that the mean that
    it returns to is. Corrections of drift begin anew, as the units of workers are others.

    Args:
      state: of W workers, leaves [W, ...]; change: to W'.

    Raises:
      ValueError: for a state of other rounds, or a policy that is none.

    Example:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> from local_opt.elastic import Change, resized
      >>> rounds = local_opt.local_rounds(optax.sgd(0.1, momentum=0.9), axis_name="worker")
      >>> state, fresh = (jax.vmap(rounds.init)(jnp.zeros((w, 3))) for w in (4, 2))
      >>> resized(state, Change(2, "mean", fresh)).since.shape
      (2,)
    """
    raise ValueError(
        f"{type(state).__name__} has no row in local_opt.elastic, so that its rounds cannot go on "
        "with other workers: go on with as many, or register it with `resized`."
    )


@resized.register
def _(state: LocalState, change):
    """Local steps: each worker has an inner optimizer of its own."""
    if change.policy not in POLICIES:
        raise ValueError(f"policy is {change.policy!r}: it must be one of {', '.join(POLICIES)}.")
    inner = {MEAN: mean_of, FIRST: _first}.get(change.policy)
    first = functools.partial(_first, workers=change.workers)
    return LocalState(
        since=first(state.since),
        inner=inner(state.inner, change.workers) if inner else change.fresh.inner,
        anchor=first(state.anchor),
        outer=first(state.outer),
        lost=mean_of(state.lost, change.workers),
        drift=mean_of(state.drift, change.workers),
        correction=change.fresh.correction,
    )


@resized.register
def _(state: AccumulateState, change):
    """Accumulated gradients: the workers' means differ, and their optimizer is one."""
    first = functools.partial(_first, workers=change.workers)
    mean = mean_of(state.mean, change.workers)
    return AccumulateState(first(state.since), first(state.inner), mean)


def _first(tree, workers):
    return jax.tree.map(lambda x: _to_all(np.asarray(x)[0], workers), tree)


def _to_all(x, workers):
    return np.broadcast_to(x, (workers, *np.shape(x))).copy()
