"""One wheel for all tests of a session."""

import pytest

from tests import installed


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return installed.built(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def unpacked(wheel):
    """The folder of the installed package, without the clone."""
    return installed.unpacked(wheel)
