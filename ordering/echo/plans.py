"""Which steps load a fresh batch: plans made before the run, and a policy that follows the input.

A run has T steps and L loads. An echoed step uses a batch that is already on the device.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, overload

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Int, Key

from syncopate import plans, schedules

if TYPE_CHECKING:
    import optax  # an import of a tenth of a second


class Policy:
    """What `repeat` follows: it decides in every step whether the step loads.

    Attributes:
      total_steps: T; None for as many steps as the loads last.
      online: whether it decides by more than the step, as by what is ready.
    """

    total_steps: int | None
    online: ClassVar[bool] = False

    def decide(self, step: int, *, uses: int, ready: Callable[[], bool]) -> bool:
        """Whether a step loads, after so many uses of the last load; may call `ready`."""
        raise NotImplementedError

    def before(self, step: int) -> Bool[np.ndarray, "t"]:
        """The decisions before a step, as far as they are known before the run."""
        raise NotImplementedError

    def place(self, step: int) -> tuple[int, int]:
        """The loads before a step, and how many steps used the last of them."""
        fresh = self.before(step)
        if len(fresh) < step:
            raise ValueError(
                f"step is {step}, and decided has {len(fresh)} decisions: pass [batches.fresh for "
                "_ in batches] of all before it."
            )
        return int(np.count_nonzero(fresh)), int(np.argmax(fresh[::-1])) + 1 if len(fresh) else 0

    def again(self, step: int, uses: int) -> bool:
        """Whether a step may use the last load again; after the plan's end, as a longer one may."""
        return step == self.total_steps or not self.decide(step, uses=uses, ready=lambda: False)

    def first_load(self, step: int) -> int:
        """The number of the first load that a run needs if it resumes at a step.

        At the end of the plan it is the last load, which a longer plan may use again.
        """
        loads, uses = self.place(plans.check_whole("step", step, 0, self.total_steps))
        return loads - self.again(step, uses)


def digest_decisions(fresh: Sequence[bool] | np.ndarray, before: int = 0) -> int:
    """A 32-bit digest of decisions, or of these and those before them, of which it is given."""
    return zlib.crc32(np.asarray(fresh, bool).tobytes(), before)


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class EchoPlan(plans.Plan, Policy):
    """The loads of a run: step t loads a fresh batch if fresh[t], and else uses the last one again.

    Two plans are equal if they load in the same steps.

    Args:
      fresh: bool[T]; fresh[0] is True, since the first step has no batch to use again.
      rule: a description.

    Raises:
      ValueError: if there is no step, or the first is not fresh.

    Examples:
      >>> from syncopate import ordering
      >>> plan = ordering.echo.EchoPlan([True, False, True, False, False])
      >>> plan.loads, plan.loads_per_step, plan.uses.tolist()
      (2, 0.4, [2, 3])
    """

    _marks = "load_steps"
    _stretches = "loads"

    def __init__(self, fresh: ArrayLike, rule: str = "given steps"):
        fresh, kind = plans.as_array(fresh)
        if fresh.ndim != 1 or fresh.dtype != bool or not len(fresh):
            raise ValueError(f"fresh is {kind}: pass one bool per step, True where it loads.")
        if not fresh[0]:
            raise ValueError("fresh[0] is False: the first step must load, pass True for it.")
        plans.check_total_steps(len(fresh))
        super().__init__(np.flatnonzero(fresh), len(fresh), rule)

    @functools.cached_property
    def fresh(self) -> np.ndarray:
        """bool[T], whether each step loads."""
        fresh = np.zeros(self.total_steps, bool)
        fresh[self._marked] = True
        fresh.setflags(write=False)
        return fresh

    @property
    def load_steps(self) -> np.ndarray:
        """int64[L], the steps that load."""
        return self._marked

    @property
    def loads(self) -> int:
        """L, the number of loads."""
        return len(self._marked)

    @property
    def loads_per_step(self) -> float:
        """L / T, loads per step; its inverse is the mean echo factor."""
        return self.loads / self.total_steps

    @property
    def uses(self) -> np.ndarray:
        """int64[L], how many steps use each batch: its echo factor."""
        return self._lengths

    def loads_before(self, step: Int[ArrayLike, "..."]) -> Int[np.ndarray, "..."]:
        """The number of loads before a step, or before every one of an array, in [0, T]."""
        step = np.asarray(step)
        if step.dtype.kind not in "iu":
            raise ValueError(f"step is {step} ({step.dtype}): pass a whole number.")
        if (step < 0).any() or (step > self.total_steps).any():
            raise ValueError(f"step {step} is outside [0, {self.total_steps}]: pass a step in it.")
        return np.searchsorted(self._marked, step)

    def decide(self, step: int, **_: object) -> bool:
        """Whether a step loads; only other policies use the other arguments."""
        return bool(self.fresh[step])

    def before(self, step: int) -> Bool[np.ndarray, "t"]:
        """The decisions before a step."""
        return self.fresh[:step]

    def _summary(self):
        uses = f"{self.uses.min()} to {self.uses.max()}"
        lines = ["  from step   loads per step"]
        edges = np.unique(np.linspace(0, self.total_steps, 11).astype(int))
        fractions = np.diff(self.loads_before(edges)) / np.diff(edges)
        lines += [f"{at:>11}{x:>17.4f}" for at, x in zip(edges, fractions, strict=False)]
        return f"{self.loads_per_step:.3%} of the steps load, batches used {uses} times", lines


