"""A lock file that lets only one run at a time write into an output folder.

The operating system releases the lock when the process ends, even if it crashes. The file's content
names the owner, for people and for file systems without locks. It is empty when the lock is free.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import IO

from experiments import files
from experiments.distributed import processes

NAME = "lock.json"
BUSY = 75  # exit code of a run whose folder is taken: try again later
_locks: dict[IO, str] = {}  # open lock files of this process: what it wrote into them


@contextlib.contextmanager
def held(folder: str) -> Iterator[None]:
    """Holds the folder while the body runs; process 0 does so for all processes of a run.

    Ends with BUSY, after a message, if another run holds it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(files.advised(folder))
        problem = None
        if processes.is_first():
            os.makedirs(folder, exist_ok=True)
            file = stack.enter_context(_opened(os.path.join(folder, NAME)))
            problem = _take(file, folder)
            if problem is None:
                stack.callback(_release, file)
        if (problem := processes.of_first(problem)) is not None:
            if processes.is_first():
                print(problem, file=sys.stderr)
            sys.exit(BUSY)
        yield
        processes.wait(f"leave {folder}")  # so that none writes after the release


def check() -> None:
    """Raises OSError where a lock that this process holds is gone, or is another run's by now."""
    for file, content in _locks.items():
        if not _holds(file.name, content):
            owner = _owner_at(file.name)
            taken = "belongs to {pid} on {host} since {since}" if owner else "is gone"
            raise OSError(
                f"{file.name!r}, the lock of this run, {taken.format(**owner or {})}: this run "
                "ends here, since two would write into one folder. The same command continues, "
                "once no run has the folder."
            )


def _opened(path: str) -> IO:
    """The lock file, made if absent. A link is refused: what it names would be emptied."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    return open(path, "ab", buffering=0, opener=lambda path, _: files.regular(path, flags))


def _take(file: IO, folder: str) -> str | None:
    """Takes the lock and writes the owner into the file; returns a message if it is taken."""
    here, free = socket.gethostname(), _lock(file)
    owner = _owner_at(file.name)
    # Some file systems do not share their locks with other machines.
    if free is False or (owner and (free is None or owner["host"] != here)):
        text = "process {pid} on {host}, since {since},".format(**owner) if owner else "one process"
        return (
            f"{folder!r} is taken by another run ({text}): wait until it ends, or choose another "
            f"--output_dir. If that process no longer runs, delete {file.name!r}."
        )
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    content = files.dumps({"host": here, "pid": os.getpid(), "since": since})
    file.truncate(0)
    files.append(file, content)
    _locks[file] = content
    return None


def _release(file: IO) -> None:
    if _holds(file.name, _locks.pop(file)):
        file.truncate(0)


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


def _holds(path: str, content: str) -> bool:
    """Whether a file holds just this text. Every record asks, so nothing is parsed.

    It is opened and read, since file systems of other machines may answer `stat` from memory.
    """
    try:
        return files.content(path) == content.encode()
    except OSError:
        return False


def _owner_at(path: str) -> dict | None:
    """The owner that a lock file names; None if there is no file, or it is empty or incomplete."""
    try:
        owner = files.read_json(path, {})
        return owner if {"host", "pid", "since"} <= owner.keys() else None
    except ValueError:
        return None
