"""Calls that are refused: each by its name, with what its message must say."""

import pytest


def refuses(calls):
    """The test of {name: (call, message)}: every call is a ValueError with that message."""

    @pytest.mark.parametrize("call,message", calls.values(), ids=calls)
    def test(call, message):
        with pytest.raises(ValueError, match=message):
            call()

    return test


def names(calls):
    """The test of {name: (call, *words)}: a ValueError that holds the words, as they are written.

    The words are names of arguments and values, and no prose.
    """

    @pytest.mark.parametrize("call,words", [(c, w) for c, *w in calls.values()], ids=calls)
    def test(call, words):
        with pytest.raises(ValueError) as error:
            call()
        assert not [word for word in words if word not in str(error.value)], str(error.value)

    return test
