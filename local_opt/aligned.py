"""Plans that know the order: rounds that end where a number of loads is whole."""

import numpy as np

from local_opt.plan import SyncPlan


def aligned(plan: SyncPlan, *, every: float, fresh: np.ndarray | None = None) -> SyncPlan:
    """The same rounds, each ending at the next whole multiple of so many loads.

    Marks lie after floor(k every + 1/2) loads, k = 1, 2, ..; a round that ends between two of them
    ends at the later one, or with the run where none is left. Rounds that would end together are
    one. An epoch of n loads is `every=n`, half of it `every=n / 2`, and pairs of single units
    `every=2`.

    No round ends earlier, and none `every` loads later than it did (but for the rounding); so
    there are never more rounds, and not one less where all of them, the last too, take at least
    `every` loads and the run ends at a mark.

    Args:
      plan: any plan of T steps.
      every: >= 1, loads between two marks; need not be whole.
      fresh: bool[T], the steps that load a fresh batch, as `ordering.echo.EchoPlan.fresh`; a mark
        then lies before a load, after the last use of the one before. None: every step loads.

    Returns:
      A plan of T steps; `plan` itself where every round ends at a mark.

    Raises:
      ValueError: for `every` below 1 or not finite, or a `fresh` of another length.

    Example:
      >>> import local_opt
      >>> plan = local_opt.constant(5, total_steps=24)
      >>> local_opt.aligned(plan, every=6).ends.tolist()
      [6, 12, 18, 24]
      >>> local_opt.aligned(plan, every=12).ends.tolist()
      [12, 24]
    """
    if isinstance(every, bool) or not (np.isreal(every) and 1 <= every < np.inf):
        raise ValueError(
            f"every is {every!r}: it must be a number of loads >= 1, as those of an epoch or of "
            "half of one."
        )
    loads = _loads(fresh, plan.total_steps)
    marks = np.floor(every * np.arange(1, int(len(loads) / every) + 2) + 0.5).astype(np.int64)
    ends = np.append(loads[marks[marks < len(loads)]], plan.total_steps)
    found = np.unique(ends[np.searchsorted(ends, plan.ends)])
    if np.array_equal(found, plan.ends):
        return plan
    rule = f"{plan.rule}, to the next {every:g} loads"
    return SyncPlan(np.append(0, found[:-1]), plan.total_steps, rule)


def _loads(fresh, total_steps) -> np.ndarray:
    """int64[n], the steps that load."""
    if fresh is None:
        return np.arange(total_steps)
    fresh = np.asarray(fresh)
    if fresh.dtype != bool or fresh.shape != (total_steps,):
        raise ValueError(
            f"fresh is {fresh.dtype}{list(fresh.shape)}: it must hold one bool for each of the "
            f"plan's {total_steps} steps."
        )
    return np.flatnonzero(fresh)
