"""A run whose processes die or hang goes on from its last whole checkpoint, a few times."""

import sys
from collections.abc import Callable, Sequence

from experiments.processes.group import End
from experiments.processes.heartbeat import Beat

Attempt = Callable[[int, bool], End]


def supervise(
    attempt: Attempt, *, processes: int, restarts: int, min_processes: int, devices: int
) -> int:
    """Tries again until an attempt ends well, somebody asks for the end, or all restarts are used.

    Args:
      attempt: `(processes, whether a step was computed before) -> how it ended`.
      restarts: after failures; min_processes: as of `fewer`; devices: of all processes together.

    Returns:
      The exit code of the last attempt.
    """
    ends, left = [], processes
    for number in range(restarts + 1):
        ends.append(end := attempt(left, any(e.beat for e in ends)))
        if not end.code or end.asked:
            break
        _say(end.said)
        if end.exited and not any(e.beat for e in ends):
            if restarts:
                _say("no step was computed: what failed would fail again, so nothing is restarted")
            break
        if number < restarts:
            left = fewer(left, devices, min_processes)
            _say(f"restart {number + 1} of {restarts}, from the last whole checkpoint; processes: "
                 f"{left}")  # fmt: skip
        elif restarts:
            _say(f"gave up after restart {restarts}: look at the output of what failed, mend it, "
                 "and give the same command again")  # fmt: skip
    if restarts:
        _say(report([e.beat for e in ends], ended=not ends[-1].code or ends[-1].asked))
    return ends[-1].code


def fewer(processes: int, devices: int, least: int) -> int:
    """The next smaller number of processes that share the devices out evenly, but not below least.

    Example:
      >>> fewer(4, 4, 1), fewer(4, 4, 3)
      (2, 4)
    """
    allowed = (n for n in range(processes - 1, least - 1, -1) if devices % n == 0)
    return next(allowed, processes)


def goodput(beats: Sequence[Beat | None], *, ended: bool) -> tuple[int, int]:
    """(steps kept, steps computed) of attempts that followed each other.

    Steps are lost between a last sign of life and the checkpoint that the next attempt restored.

    Args:
      beats: the last sign of life of every attempt; None of one without.
      ended: whether the last attempt ended well; else none of its steps count as kept, for nobody
        has restored them.

    Example:
      >>> goodput([Beat(30, 0, 30, True), Beat(50, 20, 30, False)], ended=True)
      (50, 60)
    """
    found = [beat for beat in beats if beat]
    computed = sum(beat.computed for beat in found)
    lost = 0
    for before, after in zip(found, found[1:], strict=False):
        following = not before.open and not after.first  # the next run of a study
        lost += 0 if following else min(before.computed, max(0, before.step - after.first))
    if found and not ended:
        lost += found[-1].computed
    return computed - lost, computed


def report(beats: Sequence[Beat | None], *, ended: bool) -> str:
    """The goodput and the restarts, for people."""
    kept, computed = goodput(beats, ended=ended)
    share = f" ({kept / computed:.0%})" if computed else ""
    return f"goodput: {kept} of {computed} computed steps kept{share}; restarts: {len(beats) - 1}"


def _say(text):
    sys.stderr.write(f"[launch] {text}\n")
    sys.stderr.flush()
