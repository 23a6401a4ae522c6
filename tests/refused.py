"""Calls that are refused: each by its name, with what its message must say."""

import pytest


def refuses(calls):
    """The test of {name: (call, message)}: every call is a ValueError with that message."""

    @pytest.mark.parametrize("call,message", calls.values(), ids=calls)
    def test(call, message):
        with pytest.raises(ValueError, match=message):
            call()

    return test
