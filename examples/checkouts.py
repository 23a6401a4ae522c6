"""Code bases of others that a script runs in place: they are found, and nothing of them is kept."""

import pathlib
import sys


def use(path: str | None, *, flag: str, address: str, holds: str) -> pathlib.Path:
    """The folder of a checkout, from which Python then imports.

    Args:
      path: of the checkout; flag: by which it was given; address: of the repository.
      holds: a file that is in it.

    Raises:
      ValueError: where there is none, with the commands that make one.
    """
    folder = pathlib.Path(path or "").expanduser().resolve()
    if not path or not (folder / holds).is_file():
        raise ValueError(
            f"{flag} is {path!r}, where there is no {holds}: `git clone {address} DIR` and pass "
            f"{flag}=DIR; what to install beside it is in docs/results/outside.md."
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    return folder


def files(path: str | None, names, *, flag: str) -> list[pathlib.Path]:
    """Files or folders of a folder that was given by a flag.

    Raises:
      ValueError: where one is absent, with all names that are looked for.
    """
    found = [pathlib.Path(path or "").expanduser() / name for name in names]
    absent = [f.name for f in found if not path or not f.exists()]
    if absent:
        raise ValueError(
            f"{flag} is {path!r}, where there is no {' and no '.join(absent)}: pass the folder "
            "that holds it; how to get the data is in docs/results/outside.md."
        )
    return found
