"""When workers talk, known before the run: the starts of all rounds.

R rounds, T steps. A round is the steps between two syncs; the sync follows its last step.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from syncopate import plans


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SyncPlan(plans.Plan):
    """The rounds of a run: a decision that never depends on gradients.

    Round r takes the steps starts[r] .. starts[r + 1] - 1 and ends in a sync; the last round ends
    with the run. Two plans are equal if they synchronise after the same steps.

    Args:
      starts: int64[R], first steps of the rounds; starts[0] = 0, strictly increasing, below T.
      total_steps: T >= 1.
      rule: how the plan was made, for people.

    Raises:
      ValueError: if the starts are no rounds of T steps.

    Example:
      >>> import numpy as np, local_opt
      >>> plan = local_opt.SyncPlan(np.array([0, 4, 8]), total_steps=10)
      >>> plan.rounds, plan.volume, plan.periods.tolist()
      (3, 0.3, [4, 4, 2])
    """

    marks = "starts"
    stretches = "rounds"

    starts: np.ndarray
    total_steps: int
    rule: str = "given starts"

    def __post_init__(self):
        starts = np.array(self.starts)
        plans.check_total_steps(self.total_steps)
        if starts.ndim != 1 or not np.issubdtype(starts.dtype, np.integer) or not len(starts):
            raise ValueError(
                f"starts is {starts.dtype}{list(starts.shape)}: it must be a list of the whole "
                "numbers of the steps at which rounds start."
            )
        starts = starts.astype(np.int64)
        if starts[0] != 0 or (np.diff(starts) < 1).any() or starts[-1] >= self.total_steps:
            raise ValueError(
                f"starts go from {starts[0]} to {starts[-1]}: they must begin at 0, increase "
                f"strictly and end below the {self.total_steps} steps of the run."
            )
        starts.setflags(write=False)
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "total_steps", int(self.total_steps))

    @classmethod
    def of_marks(cls, marked, total_steps, rule):
        return cls(marked, total_steps, rule)

    @property
    def rounds(self) -> int:
        """R, the number of syncs of the run."""
        return len(self.starts)

    @property
    def volume(self) -> float:
        """R / T, the communication as a share of synchronising after every step."""
        return self.rounds / self.total_steps

    @property
    def ends(self) -> np.ndarray:
        """int64[R], one past the last step of each round."""
        return np.append(self.starts[1:], self.total_steps)

    @property
    def periods(self) -> np.ndarray:
        """int64[R], H of each round."""
        return self.lengths

    def round_at(self, step):
        """The round that a step (or an array of steps) of 0 .. T - 1 belongs to."""
        step = np.asarray(step)
        if step.dtype.kind not in "iu":
            raise ValueError(f"step is {step} ({step.dtype}): steps are whole numbers.")
        if (step < 0).any() or (step >= self.total_steps).any():
            raise ValueError(
                f"step {step} is outside the plan's 0 .. {self.total_steps - 1}: make a plan for "
                "the whole run."
            )
        return np.searchsorted(self.starts, step, side="right") - 1

    def period_at(self, step):
        """H of the round that a step belongs to."""
        return self.periods[self.round_at(step)]

    def syncs_after(self, step):
        """Whether workers synchronise after a step."""
        return self.ends[self.round_at(step)] == np.asarray(step) + 1

    def rounds_from(self, step: int) -> Iterator[tuple[int, int]]:
        """(first step, steps) of what is left of each round, from any step: how a run resumes."""
        if step == self.total_steps:
            return
        for end in self.ends[self.round_at(step) :]:
            yield step, int(end) - step
            step = int(end)

    def _summary(self):
        periods = self.periods
        changes = np.flatnonzero(np.diff(periods, prepend=-1))
        rows = list(changes)
        if len(rows) > 14:
            rows = [*rows[:7], None, *rows[-6:]]
        sizes = f"volume {self.volume:.3%}, H from {periods.min()} to {periods.max()}"
        lines = ["  from step     H"]
        for r in rows:
            lines.append("        ..." if r is None else f"{self.starts[r]:>11}{periods[r]:>6}")
        return sizes, lines


def read_sync_plan(path: str) -> SyncPlan:
    """Reads a plan that `SyncPlan.save` has written.

    Args:
      path: of the JSON file.

    Returns:
      The plan.

    Raises:
      ValueError: if the file is no plan or does not match its hash.

    Example:
      >>> import os, tempfile, local_opt
      >>> path = os.path.join(tempfile.mkdtemp(), "plan.json")
      >>> plan = local_opt.constant(4, total_steps=10)
      >>> plan.save(path)
      >>> local_opt.read_sync_plan(path) == plan
      True
    """
    return SyncPlan.read(path)
