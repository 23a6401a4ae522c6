"""Files of an output folder: atomic writes, and refusals that say what to do."""

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import IO

from experiments.cluster import strict

ADVICE = {
    "make room there; then the same command continues": "ENOSPC EDQUOT EFBIG",
    "make it writable, or choose another --output_dir": "EACCES EPERM EROFS",
    "move away what is there, or choose another --output_dir": (
        "EISDIR ENOTDIR EEXIST ENOTEMPTY ELOOP ENXIO"
    ),
    "bring it back, or choose another --output_dir": "ENOENT ESTALE",
    "look at that disk; then the same command continues": "EIO",
    "choose another --output_dir": "ENAMETOOLONG",
}
TENSORSTORE = re.compile(r"(?:local file|Failed writing:) \"(.*?)\".*\[os_error_code='(\d+)'", re.S)


@contextlib.contextmanager
def advised(path: str) -> Iterator[None]:
    """Errors of the system with this path, or below it, also say what to do; TensorStore's too."""
    try:
        yield
    except (OSError, ValueError) as error:
        number, at = getattr(error, "errno", None), getattr(error, "filename", None) or path
        if match := TENSORSTORE.search(str(error)):
            at, number = match[1], int(match[2])
        code = errno.errorcode.get(number, "none")
        advice = [text for text, codes in ADVICE.items() if code in codes.split()]
        if not advice or not os.path.abspath(at).startswith(os.path.abspath(path)):
            raise
        text = f"{str(at)!r} cannot be used ({os.strerror(number)}): {advice[0]}."
        raise OSError(text) from error


def write_whole(path: str, content: str | bytes) -> None:
    """Writes a file, and its folder, atomically: under a temporary name, which is then renamed."""
    from experiments.cluster import processes

    if not processes.is_first():
        return
    temporary, folder = f"{path}.tmp", os.path.dirname(os.path.abspath(path))
    with advised(folder):
        os.makedirs(folder, exist_ok=True)
    with advised(path):
        try:
            with created(temporary) as file:
                file.write(content if isinstance(content, bytes) else content.encode())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.remove(temporary)
            raise


def created(path: str) -> IO[bytes]:
    """Opens a new file for writing, after removing a file or link of its name."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    return open(path, "xb")


def regular(path: str | os.PathLike, flags: int) -> int:
    """An `opener` of `open` that refuses a FIFO, say: whoever opens or reads one may wait for ever.

    It is the opened file that is asked, so that none takes its place in between.
    """
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "a device"
        raise OSError(
            f"{str(path)!r} is {kind}, and no file that this code has written: move it away, or "
            "choose another --output_dir."
        )
    return descriptor


def content(path: str | os.PathLike) -> bytes:
    """The content of a regular file; anything else is refused."""
    with advised(str(path)), open(path, "rb", opener=regular) as file:
        return file.read()


def append(file, text: str) -> None:
    """Writes text to the end of an unbuffered file."""
    rest = text.encode()
    with advised(file.name):
        while rest:  # a disk that becomes full takes a part
            rest = rest[file.write(rest) :]


def write_json(path: str, value) -> None:
    write_whole(path, strict.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: str, default=None):
    """The object in a JSON file; `default` if it does not exist."""
    if not os.path.exists(path):
        return default
    return strict.loads(content(path), repr(str(path)))


def differences(before: Mapping, now: Mapping) -> list[str]:
    """One line per setting that differs between two runs."""
    lines, none = [], object()
    for name in sorted(before | now):
        one, other = before.get(name, none), strict.plain(now.get(name))
        if one is not none and name in now and one != other:
            lines.append(f"{name}: {one!r} there, {other!r} here")
        elif one is none or name not in now:
            lines.append(f"{name}: only {'here' if one is none else 'there'}")
    return lines
