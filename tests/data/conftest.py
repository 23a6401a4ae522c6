"""What tests of images share."""

import pytest

from experiments.data import imagenet


@pytest.fixture
def any_model(monkeypatch):
    """Replaces the networks, which take seconds to build, and tells what they were asked for."""
    asked = {}
    for name, choice in imagenet.CHOICES.items():
        monkeypatch.setitem(imagenet.CHOICES, name, choice._replace(build=asked.update))
    return asked
