"""Segments of a streamed run: which fragments are sent and merged between which steps."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from local_opt.plans import SyncPlan
from syncopate.plans import check_whole


class Event(NamedTuple):
    """A communication that is due between two steps."""

    action: str  # "start" or "finish"
    fragment: Any  # as in the plans
    last: bool  # whether it is the run's last sync of the fragment


class Segment(NamedTuple):
    """Steps begin .. end - 1, and the events that are due before them."""

    begin: int
    end: int
    due: tuple[Event, ...]


def stream_segments(
    plans_of: Mapping[Any, SyncPlan],
    *,
    delay: int = 0,
    start: int = 0,
    before: Mapping[Any, SyncPlan] | None = None,
) -> list[Segment]:
    """The segments of a run in which each fragment has its own plan: what is due, then some steps.

    A fragment is started at the end of its round and finished `delay` steps later, or where it
    starts again if that is earlier. The last rounds of the run are finished at once.

    Args:
      plans_of: {fragment: its plan}, all for the same run.
      delay: >= 0, steps from start to finish; 0 if workers wait for each sync.
      start: in 0 .. T, the steps taken so far, to resume there; events at that step are still due.
      before: the plans of the steps before `start`, if they were others with the same delay: what
        they sent arrives, and nothing else. Their numbers of steps may be others.

    Returns:
      (begin, end, due) of each segment, in order: first `communicate(params, state, due)`, then the
      steps begin .. end - 1. The last segment has no steps.

    Raises:
      ValueError: for no plan, plans of different lengths, a round shorter than the delay (other
        than a fragment's first and last), a start out of range, or other fragments before.

    Examples:
      >>> import local_opt
      >>> turns = {f: local_opt.constant(4, total_steps=9, offset=2 * f) for f in range(2)}
      >>> for begin, end, due in local_opt.stream_segments(turns, delay=1)[:4]:
      ...     print(begin, end, [event[:2] for event in due])
      0 2 []
      2 3 [('start', 1)]
      3 4 [('finish', 1)]
      4 5 [('start', 0)]

    References:
      Douillard et al., Streaming DiLoCo with Overlapping Communication: Towards a Distributed
      Free Lunch, 2025, https://arxiv.org/abs/2501.18512
    """
    total = check_turns(plans_of, delay)
    start, delay = check_whole("start", start, 0, total), int(delay)
    before = plans_of if before is None else before
    check_turns(before, delay)
    if set(before) != set(plans_of):
        raise ValueError(
            f"the fragments are {[*plans_of]} and before {[*before]}: give both kinds of plans for "
            "the fragments of the state."
        )
    found = []
    for place, (name, plan) in enumerate(plans_of.items()):
        ends = [end for end in before[name].ends.tolist() if end < start]
        ends += [end for end in plan.ends.tolist() if end >= start]
        for end, following in zip(ends, [*ends[1:], total], strict=True):
            arrives, last = min(end + delay, following), end == total
            # Finish what was in transit before anything starts, and what has no delay at once.
            found.append((end, 1, place, Event("start", name, last)))
            found.append((arrives, 2 if arrives == end else 0, place, Event("finish", name, last)))
    due_at = {start: []}
    for step, _, _, event in sorted(found, key=lambda event: event[:3]):
        if step >= start:
            due_at.setdefault(step, []).append(event)
    ends = [*due_at, total][1:]
    return [Segment(at, end, tuple(due_at[at])) for at, end in zip(due_at, ends, strict=True)]


def check_turns(plans_of: Mapping[Any, SyncPlan], delay: int) -> int:
    """The number of steps of all plans."""
    named = plans_of.values() if isinstance(plans_of, Mapping) else [None]
    if not named or any(not isinstance(plan, SyncPlan) for plan in named):
        raise ValueError(
            f"the plans are {plans_of!r}: pass one SyncPlan for each fragment, as {{0: plan}}."
        )
    check_whole("delay", delay, 0)
    total_steps = next(iter(plans_of.values())).total_steps
    for name, plan in plans_of.items():
        plan.check_run(total_steps)
        count = plan.runs.counts
        for end in (0, -1):  # the first round may be shorter, and the last
            count[end] -= 1
        between = plan.runs.lengths[count > 0]
        if len(between) and between.min() < delay:
            raise ValueError(
                f"delay is {delay} and fragment {name!r} has a round of {between.min()} steps: a "
                "mean must arrive before the next one starts. Lower the delay, or raise the period."
            )
    return total_steps