@dataclasses.dataclass(frozen=True)
class Factor(Policy):
    """Every batch is used equally often, as long as there are loads; see `fixed`."""

    factor: int
    total_steps = None  # no field

    def decide(self, step: int, *, uses: int, **_: object) -> bool:
        """Whether a step loads, after so many uses of the last load."""
        return not 0 < uses < self.factor

    def before(self, step: int) -> Bool[np.ndarray, "t"]:
        """The decisions before a step."""
        fresh = np.zeros(step, bool)
        fresh[:: self.factor] = True
        return fresh


@overload
def fixed(factor: int, *, total_steps: int) -> EchoPlan: ...
@overload
def fixed(factor: int, *, total_steps: None = None) -> Factor: ...
def fixed(factor: int, *, total_steps: int | None = None) -> EchoPlan | Factor:
    """Uses every batch the same number of times, as in data echoing.

    fresh_t = (t mod e = 0).

    Args:
      factor: e >= 1, the uses of a batch; 1 for no echoing.
      total_steps: T in 1 .. 10^7; None for as many steps as the loads last.

    Returns:
      The plan; without total_steps a policy for `repeat` alone.

    Raises:
      ValueError: for a factor that is not whole or below 1.

    Examples:
      >>> from syncopate import ordering
      >>> ordering.echo.fixed(4, total_steps=10).uses.tolist()
      [4, 4, 2]

    References:
      Choi, Passos, Shallue, Dahl, Faster Neural Network Training with Data Echoing, 2019,
      https://arxiv.org/abs/1907.05550
    """
    factor = plans.check_whole("factor", factor, 1)
    if total_steps is None:
        return Factor(factor)
    total_steps = plans.check_total_steps(total_steps)
    fresh = np.arange(total_steps) % min(factor, total_steps) == 0
    return EchoPlan(fresh, f"fixed, e = {factor}")


def bernoulli(
    p: "optax.Schedule | float | np.ndarray", *, total_steps: int, key: Key[jax.Array, ""]
) -> EchoPlan:
    """Stochastic data echoing: step t loads with probability p(t), and the first step always.

    Args:
      p: a probability in (0, 1], a schedule of them, or float[T].
      total_steps: T in 1 .. 10^7.
      key: a random key, the same for all workers, so that they make the same decisions.

    Returns:
      The plan.

    Raises:
      ValueError: if a probability is outside (0, 1].

    Examples:
      >>> import jax, optax
      >>> from syncopate import ordering
      >>> p = optax.cosine_decay_schedule(1.0, 1000, alpha=0.25)  # from 1 to 1/4
      >>> plan = ordering.echo.bernoulli(p, total_steps=1000, key=jax.random.key(0))
      >>> abs(plan.loads_per_step - 0.625) < 0.03
      True

    References:
      Anonymous, Sharper Analysis of Data Echoing and New Communication-Efficient Algorithm for
      Data Parallelism, Algorithm 1, submitted to ICLR 2025 (read here from its abstract, reviews
      and replies), https://openreview.net/group?id=ICLR.cc/2025/Conference
    """
    heads = schedules.bernoulli_draws(p, total_steps, key)
    heads[0] = True
    return EchoPlan(heads, f"bernoulli, p = {schedules.describe_schedule(p)}")


