"""One run at a time writes into an output folder: a file says which, and outlives it if it crashes.

The kernel gives the file's lock back when its process ends, however that ends; what stands in the
file tells people, and file systems without such locks, who has it. A free lock's file is empty.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import IO

from experiments.cluster import processes

NAME = "lock.json"
BUSY = 75  # exit code of a run that found its folder taken: try again later


@contextlib.contextmanager
def held(folder: str) -> Iterator[None]:
    """While the body runs, no other run has the folder; process 0 holds it for all of a run.

    Raises:
      SystemExit: BUSY, after a message, if another run has it.
    """
    with contextlib.ExitStack() as stack:
        problem = None
        if processes.is_first():
            os.makedirs(folder, exist_ok=True)
            file = stack.enter_context(open(os.path.join(folder, NAME), "a+", encoding="utf-8"))
            problem = _take(file, folder)
            if problem is None:
                stack.callback(file.truncate, 0)
        if (problem := processes.of_first(problem)) is not None:
            if processes.is_first():
                print(problem, file=sys.stderr)
            sys.exit(BUSY)
        yield
        processes.wait(f"leave {folder}")  # none writes once another run may


def _take(file: IO, folder: str) -> str | None:
    """Writes into the file whose folder it is now; or says who has it."""
    here, free = socket.gethostname(), _lock(file)
    owner = _owner(file)
    # Not every file system tells other machines of its locks.
    if free is False or (owner and (free is None or owner["host"] != here)):
        told = "process {pid} on {host}, since {since},".format(**owner) if owner else "one process"
        return (
            f"{folder!r} is taken by another run ({told}): wait for its end, or choose another "
            f"--output_dir. If that process is gone, delete {file.name!r}."
        )
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    json.dump({"host": here, "pid": os.getpid(), "since": since}, file)
    file.flush()
    return None


def _lock(file: IO) -> bool | None:
    """Whether the kernel's lock of a file is ours now; None where there are no such locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # not on this system, or not on this file system
        return None
    return True


def _owner(file: IO) -> dict | None:
    """Whom the file names; None for a file that is empty, or was cut in a crash."""
    file.seek(0)
    try:
        found = json.load(file)
        return found if {"host", "pid", "since"} <= found.keys() else None
    except (ValueError, AttributeError):
        return None
