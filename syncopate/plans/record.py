"""What all plans are: a mask over the steps of a run, known before it, and a file that is whole."""

import hashlib
import json
import os
from typing import ClassVar

import numpy as np


class Plan:
    """The base of all plans: which of the T steps of a run are marked; the first always is.

    A kind of plan has `total_steps`, the array of its marked steps under a name of its own, and
    `rule`: how it was made, for people. Two plans of one kind are equal if their hashes are.

    Class attributes of a kind:
      marks: name of int64[n], the marked steps; and of their list in a saved file.
      stretches: name of that which a marked step begins, for people.
      online: whether a decision waits for the run: of no plan.
    """

    marks: ClassVar[str]
    stretches: ClassVar[str]
    online: ClassVar[bool] = False

    total_steps: int
    rule: str

    @classmethod
    def of_marks(cls, marked: np.ndarray, total_steps: int, rule: str) -> "Plan":
        """A plan of this kind from int64[n], its marked steps."""
        raise NotImplementedError

    @property
    def marked(self) -> np.ndarray:
        """int64[n], the marked steps."""
        return getattr(self, self.marks)

    @property
    def lengths(self) -> np.ndarray:
        """int64[n], the steps from each marked one to the next, or to the end."""
        return np.diff(self.marked, append=self.total_steps)

    def digest(self) -> str:
        """A hash (64 hex digits) of T and all marked steps; independent of machine and rule."""
        content = np.append(self.marked, self.total_steps).astype("<i8").tobytes()
        return hashlib.sha256(content).hexdigest()

    def __eq__(self, other):
        return isinstance(other, type(self)) and self.digest() == other.digest()

    def __hash__(self):
        return hash(self.digest())

    def __repr__(self):
        count = f"{len(self.marked)} {self.stretches} in {self.total_steps} steps"
        return f"{type(self).__name__}({self.rule}: {count})"

    def check_run(self, total_steps: int) -> None:
        """Raises ValueError unless the plan is made for a run of `total_steps`."""
        if total_steps != self.total_steps:
            raise ValueError(
                f"the plan ({self.rule}) has {self.total_steps} steps and the run {total_steps}: "
                "make the plan with the run's total_steps."
            )

    def describe(self) -> str:
        """The plan on one screen: rule, sizes, hash, and how it changes over the run."""
        sizes, table = self._summary()
        head = f"{self.total_steps} steps, {len(self.marked)} {self.stretches}, {sizes}"
        return "\n".join([self.rule, f"{head}, hash {self.digest()[:12]}", *table])

    def _summary(self) -> tuple[str, list[str]]:
        """For `describe`: the sizes in words, and the lines of a table with its head."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        """Writes plan and hash as JSON: under a temporary name first, so never half a file."""
        content = {
            "rule": self.rule,
            "total_steps": self.total_steps,
            self.marks: self.marked.tolist(),
            "digest": self.digest(),
        }
        temporary = f"{path}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: str) -> "Plan":
        """The plan of this kind that `save` has written, compared with its hash.

        Raises:
          ValueError: if the file holds no such plan, or does not match its hash.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            marked = np.asarray(content[cls.marks], np.int64)
            rule, digest = content["rule"], content["digest"]
            if not isinstance(rule, str):
                raise TypeError(f"its rule is {rule!r}, no text")
            plan = cls.of_marks(marked, content["total_steps"], rule)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path!r} holds no saved plan ({error!r}): save it again.") from error
        if plan.digest() != digest:
            raise ValueError(
                f"{path!r} does not match its hash: it was changed. Save the plan again."
            )
        return plan
