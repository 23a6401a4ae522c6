"""Which steps load a fresh batch: plans, known before the run, and a policy that follows the input.

T steps, L loads. An echoed step uses a batch that is already on the device.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
import numpy as np

from syncopate import plans


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class EchoPlan(plans.Plan):
    """The loads of a run: step t loads a fresh batch where fresh[t], and else uses the last again.

    Two plans are equal if they load in the same steps.

    Args:
      fresh: bool[T]; fresh[0] is True, for there is nothing to use again.
      rule: how the plan was made, for people.

    Raises:
      ValueError: if there is no step, or the first is not fresh.

    Example:
      >>> import ordering
      >>> plan = ordering.echo.EchoPlan([True, False, True, False, False])
      >>> plan.loads, plan.share, plan.uses.tolist()
      (2, 0.4, [2, 3])
    """

    marks = "load_steps"
    stretches = "loads"

    fresh: np.ndarray
    rule: str = "given steps"

    def __post_init__(self):
        fresh, kind = plans.as_array(self.fresh)
        if fresh.ndim != 1 or fresh.dtype != bool or not len(fresh):
            raise ValueError(f"fresh is {kind}: pass one bool per step, True where it loads.")
        if not fresh[0]:
            raise ValueError("fresh[0] is False: the first step has no batch to use again.")
        fresh = np.array(fresh)
        fresh.setflags(write=False)
        object.__setattr__(self, "fresh", fresh)

    @classmethod
    def of_marks(cls, marked, total_steps, rule):
        plans.check_total_steps(total_steps)
        fresh = np.zeros(total_steps, bool)
        fresh[marked] = True
        return cls(fresh, rule)

    @property
    def total_steps(self) -> int:
        """T."""
        return len(self.fresh)

    @property
    def load_steps(self) -> np.ndarray:
        """int64[L], the steps that load: the first use of every batch."""
        return np.flatnonzero(self.fresh)

    @property
    def loads(self) -> int:
        """L, the number of loads of the run."""
        return int(self.fresh.sum())

    @property
    def share(self) -> float:
        """L / T, loads per step; its inverse is the mean echo factor."""
        return self.loads / self.total_steps

    @property
    def uses(self) -> np.ndarray:
        """int64[L], the steps from each load to the next: the echo factor of every batch."""
        return self.lengths

    def loads_before(self, step):
        """The loads in the steps 0 .. step - 1, for a step (or an array of steps) of 0 .. T."""
        step = np.asarray(step)
        if step.dtype.kind not in "iu":
            raise ValueError(f"step is {step} ({step.dtype}): steps are whole numbers.")
        if (step < 0).any() or (step > self.total_steps).any():
            raise ValueError(f"step {step} is outside the plan's 0 .. {self.total_steps}.")
        return np.append(0, np.cumsum(self.fresh))[step]

    def first_load(self, step: int) -> int:
        """The first load that steps from `step` on need, an echoed one the load before it."""
        before = int(self.loads_before(step))
        return before - (step == self.total_steps or not self.fresh[step])

    def decide(self, step: int, **_) -> bool:
        """Whether a step loads, as of `measured`; a plan needs only the step."""
        return bool(self.fresh[step])

    @property
    def known(self) -> "EchoPlan":
        """The decisions that are known before the run."""
        return self

    def _summary(self):
        uses = self.uses
        sizes = f"share {self.share:.3%}, batches used {uses.min()} to {uses.max()} times"
        lines = ["  from step   loads per step"]
        edges = np.unique(np.linspace(0, self.total_steps, 11).astype(int))
        for start, end in zip(edges[:-1], edges[1:], strict=True):
            lines.append(f"{start:>11}{self.fresh[start:end].mean():>17.4f}")
        return sizes, lines


def fixed(factor: int, *, total_steps: int) -> EchoPlan:
    """Every batch is used the same number of times, as in data echoing.

    fresh_t = (t mod e = 0).

    Args:
      factor: e >= 1, the uses of a batch; 1 is no echo.
      total_steps: T >= 1.

    Returns:
      The plan.

    Raises:
      ValueError: for a factor that is not whole or below 1.

    Example:
      >>> import ordering
      >>> ordering.echo.fixed(4, total_steps=10).uses.tolist()
      [4, 4, 2]

    References:
      Choi, Passos, Shallue, Dahl, Faster Neural Network Training with Data Echoing, 2019,
      https://arxiv.org/abs/1907.05550
    """
    plans.check_total_steps(total_steps)
    _check_uses(factor, "factor")
    return EchoPlan(np.arange(total_steps) % factor == 0, f"fixed, e = {factor}")


def bernoulli(p: Callable | float | np.ndarray, *, total_steps: int, key: jax.Array) -> EchoPlan:
    """Stochastic data echoing: step t loads with probability p(t); the first always does.

    Args:
      p: a probability in (0, 1], any schedule of them (optax's are), or float[T].
      total_steps: T >= 1.
      key: shared by all workers, so that all take the same decisions.

    Returns:
      The plan.

    Raises:
      ValueError: if a probability is outside (0, 1].

    Example:
      >>> import jax, optax, ordering
      >>> p = optax.cosine_decay_schedule(1.0, 1000, alpha=0.25)  # from 1 to 1/4
      >>> plan = ordering.echo.bernoulli(p, total_steps=1000, key=jax.random.key(0))
      >>> abs(plan.share - 0.625) < 0.03
      True

    References:
      Anonymous, Sharper Analysis of Data Echoing and New Communication-Efficient Algorithm for
      Data Parallelism, Algorithm 1, submitted to ICLR 2025 (read here from its abstract, reviews
      and replies), https://openreview.net/group?id=ICLR.cc/2025/Conference
    """
    heads = plans.bernoulli_draws(plans.probabilities(p, total_steps, "p"), key)
    heads[0] = True
    return EchoPlan(heads, f"bernoulli, p = {plans.describe_schedule(p)}")


def error_diffusion(p: Callable | float | np.ndarray, *, total_steps: int) -> EchoPlan:
    """The loads of `bernoulli` in the mean, spread evenly: no coin, and no stall where p <= 1 / R.

    a <- a + p(t); fresh_t = (a >= 1); a <- a - fresh_t; a starts so that the first step loads.

    The loads in any stretch of steps differ from the sum of p over it by less than 1, where coins
    would let the input fall behind.

    Args:
      p: a probability in (0, 1], any schedule of them (optax's are), or float[T].
      total_steps: T >= 1.

    Returns:
      The plan.

    Raises:
      ValueError: if a probability is outside (0, 1].

    Example:
      >>> import ordering
      >>> ordering.echo.error_diffusion(0.4, total_steps=10).uses.tolist()
      [3, 2, 3, 2]
    """
    shares = plans.probabilities(p, total_steps, "p")
    fresh = np.empty(total_steps, bool)
    acc = 1.0 - shares[0]
    for t, share in enumerate(shares.tolist()):
        acc += share
        # Ten tenths add up to a little less than one.
        fresh[t] = acc >= 1 - 1e-9
        acc -= fresh[t]
    return EchoPlan(fresh, f"error diffusion, p = {plans.describe_schedule(p)}")


class Measured(NamedTuple):
    """The policy of `measured`: what it decides depends on time, so its decisions are recorded."""

    total_steps: int
    at_least: np.ndarray  # int64[T], loads that the floor demands up to and including each step
    max_factor: int
    decided: np.ndarray  # bool[k], the decisions of an earlier part of the run

    online = True  # no field: of every measured policy

    @property
    def known(self) -> EchoPlan:
        """The decisions that were given, or that the first step loads."""
        return EchoPlan(self.decided if len(self.decided) else np.ones(1, bool), "measured")

    def decide(self, step: int, *, loads: int, uses: int, ready: Callable[[], bool]) -> bool:
        """Whether a step loads, after so many loads and uses of the last one.

        `ready` is asked only where time decides.
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

    No stall even where loading times jitter, and no p to choose. Keep what it decided,
    `[use.fresh for use in ...]`: an `EchoPlan` of it replays the run exactly.

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
    _check_uses(max_factor, "max_factor")
    floor = 1 / max_factor if floor is None else plans.probabilities(floor, total_steps, "floor")
    at_least = np.cumsum(error_diffusion(floor, total_steps=total_steps).fresh)
    known, kind = plans.as_array(decided)
    is_list = known.ndim == 1 and (not len(known) or (known.dtype == bool and known[0]))
    if not is_list or len(known) > total_steps:
        raise ValueError(
            f"decided is {kind}, and the run has {total_steps} steps: pass [use.fresh for use in "
            "...] of the run's first steps, a list of bools that begins with True."
        )
    return Measured(int(total_steps), at_least, int(max_factor), known.astype(bool))


def _check_uses(factor, name):
    if not plans.is_whole(factor) or factor < 1:
        raise ValueError(f"{name} is {factor!r}: a batch is used a whole number of times, >= 1.")


def check_policy(policy) -> None:
    """Raises ValueError for what decides no loads."""
    if isinstance(policy, type) or not hasattr(policy, "decide"):
        raise ValueError(
            f"policy is a {type(policy).__name__}: make an EchoPlan, as ordering.echo.fixed(4, "
            "total_steps=T), or ordering.echo.measured(...)."
        )
