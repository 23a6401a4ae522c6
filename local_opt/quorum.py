"""Which workers count in a merge that does not wait for all."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from syncopate.plans import as_array, check_number, check_whole


class Merge(NamedTuple):
    """When workers merge, and who counts; leading axes are those of the arrivals.

    Attributes:
      seconds: float64[...], when the merge happens, on the clock of the arrivals.
      weights: float64[..., W], for `weight=` of a sync: by tokens, and 0 for a worker that is late.
    """

    seconds: np.ndarray
    weights: np.ndarray


def quorum(
    arrivals: ArrayLike,
    *,
    least: int,
    grace: float = 0.0,
    tokens: ArrayLike = 1.0,
    steps: ArrayLike | None = None,
) -> Merge:
    """Merges once K workers have arrived and a grace window is over, without waiting for others.

    With a_(K), the K-th smallest arrival: t = min(a_(K) + grace, max_w a_w). Worker w counts if
    a_w <= t, with the weight v_w = tokens_w, or tokens_w^2 / steps_w if steps are given, which is
    the number of tokens times the tokens of a step. The mean of the sync is
    sum_w v_w x_w / sum_w v_w. Least = W waits for all workers.

    NumPy on the host, for one merge or for many at once. It decides and does not communicate:
    docs/use/clusters.md says how processes learn of each other's arrivals, and that all of them
    take part in the sync nevertheless.

    Args:
      arrivals: a, [..., W], the seconds at which workers have finished their steps, or will; inf
        for one that does not come.
      least: K in 1 .. W, the smallest number of workers that count.
      grace: >= 0, seconds for which the merge waits for the others after that.
      tokens: >= 0, of each worker since its last sync; one number or an array that broadcasts.
      steps: > 0, of each worker since its last sync, alike; None weighs by tokens alone.

    Returns:
      A `Merge`.

    Raises:
      ValueError: for values out of range, if fewer than K workers ever arrive, or if those that
        count have no tokens.

    Examples:
      >>> import local_opt
      >>> merge = local_opt.quorum([9.0, 12.0, 10.0, 40.0], least=2, grace=3.0, tokens=512)
      >>> float(merge.seconds), merge.weights.tolist()
      (13.0, [512.0, 512.0, 512.0, 0.0])

    References:
      Douillard et al., Decoupled DiLoCo for Resilient Distributed Pre-training, 2026,
      https://arxiv.org/abs/2604.21428
    """
    arrivals = _real("arrivals", arrivals, "seconds, inf for a worker that does not come")
    workers = arrivals.shape[-1] if arrivals.ndim else 0
    if not workers or np.isnan(arrivals).any() or (arrivals == -np.inf).any():
        raise ValueError(
            f"arrivals is {arrivals}: pass an array of seconds whose last axis has at least one "
            "worker, inf for one that does not come."
        )
    least, grace = check_whole("least", least, 1, workers), check_number("grace", grace, "[0, inf)")
    first = np.partition(arrivals, least - 1, axis=-1)[..., least - 1]
    if np.isinf(first).any():
        raise ValueError(
            f"least is {least}, and of {workers} workers fewer arrive: wait for those that "
            "restart, or pass a smaller number."
        )
    seconds = np.minimum(first + grace, arrivals.max(axis=-1))
    weights = _spread("tokens", tokens, arrivals)
    if steps is not None:
        steps = _spread("steps", steps, arrivals)
        if not steps.all():
            raise ValueError("steps has a zero: pass the steps since the last sync, at least 1.")
        weights = weights**2 / steps
    weights = np.where(arrivals <= seconds[..., None], weights, 0.0)
    if not weights.any(axis=-1).all():
        raise ValueError("tokens is 0 for all workers that count: pass those since the last sync.")
    return Merge(seconds, weights)


def _real(name: str, value, what: str) -> np.ndarray:
    """A value as float64; raises ValueError unless it holds real numbers."""
    array, found = as_array(value)
    if array.dtype.kind not in "iuf":
        raise ValueError(f"{name} is {found}: pass {what}.")
    return array.astype(float)


def _spread(name: str, value, arrivals: np.ndarray) -> np.ndarray:
    """Finite numbers >= 0 with the shape of the arrivals."""
    what = f"finite numbers >= 0 that broadcast to the arrivals' shape {arrivals.shape}"
    array = _real(name, value, what)
    try:
        array = np.broadcast_to(array, arrivals.shape)
        fits = (array >= 0).all() and np.isfinite(array).all()
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} is {value!r}: pass {what}.")
    return array
