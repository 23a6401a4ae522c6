"""Parameters and the states of rounds, from those of W workers to those of another number.

On the host, in NumPy: all leaves are [W, ...]. It is a sync that no plan has asked for, in the
middle of a round, whose steps go on from the mean.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from local_opt.rounds import AccumulateState, LocalState

MEAN, RESET, FIRST = "mean", "reset", "first"
POLICIES = (MEAN, RESET, FIRST)  # of the workers' own optimizer states


def mean_of(tree: PyTree, workers: int) -> PyTree:
    """x <- 1/W sum_v x_v, for all of W' workers; of whole numbers those of the first.

    Args:
      tree: of W workers, leaves [W, ...]; workers: W' >= 1.

    Returns:
      NumPy arrays [W', ...], added up in float64.

    Example:
      >>> import numpy as np
      >>> from local_opt.resize import mean_of
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


def resize(
    state: LocalState | AccumulateState, fresh: Any, workers: int, policy: str
) -> LocalState | AccumulateState:
    """The state of rounds of W' workers.

    What is equal on all workers stays: the steps since the last sync, an outer optimizer and the
    anchor of the changes that it is told. What a wire has lost is averaged, so that the mean that
    it returns to is. Corrections of drift begin anew, as the units of workers are others.

    Args:
      state: of `local_rounds` or `accumulated_rounds` of W workers, leaves [W, ...].
      fresh: a first state of the same rounds at the new parameters, leaves [W', ...].
      workers: W' >= 1.
      policy: what becomes of the inner optimizers' states: their "mean", with whole numbers of the
        first; their first values ("reset"); or those of the "first" worker. Accumulated gradients
        have one optimizer, which stays.

    Raises:
      ValueError: for a state of other rounds, or a policy that is none.

    Example:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> from local_opt.resize import resize
      >>> rounds = local_opt.local_rounds(optax.sgd(0.1, momentum=0.9), axis_name="worker")
      >>> state, fresh = (jax.vmap(rounds.init)(jnp.zeros((w, 3))) for w in (4, 2))
      >>> resize(state, fresh, 2, "mean").since.shape
      (2,)
    """
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}: it must be one of {', '.join(POLICIES)}.")
    first = functools.partial(_first, workers=workers)
    if isinstance(state, AccumulateState):
        return AccumulateState(first(state.since), first(state.inner), mean_of(state.mean, workers))
    if not isinstance(state, LocalState):
        raise ValueError(
            f"{type(state).__name__} is not a state of local or accumulated rounds, so that they "
            "cannot go on with other workers: go on with as many."
        )
    inner = fresh.inner
    if policy != RESET:
        inner = mean_of(state.inner, workers) if policy == MEAN else first(state.inner)
    return LocalState(
        since=first(state.since),
        inner=inner,
        anchor=first(state.anchor),
        outer=first(state.outer),
        lost=mean_of(state.lost, workers),
        drift=mean_of(state.drift, workers),
        correction=fresh.correction,
    )


def _first(tree, workers):
    return jax.tree.map(lambda x: _to_all(np.asarray(x)[0], workers), tree)


def _to_all(x, workers):
    return np.broadcast_to(x, (workers, *np.shape(x))).copy()
