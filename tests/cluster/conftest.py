"""What tests of folders share."""

import pytest

from tests.commands import records


@pytest.fixture
def whole(finished):
    """The records of a run that nothing disturbed."""
    return records(finished)
