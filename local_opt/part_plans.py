"""Several plans, one for each part of what is synchronised: a fragment, or a field of the state."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from local_opt.plan import SyncPlan
from syncopate import plans as plans_package

START, FINISH = "start", "finish"


class PartEvent(NamedTuple):
    """Something that a loop does between two steps."""

    step: int  # the steps that were taken before
    action: str  # "start": a part's mean is sent on its way; "finish": it is put in its place
    part: str
    last: bool  # of the run: workers end equal


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PartPlans:
    """When each part is synchronised, and how long its mean may be on its way.

    A round of a part that ends after step e is started there and finished `delay` steps later, at
    the latest where the part starts again; the run's last rounds are finished at once.

    Args:
      plans: {name of a part: its `SyncPlan`}, all for the same run.
      delay: tau >= 0, steps that pass while a mean travels; 0 for syncs that are waited for.

    Raises:
      ValueError: for no plan, plans for other runs, or a round shorter than the delay (but the
        first and the last of a part).

    Example:
      >>> import local_opt
      >>> plans = {str(f): local_opt.constant(4, total_steps=9, offset=2 * f) for f in range(2)}
      >>> plans = local_opt.PartPlans(plans, delay=1)
      >>> [(e.step, e.action, e.part) for e in plans.events_from(0)][:4]
      [(2, 'start', '1'), (3, 'finish', '1'), (4, 'start', '0'), (5, 'finish', '0')]
    """

    plans: Mapping[str, SyncPlan]
    delay: int = 0

    def __post_init__(self):
        plans = dict(self.plans)
        bad = [name for name, plan in plans.items() if not isinstance(plan, SyncPlan)]
        if bad or not plans:
            raise ValueError(
                f"plans are {plans!r}: pass one SyncPlan for each part, as {{'params': "
                "local_opt.constant(4, total_steps=T)}."
            )
        for plan in plans.values():
            plan.check_run(next(iter(plans.values())).total_steps)
        if not plans_package.is_whole(self.delay) or self.delay < 0:
            raise ValueError(f"delay is {self.delay!r}: it must be a whole number of steps >= 0.")
        for name, plan in plans.items():
            between = plan.periods[1:-1]
            if len(between) and between.min() < self.delay:
                raise ValueError(
                    f"delay is {self.delay} and part {name!r} has a round of {between.min()} "
                    "steps: a mean must arrive before the next one starts. Lower the delay, or "
                    "raise the period."
                )
        object.__setattr__(self, "plans", MappingProxyType(plans))

    @property
    def total_steps(self) -> int:
        """T."""
        return next(iter(self.plans.values())).total_steps

    @property
    def rule(self) -> str:
        """How the plans were made, for people."""
        rules = "; ".join(f"{name}: {plan.rule}" for name, plan in self.plans.items())
        return f"{rules}; delay {self.delay}"

    def digest(self) -> str:
        """A hash (64 hex digits) of all plans, their names and the delay."""
        parts = [[name, plan.digest()] for name, plan in self.plans.items()]
        return hashlib.sha256(json.dumps([parts, int(self.delay)]).encode()).hexdigest()

    def check_run(self, total_steps: int) -> None:
        """Raises ValueError unless the plans are made for a run of `total_steps`."""
        for plan in self.plans.values():
            plan.check_run(total_steps)

    def parts_at(self, step: int) -> tuple[str, ...]:
        """The parts that start to synchronise when `step` of 1 .. T steps were taken."""
        return tuple(name for name, plan in self.plans.items() if plan.syncs_after(step - 1))

    def events_from(self, step: int) -> list[PartEvent]:
        """All events after more than `step` steps, in their order: how a run resumes."""
        found, total = [], self.total_steps
        for place, (name, plan) in enumerate(self.plans.items()):
            ends = plan.ends.tolist()
            for end, following in zip(ends, [*ends[1:], total], strict=True):
                arrives = min(end + self.delay, following)
                last = end == total
                # What was on its way arrives before anything starts, and at once what need not.
                found.append(((end, 1, place), PartEvent(end, START, name, last)))
                rank = 2 if arrives == end else 0
                found.append(((arrives, rank, place), PartEvent(arrives, FINISH, name, last)))
        found.sort(key=lambda pair: pair[0])
        return [event for _, event in found if event.step > step]

    def describe(self) -> str:
        """All plans on one screen."""
        head = f"{len(self.plans)} parts, delay {self.delay}, hash {self.digest()[:12]}"
        parts = [f"{name}: {plan.describe()}" for name, plan in self.plans.items()]
        return "\n".join([head, *parts])

    def save(self, path: str) -> None:
        """Writes plans and hash as JSON: under a temporary name first, so never half a file."""
        content = {
            "delay": int(self.delay),
            "total_steps": self.total_steps,
            "parts": [[n, p.rule, p.starts.tolist()] for n, p in self.plans.items()],
            "digest": self.digest(),
        }
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(f"{path}.tmp", path)

    def __eq__(self, other):
        return isinstance(other, PartPlans) and self.digest() == other.digest()

    def __hash__(self):
        return hash(self.digest())

    def __repr__(self):
        return f"PartPlans({self.rule})"


def read_part_plans(path: str) -> PartPlans:
    """Reads plans that `PartPlans.save` has written.

    Args:
      path: of the JSON file.

    Returns:
      The plans.

    Raises:
      ValueError: if the file holds no such plans or does not match its hash.

    Example:
      >>> import os, tempfile, local_opt
      >>> path = os.path.join(tempfile.mkdtemp(), "plans.json")
      >>> plans = local_opt.PartPlans({"params": local_opt.constant(4, total_steps=10)})
      >>> plans.save(path)
      >>> local_opt.read_part_plans(path) == plans
      True
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        parts = {n: SyncPlan(s, content["total_steps"], rule) for n, rule, s in content["parts"]}
        found, digest = PartPlans(parts, delay=content["delay"]), content["digest"]
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"{path!r} holds no saved plans ({error!r}): save them again.") from error
    if found.digest() != digest:
        raise ValueError(f"{path!r} does not match its hash: it was changed. Save the plans again.")
    return found
