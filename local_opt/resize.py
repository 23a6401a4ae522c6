"""Parameters and states of W workers as those of another number, to resume a run with.

On the host, in NumPy; all leaves are [W, ...]. It is an additional sync, also in the middle of a
round, whose steps then continue from the mean.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from local_opt.checks import check_leading
from local_opt.parallel import AccumulateState
from local_opt.rounds import LocalState
from syncopate.plans import check_like, check_whole

MEAN, RESET, FIRST = "mean", "reset", "first"
POLICIES = (MEAN, RESET, FIRST)  # of the workers' own optimizer states


def mean_of(tree: PyTree, workers: int) -> PyTree:
    """The mean over W workers, for each of W' workers; integers are those of worker 0.

    Args:
      tree: leaves [W, ...]; workers: W' >= 1.

    Returns:
      NumPy arrays [W', ...], added up in float64.

    Examples:
      >>> import numpy as np
      >>> from local_opt.resize import mean_of
      >>> mean_of({"w": np.array([[1.0], [4.0]])}, 3)["w"].tolist()
      [[2.5], [2.5], [2.5]]
    """

    check_whole("workers", workers, 1)
    check_leading(tree, "worker")

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
    """The state of rounds of W workers as one of W' workers.

    Fields that are equal on all workers stay: the steps since the last sync, the outer optimizer
    and the anchor. The wire's losses are averaged. Corrections of drift start anew, as the workers'
    data change.

    Args:
      state: of `local_rounds` or `accumulated_rounds` of W workers, leaves [W, ...].
      fresh: an initial state of the same rounds at the new parameters, leaves [W', ...].
      workers: W' >= 1.
      policy: of the inner optimizers' states: "mean", with the integers of worker 0; "reset", to
        initial values; or "first", those of worker 0. Accumulated gradients have one optimizer,
        which stays.

    Raises:
      ValueError: for a state of other rounds, or an unknown policy.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, local_opt
      >>> from local_opt.resize import resize
      >>> rounds = local_opt.local_rounds(optax.sgd(0.1, momentum=0.9), axis_name="worker")
      >>> state, fresh = (jax.vmap(rounds.init)(jnp.zeros((w, 3))) for w in (4, 2))
      >>> resize(state, fresh, 2, "mean").since.shape
      (2,)
    """
    if policy not in POLICIES:
        raise ValueError(f"policy is {policy!r}: it must be one of {', '.join(POLICIES)}.")
    check_whole("workers", workers, 1)
    check_leading(state, "worker")
    first = functools.partial(_first, workers=workers)
    if isinstance(state, AccumulateState):
        return AccumulateState(first(state.since), first(state.inner), mean_of(state.mean, workers))
    if not isinstance(state, LocalState):
        raise ValueError(
            f"{type(state).__name__} is not a state of local or accumulated rounds, which alone "
            "can be resized: resume with as many workers as before."
        )
    resized = lambda x: jax.ShapeDtypeStruct((workers, *np.shape(x)[1:]), x.dtype)  # noqa: E731
    check_like("inner", jax.tree.map(resized, state.inner), fresh.inner, "the fresh state")
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
