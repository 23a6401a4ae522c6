"""Recorded runs are read once for all tests of pages: they do not change meanwhile."""

import functools
import pathlib

import pytest

from docs import numbers
from experiments.report import archive


@pytest.fixture(scope="package", autouse=True)
def read_once():
    load, default = functools.cache(archive.load), archive.FOLDER

    def loaded(name, folder=default):
        return load(name, pathlib.Path(folder))

    with pytest.MonkeyPatch.context() as patch:
        for owner in (archive, numbers):
            patch.setattr(owner, "load", loaded)
        yield
