"""Files of an output folder: atomic writes, JSON, and refusals that say what to do."""

import contextlib
import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import IO

from syncopate.refusals import UserError

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
WHAT_TO_DO = (
    "restore it from a copy, choose another --output_dir, or pass --overwrite to begin again."
)


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
    from experiments.distributed import processes

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
    write_whole(path, dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: str, default=None):
    """The object in a JSON file; `default` if it does not exist."""
    if not os.path.exists(path):
        return default
    return loads(content(path), repr(str(path)))


def differences(before: Mapping, now: Mapping) -> list[str]:
    """One line per setting that differs between two runs."""
    lines, none = [], object()
    for name in sorted(before | now):
        one, other = before.get(name, none), plain(now.get(name))
        if one is not none and name in now and one != other:
            lines.append(f"{name}: {one!r} there, {other!r} here")
        elif one is none or name not in now:
            lines.append(f"{name}: only {'here' if one is none else 'there'}")
    return lines


def dumps(value, **options) -> str:
    """The text of a value. Numbers that are not finite are null, since JSON has none."""
    try:
        return json.dumps(value, allow_nan=False, default=plain, **options)
    except (TypeError, ValueError):  # numbers that are not finite, or names that are not text
        return json.dumps(plain(value), allow_nan=False, **options)


def loads(text: str | bytes, what: str) -> dict:
    """The object in a text; ValueError, which names `what`, unless there is one."""
    try:
        if isinstance(value := json.loads(text), dict):
            return value
        wrong = f"it holds {type(value).__name__}, not dict"
    except (ValueError, RecursionError) as error:
        wrong = error
    raise UserError(f"{what} is broken ({wrong}): {WHAT_TO_DO}")


def load_lines(lines: Iterable[bytes], path: str | os.PathLike) -> list[dict]:
    """The objects in the lines of a file, one each; ValueError, which names the line, if not so."""
    lines = [*lines]
    with contextlib.suppress(ValueError, RecursionError):
        values = [*map(json.loads, map(bytes.decode, lines))]
        if {*map(type, values)} <= {dict}:
            return values
    return [loads(line, f"line {n} of {str(path)!r}") for n, line in enumerate(lines, 1)]


def plain(value):
    """The value as JSON gives it back: arrays and tuples are lists, not finite numbers None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (list, tuple)):
        return [*map(plain, value)]
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    return value
