"""Signs of life: how far a process has come, told to the others and to whoever has started it.

The latter finds them in files, where the environment names a folder for them. They are given at
every look of the host.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from experiments.processes import waits

FOLDER = "SYNCOPATE_HEARTBEATS"  # of the environment


class Beat(NamedTuple):
    """Where a process stands.

    Fields:
      step: up to which its host has handed out steps, of the run that it trains.
      first: the step from which its first run went on, 0 without a checkpoint.
      computed: steps of all its runs.
      open: whether it is within a run.
    """

    step: int
    first: int
    computed: int
    open: bool


@contextlib.contextmanager
def beating(step: int) -> Iterator[Callable[[int], None]]:
    """`beat(step)`, to be called on the way of a run that goes on from `step`."""
    folder = os.environ.get(FOLDER)
    if not folder:
        waits.came_to(step)
        yield waits.came_to
        return
    import jax  # whoever only looks does without

    number = jax.process_index() if jax.distributed.is_initialized() else 0
    before = read(folder, number) or Beat(step, step, 0, False)
    last = step

    def write(now: int, running: bool):
        nonlocal last
        last = now
        waits.came_to(now)
        beat = Beat(now, before.first, before.computed + now - step, running)
        temporary = pathlib.Path(folder, f"{number}.tmp")
        temporary.write_text(json.dumps(beat))
        os.replace(temporary, _path(folder, number))

    write(step, True)
    yield lambda now: write(now, True)
    write(last, False)


def read(folder: str | os.PathLike, number: int) -> Beat | None:
    """The last sign of life of a process; None before its first."""
    path = _path(folder, number)
    return Beat(*json.loads(path.read_text())) if path.exists() else None


def when(folder: str | os.PathLike, number: int) -> int:
    """A number that changes with every sign of life of a process; 0 before the first."""
    path = _path(folder, number)
    return path.stat().st_mtime_ns if path.exists() else 0


def _path(folder, number):
    return pathlib.Path(folder, str(number))
