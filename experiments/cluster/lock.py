"""A lock file that lets only one run at a time write into an output folder.

The operating system releases the lock when the process ends, even if it crashes. The file's content
names the owner, for people and for file systems without locks. It is empty when the lock is free.
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
BUSY = 75  # exit code of a run whose folder is taken: try again later


@contextlib.contextmanager
def held(folder: str) -> Iterator[None]:
    """Holds the folder while the body runs; process 0 does so for all processes of a run.

    Raises:
      SystemExit: BUSY, after a message, if another run holds it.
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
        processes.wait(f"leave {folder}")  # so that none writes after the release


def _take(file: IO, folder: str) -> str | None:
    """Takes the lock and writes the owner into the file; returns a message if it is taken."""
    here, free = socket.gethostname(), _lock(file)
    owner = _owner(file)
    # Some file systems do not share their locks with other machines.
    if free is False or (owner and (free is None or owner["host"] != here)):
        told = "process {pid} on {host}, since {since},".format(**owner) if owner else "one process"
        return (
            f"{folder!r} is taken by another run ({told}): wait until it ends, or choose another "
            f"--output_dir. If that process no longer runs, delete {file.name!r}."
        )
    file.truncate(0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    json.dump({"host": here, "pid": os.getpid(), "since": since}, file)
    file.flush()
    return None


def _lock(file: IO) -> bool | None:
    """Whether we got the operating system's lock of a file; None where there are no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # no locks on this system or file system
        return None
    return True


def _owner(file: IO) -> dict | None:
    """The owner that the file names; None if it is empty or incomplete."""
    file.seek(0)
    try:
        found = json.load(file)
        return found if {"host", "pid", "since"} <= found.keys() else None
    except (ValueError, AttributeError):
        return None
