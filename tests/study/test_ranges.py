"""Every number that a command takes has a range, which its help tells and its parser keeps."""

import importlib

import pytest
from absl import flags as absl_flags

from syncopate import command
from tests.studies import flags_of


def accepted(flag, text):
    """The value of a text; None if it is refused, by a message that names the flag."""
    try:
        flag.parse(text)
    except absl_flags.IllegalFlagValueError as error:
        assert str(error).startswith(f"flag --{flag.name}={text}: ")
        return None
    return flag.value


def is_number(flag):
    value = accepted(flag, "0.5") or accepted(flag, "2")
    value = value[0] if isinstance(value, list) else value
    return isinstance(value, int | float) and not isinstance(value, bool)


NO_NUMBERS = ("nan", "inf", "-inf", "1e999", "1" + "0" * 400, "a", "")


@pytest.mark.parametrize("name", command.experiments())
def test_no_flag_takes_a_number_outside_its_range(name):
    flags = flags_of(importlib.import_module(f"experiments.{name}"))
    numbers = [flags[name] for name in flags if is_number(flags[name])]
    assert numbers or name == "claims"
    for flag in numbers:
        assert not any(accepted(flag, text) is not None for text in NO_NUMBERS), flag.name
        signed = accepted(flag, "-1") is not None
        assert signed == ("(-inf" in flag.parser.syntactic_help), flag.name
        if isinstance(flag.value, list):
            assert accepted(flag, "1,nan") is None
