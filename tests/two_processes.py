"""A start of two processes that know of each other."""

import os
import pathlib

from experiments import launch

ROOT = pathlib.Path(__file__).resolve().parents[1]


def start_two(module: str, *arguments: str, folder: pathlib.Path = ROOT, **options) -> int:
    """The exit code of two processes that run a module of the tests, or one of `folder`.

    They have one device each, whatever the tests themselves have.
    """
    environment = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    options |= {"processes": 2, "environment": environment, "folder": folder}
    return launch.launch(module, arguments, **options)
