"""One run at a time writes into an output folder: a file says which, and outlives it if it crashes.

The kernel gives the file's lock back when its process ends, however that ends; what stands in the
file tells people, and file systems without such locks, who has it.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator

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
            problem = _take(os.path.join(folder, NAME), stack)
        if (problem := processes.of_first(problem)) is not None:
            if processes.is_first():
                print(problem, file=sys.stderr)
            sys.exit(BUSY)
        yield
        processes.wait(f"leave {folder}")  # none writes once another run may


def _take(path: str, stack: contextlib.ExitStack) -> str | None:
    """Takes the lock until the stack closes; or says who has it."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        free = _lock(file)
        if _stands(file, path):
            break
        os.close(file)  # its holder has just removed it
    here, owner = socket.gethostname(), _owner(os.read(file, 4096))
    # Not every file system tells other machines of its locks.
    if free is False or (owner and (free is None or owner["host"] != here)):
        os.close(file)
        told = f"process {owner['pid']} on {owner['host']}" if owner else "another process"
        since = f", since {owner['since']}," if owner else ""
        return (
            f"{os.path.dirname(path)!r} is taken by another run ({told}{since}): wait for its end, "
            f"or choose another --output_dir. If that process is gone, delete {path!r}."
        )
    if owner:
        processes.say(
            f"Takes over the folder of process {owner['pid']} on {owner['host']}, which has ended "
            "without leaving it."
        )
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps({"host": here, "pid": os.getpid(), "since": since}).encode(), 0)
    stack.callback(os.close, file)
    stack.callback(os.remove, path)  # first
    return None


def _stands(file: int, path: str) -> bool:
    """Whether an open file is still the one at its path; one question, as it may go between two."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _lock(file: int) -> bool | None:
    """Whether the kernel's lock of a file is ours now; None where there are no such locks."""
    try:
        import fcntl
    except ImportError:  # not on this system
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # not on this file system
        return None
    return True


def _owner(content: bytes) -> dict | None:
    """Whom the file names; None for a file that is empty, or was cut in a crash."""
    try:
        found = json.loads(content)
        return found if {"host", "pid", "since"} <= found.keys() else None
    except (ValueError, AttributeError):
        return None
