"""A start of two processes that know of each other."""

import os
import pathlib
import subprocess
import sys

from tests.cases import FAST_XLA

ROOT = pathlib.Path(__file__).resolve().parents[1]


def start_two(module: str, *arguments: str, folder: pathlib.Path = ROOT, **options) -> int:
    """The exit code of two processes that run a module of the tests, or one of `folder`.

    They have one device each, whatever the tests themselves have.
    """
    command = [sys.executable, "-m", "experiments.launch", "--processes=2", "--", module]
    environment = os.environ | {"XLA_FLAGS": FAST_XLA, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.call([*command, *arguments], env=environment, cwd=folder, **options)