def error_diffusion(p: "optax.Schedule | float | np.ndarray", *, total_steps: int) -> EchoPlan:
    """Loads as often as `bernoulli` does on average, but at even distances instead of at random.

    a <- a + p(t); fresh_t = (a >= 1); a <- a - fresh_t; a starts so that the first step loads.

    The number of loads in any range of steps differs from the sum of p by less than 1. If a load
    takes R steps and p <= 1 / R, no step waits; random loads may follow each other too closely.

    Args:
      p: a rate in (0, 1], loads per step; a schedule of rates; or float[T].
      total_steps: T in 1 .. 10^7.

    Returns:
      The plan.

    Raises:
      ValueError: if a rate is outside (0, 1].

    Examples:
      >>> from syncopate import ordering
      >>> ordering.echo.error_diffusion(0.4, total_steps=10).uses.tolist()
      [3, 2, 3, 2]
    """
    rates = schedules.probabilities(p, total_steps, "p")
    fresh = np.empty(total_steps, bool)
    acc = 1.0 - rates[0]
    for t, rate in enumerate(rates.tolist()):
        acc += rate
        # In floating point ten tenths add up to slightly less than one.
        fresh[t] = acc >= 1 - 1e-9
        acc -= fresh[t]
    return EchoPlan(fresh, f"error diffusion, p = {schedules.describe_schedule(p)}")


@dataclasses.dataclass(frozen=True)
class Measured(Policy):
    """A policy whose decisions depend on time; see `adaptive`."""

    total_steps: int | None
    max_factor: int
    decided: EchoPlan | None  # the decisions of an earlier part of the run
    online = True  # no field

    def decide(self, step: int, *, uses: int, ready: Callable[[], bool]) -> bool:
        """Whether a step loads, after so many uses of the last load; may call `ready`."""
        if self.decided is not None and step < self.decided.total_steps:
            return self.decided.decide(step)
        return bool(not uses or uses >= self.max_factor or ready())

    def again(self, step: int, uses: int) -> bool:
        """Whether a step may use the last load again: as at the end of a plan of `decided`."""
        decided = self.decided is not None and step < self.decided.total_steps
        return super().again(step, uses) if decided else uses > 0

    def before(self, step: int) -> Bool[np.ndarray, "t"]:
        """The decisions before a step, as far as they were given."""
        return np.zeros(0, bool) if self.decided is None else self.decided.before(step)


def adaptive(
    *,
    max_factor: int,
    total_steps: int | None = None,
    decided: Bool[ArrayLike, "k"] | Sequence[bool] = (),
) -> Measured:
    """Loads when a batch is ready, and uses the last one again otherwise.

    fresh_t = ready_t, or uses of the batch = e_max, where the step waits for its batch.

    It needs no p, and does not stall if loading times vary. Record its decisions,
    `[batches.fresh for _ in batches]`, to replay the run exactly by an `EchoPlan` of them.

    Args:
      max_factor: e_max >= 1, the most uses of a batch.
      total_steps: T in 1 .. 10^7; None for as many steps as the loads last.
      decided: bool[k], the decisions of the first k steps, of a run that resumes.

    Returns:
      A `Measured` for `repeat`.

    Raises:
      ValueError: for values out of range, or `decided` that cannot be a run's first decisions.

    Examples:
      >>> import numpy as np
      >>> from syncopate import ordering
      >>> policy = ordering.echo.adaptive(total_steps=6, max_factor=3)
      >>> with ordering.data.prefetch_to_device(np.ones(2) for _ in range(6)) as loader:
      ...     batches = ordering.echo.repeat(loader, policy)
      ...     record = [batches.fresh for _ in batches]
      >>> plan = ordering.echo.EchoPlan(record, rule="measured")  # replays the run
      >>> plan.total_steps, int(plan.uses.max()) <= 3
      (6, True)
    """
    if total_steps is not None:
        total_steps = int(plans.check_total_steps(total_steps))
    plans.check_whole("max_factor", max_factor, 1)
    decisions, kind = plans.as_array(decided)
    is_list = decisions.ndim == 1 and (decisions.dtype == bool or not len(decisions))
    is_list = is_list and decisions[:1].all()
    if not is_list or total_steps is not None and len(decisions) > total_steps:
        raise ValueError(
            f"decided is {kind}, and the run has {total_steps} steps: pass [batches.fresh for _ in "
            "batches] of the first steps."
        )
    first = EchoPlan(decisions, "decided") if len(decisions) else None
    return Measured(total_steps, int(max_factor), first)
