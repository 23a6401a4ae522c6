"""When a batch is used again, known before the run: which steps load a fresh one.

T steps, L loads. An echoed step uses a batch that is already on the device.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from syncopate import plans


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class EchoPlan(plans.Plan):
    """The loads of a run: a decision that never depends on gradients.

    Step t loads a fresh batch where fresh[t], and uses the last one again elsewhere. Two plans are
    equal if they load in the same steps.

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
        fresh = np.array(self.fresh)
        if fresh.ndim != 1 or fresh.dtype != bool or not len(fresh):
            raise ValueError(
                f"fresh is {fresh.dtype}{list(fresh.shape)}: it must be a list of one bool per "
                "step, True where a fresh batch is loaded."
            )
        if not fresh[0]:
            raise ValueError("fresh[0] is False: the first step has no batch to use again.")
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
            raise ValueError(
                f"step {step} is outside the plan's 0 .. {self.total_steps}: make a plan for the "
                "whole run."
            )
        return np.append(0, np.cumsum(self.fresh))[step]

    def first_load(self, step: int) -> int:
        """The first load that steps from `step` on need: where the input of a resumed run starts.

        An echoed step needs the load before it.
        """
        before = int(self.loads_before(step))
        return before - (step == self.total_steps or not self.fresh[step])

    def decide(self, step: int, *, loads: int, uses: int, ready: Callable[[], bool]) -> bool:
        """Whether a step loads, as of `measured`; a plan needs only the step."""
        del loads, uses, ready
        return bool(self.fresh[step])

    @property
    def known(self) -> "EchoPlan":
        """The decisions that are known before the run: all of them."""
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
    if not plans.is_whole(factor) or factor < 1:
        raise ValueError(f"factor is {factor!r}: a batch is used a whole number of times, >= 1.")
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

    The number of loads in any stretch of steps differs from the sum of p over it by less than 1,
    where coins would let the input fall behind and the accelerator wait.

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
