"""What plans have in common, and JSON files of them that are whole and unchanged."""

import hashlib
import json
import os
from collections.abc import Callable

import numpy as np


class Plan:
    """Steps of a run that are marked before it: those that start a round, or that load a batch.

    A kind of plan has the fields `rule`, its making for people, and `total_steps`, T; it names in
    `MARKS` its array of marked steps, int64[n], strictly increasing. Two plans of one kind are
    equal if their hashes are.
    """

    MARKS: str
    online = False  # True where a policy decides during the run, by time

    @property
    def marks(self) -> np.ndarray:
        """int64[n], the steps that the plan marks."""
        return getattr(self, self.MARKS)

    def digest(self) -> str:
        """A hash (64 hex digits) of T and all marked steps; independent of machine and rule."""
        content = np.append(self.marks, self.total_steps).astype("<i8").tobytes()
        return hashlib.sha256(content).hexdigest()

    def __eq__(self, other):
        return isinstance(other, type(self)) and self.digest() == other.digest()

    def __hash__(self):
        return hash(self.digest())

    def check_run(self, total_steps: int) -> None:
        """Raises ValueError unless the plan is made for a run of `total_steps`."""
        if total_steps != self.total_steps:
            raise ValueError(
                f"the plan ({self.rule}) has {self.total_steps} steps and the run {total_steps}: "
                "make the plan with the run's total_steps."
            )

    def describe(self) -> str:
        """The plan on one screen: rule, share, hash, and how it changes over the run."""
        summary = f"{self.total_steps} steps, {self._summary()}, hash {self.digest()[:12]}"
        return "\n".join([self.rule, summary, *self._table()])

    def save(self, path: str) -> None:
        """Writes the plan as JSON: under a temporary name first, so never half a file."""
        write(path, self, {"total_steps": self.total_steps, self.MARKS: self.marks.tolist()})


def write(path: str, plan, content: dict) -> None:
    """Writes a plan's content and hash: under a temporary name first, so never half a file.

    Args:
      path: of the file.
      plan: has `rule` and `digest()`.
      content: what `read` needs to make it again, JSON values.

    Example:
      >>> import os, tempfile, local_opt, plans
      >>> path = os.path.join(tempfile.mkdtemp(), "plan.json")
      >>> plans.write(path, local_opt.every_step(2), {"total_steps": 2})
      >>> os.listdir(os.path.dirname(path))
      ['plan.json']
    """
    temporary = f"{path}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump({"rule": plan.rule, **content, "digest": plan.digest()}, file)
    os.replace(temporary, path)


def read(path: str, make: Callable[[dict], object]):
    """The plan that `write` has written, made again and compared with its hash.

    Args:
      path: of the file.
      make: from the content, its rule included, to the plan.

    Returns:
      The plan.

    Raises:
      ValueError: if the file holds no such plan, or does not match its hash.

    Example:
      >>> import os, tempfile, local_opt, plans
      >>> path = os.path.join(tempfile.mkdtemp(), "plan.json")
      >>> plans.write(path, local_opt.every_step(2), {"total_steps": 2})
      >>> plans.read(path, lambda content: local_opt.every_step(content["total_steps"])).rounds
      2
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        plan = make(content)
        digest = content["digest"]
    except (ValueError, LookupError, TypeError, OverflowError) as error:  # not JSON, or no plan
        raise ValueError(f"{path!r} holds no saved plan ({error!r}): save it again.") from error
    if plan.digest() != digest:
        raise ValueError(f"{path!r} does not match its hash: it was changed. Save the plan again.")
    return plan
