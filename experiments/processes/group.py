"""A group of local processes: started together, watched, and ended together."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.processes import heartbeat
from experiments.processes.heartbeat import Beat


class Watch(NamedTuple):
    """How a group is watched.

    Fields:
      hearts: the folder of its signs of life.
      deadline: seconds without one after which a process has hung.
      grace: seconds that the others have once one has failed, before they are asked to end, and
        again before they are killed: gloo lets them wait for ever.
    """

    hearts: str
    deadline: float
    grace: float


class End(NamedTuple):
    """How a group ended.

    Fields:
      code: of the first process that failed, 128 + n where signal n ended it; 1 of one that hung.
      said: which failed and how, "" if none did.
      asked: whether a signal to this process asked for the end.
      exited: whether the first failure was an exit code, as of an error that Python tells.
      beat: the last sign of life of the process that had come furthest.
    """

    code: int
    said: str
    asked: bool
    exited: bool
    beat: Beat | None


def run(
    command: Sequence[str], processes: int, environment: Mapping[str, str], watch: Watch,
    *, stdout=None, folder: str | os.PathLike | None = None,
) -> End:  # fmt: skip
    """Runs `command --process_id=N` for every N; returns when all have ended.

    Args:
      stdout: where process 0 prints, all else goes to stderr; folder: in which they run.
    """
    environment = {**environment, heartbeat.FOLDER: watch.hearts}
    running, asked = [], []
    try:
        with _forwarded_signals(running, asked):
            for number in range(processes):
                running.append(_start(command, number, environment, stdout, folder))
            code, said = _wait(running, watch, asked)
    finally:
        _send(running, signal.SIGKILL)
        for process in running:
            process.wait()
    beats = [heartbeat.read(watch.hearts, n) for n in range(processes)]
    furthest = max((b for b in beats if b), key=lambda beat: beat.computed, default=None)
    return End(128 - code if code < 0 else code, said, bool(asked), 0 < code < 128, furthest)


def _start(command, number, environment, stdout, folder):
    """Process `number`, in a session of its own: the terminal's Ctrl-C reaches it through us."""
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        [*command, f"--process_id={number}"], text=True, cwd=folder, env=environment,
        start_new_session=True, **outputs if number else {"stdout": stdout},
    )  # fmt: skip
    if number:
        threading.Thread(target=_relay, args=(process.stdout, number), daemon=True).start()
    return process


def _relay(lines, number):
    with lines:
        for line in lines:
            sys.stderr.write(f"[{number}] {line}")
            sys.stderr.flush()


@contextlib.contextmanager
def _forwarded_signals(running, asked):
    """While the body runs: the first SIGINT or SIGTERM ends the processes, the second kills."""

    def handle(number, frame):
        del frame
        _send(running, signal.SIGKILL if asked else signal.SIGTERM)
        asked.append(number)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(running, number):
    for process in running:
        if process.poll() is None:
            process.send_signal(number)


def _wait(running, watch, asked) -> tuple[int, str]:
    """Waits for all; ends the rest once one has failed. Its exit code, and what is said of it."""
    code, said, sends = 0, "", []
    seen = dict.fromkeys(range(len(running)), (0, time.monotonic()))
    while any([process.poll() is None for process in running]):
        now = time.monotonic()
        while sends and now >= sends[0][0]:
            _send(running, sends.pop(0)[1])
        if not code:
            seen = _seen(seen, watch.hearts, now)
            code, said = _failed(running, watch.hearts)
            asks, kills = now + watch.grace, now + 2 * watch.grace
            if not code and not asked and (said := _hung(running, seen, watch, now)):
                code, asks, kills = 1, now, asks
            if code:
                sends = [(asks, signal.SIGTERM), (kills, signal.SIGKILL)]
        time.sleep(0.05)
    return (code, said) if code else _failed(running, watch.hearts)


def _seen(seen, hearts, now):
    """{process: (its last sign of life, when we saw it)}; clocks of files are not compared."""
    found = {number: heartbeat.when(hearts, number) for number in seen}
    return {n: seen[n] if seen[n][0] == when else (when, now) for n, when in found.items()}


def _failed(running, hearts) -> tuple[int, str]:
    """The exit code of a process that has failed, or 0, and what is said of all that have."""
    failed = {n: p.returncode for n, p in enumerate(running) if p.returncode}
    said = [
        f"process {number} was ended by {signal.Signals(-code).name} {_after(hearts, number)}"
        if code < 0
        else f"process {number} ended with exit code {code} {_after(hearts, number)}"
        for number, code in failed.items()
    ]
    return next(iter(failed.values()), 0), "; ".join(said)


def _hung(running, seen, watch, now) -> str:
    """Who has hung; "" if none has.

    One that hangs lets the others wait. It is the one that a signal has stopped, or that has come
    less far; where none is, nobody can tell, and all are named.
    """
    silent = {n: now - when for n, (_, when) in seen.items() if running[n].poll() is None}
    if max(silent.values(), default=0.0) <= watch.deadline:
        return ""
    # All of them wait, one a little longer than the other.
    late = [number for number, seconds in silent.items() if seconds > watch.deadline / 2]
    beats = {n: heartbeat.read(watch.hearts, n) for n in late}
    steps = {n: beat.computed if beat else -1 for n, beat in beats.items()}
    stopped = [n for n in late if _is_stopped(running[n].pid)]
    first = stopped or [n for n in late if steps[n] == min(steps.values())]
    return "; ".join(
        f"process {number}{' is stopped and' if number in stopped else ''} has given no sign of "
        f"life for {silent[number]:.0f} s {_after(watch.hearts, number)}"
        for number in first
    )


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process; of Linux, which alone tells."""
    path = pathlib.Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] in "Tt"


def _after(hearts, number) -> str:
    beat = heartbeat.read(hearts, number)
    return f"after step {beat.step}" if beat else "before its first step"
