"""Load when a batch is ready: a policy that follows the input as fast as it comes."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np

from ordering.echo.plans import EchoPlan, error_diffusion
from syncopate import plans


class Measured(NamedTuple):
    """The policy of `measured`: what it decides depends on time, so its decisions are recorded.

    It has what `ordering.echo.EchoPlan` has for those who follow a policy: `total_steps`,
    `online`, `known` and `decide`.
    """

    total_steps: int
    at_least: np.ndarray  # int64[T], loads that the floor demands up to and including each step
    max_factor: int
    decided: np.ndarray  # bool[k], the decisions of an earlier part of the run

    online = True  # no field: of every measured policy

    @property
    def known(self) -> EchoPlan:
        """The decisions known before the run: those given, or that the first step loads."""
        return EchoPlan(self.decided if len(self.decided) else np.ones(1, bool), "measured")

    def decide(self, step: int, *, loads: int, uses: int, ready: Callable[[], bool]) -> bool:
        """Whether a step loads.

        Args:
          step: t in 0 .. T - 1; loads: those before it; uses: of the last batch so far.
          ready: asked only where time decides.
        """
        if step < len(self.decided):
            return bool(self.decided[step])
        forced = step == 0 or uses >= self.max_factor or loads < self.at_least[step]
        return bool(forced or ready())


def measured(
    *,
    total_steps: int,
    max_factor: int,
    floor: Callable | float | np.ndarray | None = None,
    decided: Iterable[bool] = (),
) -> Measured:
    """Loads when a batch is ready, and uses the last one again while none is.

    fresh_t = ready_t, or uses of the batch = e_max, or loads < sum of floor over the steps 0 .. t
    (as `error_diffusion` counts it); in the last two cases the step waits for its batch.

    No stall even where loading times jitter, and no p to choose: input that is R times slower than
    a step is echoed about R times. Keep what it decided, `[use.fresh for use in ...]`: an
    `EchoPlan` of it replays the run exactly.

    Args:
      total_steps: T >= 1.
      max_factor: e_max >= 1, the most uses of a batch.
      floor: the least loads per step, in (0, 1]: a number, a schedule, or float[T]; None for
        1 / e_max, which the cap implies.
      decided: decisions of the steps before the run was stopped.

    Returns:
      A `Measured` for `echo_batches`.

    Raises:
      ValueError: for values out of range, or decisions that are no plan.

    Example:
      >>> import numpy as np, ordering
      >>> policy = ordering.echo.measured(total_steps=6, max_factor=3)
      >>> with ordering.input.load_ahead(np.ones(2) for _ in range(6)) as loader:
      ...     record = [use.fresh for use in ordering.echo.echo_batches(loader, policy)]
      >>> plan = ordering.echo.EchoPlan(record, rule="measured")  # replays the run
      >>> plan.total_steps, int(plan.uses.max()) <= 3
      (6, True)
    """
    plans.check_total_steps(total_steps)
    if not plans.is_whole(max_factor) or max_factor < 1:
        raise ValueError(
            f"max_factor is {max_factor!r}: a batch is used a whole number of times, >= 1."
        )
    floor = 1 / max_factor if floor is None else plans.probabilities(floor, total_steps, "floor")
    at_least = np.cumsum(error_diffusion(floor, total_steps=total_steps).fresh)
    decided = np.array(list(decided), bool)
    if len(decided) > total_steps or (len(decided) and not decided[0]):
        raise ValueError(
            f"decided has {len(decided)} decisions for {total_steps} steps"
            f"{'' if decided[0] else ', and the first is not fresh'}: pass those of this run."
        )
    return Measured(int(total_steps), at_least, int(max_factor), decided)


def check_policy(policy) -> None:
    """Raises ValueError for what decides no loads.

    Args:
      policy: anything.

    Raises:
      ValueError: unless it has `decide`, as an `EchoPlan` and `measured` do.

    Example:
      >>> import ordering
      >>> ordering.echo.online.check_policy(ordering.echo.fixed(4, total_steps=10))
    """
    if not hasattr(policy, "decide"):
        raise ValueError(
            f"policy is a {type(policy).__name__}: make an EchoPlan, as ordering.echo.fixed(4, "
            "total_steps=T), or ordering.echo.measured(...)."
        )


def ready_everywhere(ready: bool) -> bool:
    """Whether the next batch of every process is ready: one answer for all of them.

    Args:
      ready: whether this process's is.

    Returns:
      A bool, the same in all processes. One small exchange per call.

    Example:
      >>> import ordering
      >>> ordering.echo.online.ready_everywhere(True)
      True
    """
    if jax.process_count() == 1:
        return bool(ready)
    from jax.experimental.multihost_utils import process_allgather

    return bool(np.all(process_allgather(np.uint8(ready))))
