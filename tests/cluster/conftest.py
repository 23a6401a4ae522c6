"""What tests of folders share."""

import pytest

from tests.commands import SHORT, records, train_run


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The records of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    train_run(SHORT, folder)
    return records(folder)
