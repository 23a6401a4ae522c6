"""What the public functions do with bad arguments: they refuse them by name, or are a bug.

The counts are printed with `-s`. What no signature says is a row in the table of its package.
"""

import collections
import importlib
import inspect
import re

import pytest

from tests.bad_values import outcomes, variants
from tests.cases import mostly_slow
from tests.public import PACKAGES

TABLES = ("ordering", "input", "blocks", "local_opt", "models")  # "input" has echo, too


def calls_of(package):
    """Imported where it is used, as some rows compute and all processes collect this file."""
    return importlib.import_module(f"tests.bad_calls_{package}").CALLS


def test_every_public_function_has_a_row():
    """Those of orders, sign rules, plans, compressors, presets and models are made by signature."""
    public = {n for p in PACKAGES for n in p.__all__ if inspect.isfunction(getattr(p, n))}
    covered = {name.split(",")[0] for package in TABLES for name in calls_of(package)}
    assert public - covered == set()


# All bad values where a call takes no compiler, else one of each argument.
FEW = [(package, 1) for package in ("ordering", "local_opt", "models")]
ALL = [(package, None) for package in TABLES]


@pytest.mark.parametrize("package,most", mostly_slow(ALL + FEW, quick=[*FEW, *ALL[1:3]]))
def test_bad_arguments_are_refused_by_name(package, most):
    """None is accepted, and none ends in an error that is not ours or names nothing."""
    calls = calls_of(package)
    for run, valid, _ in calls.values():
        run(**valid)
    result = collections.defaultdict(list)
    for described, outcome in outcomes(calls, most):
        result[outcome.kind].append(f"{described}: {outcome.text[:200]}")
    print(package, {kind: len(lines) for kind, lines in result.items()})
    del result["refused"]
    assert not result, "\n".join(line for lines in result.values() for line in lines)


def shown(result):
    """The result as text, without addresses and the types of numbers."""
    return re.sub(r" at 0x\w+", "", re.sub(r"np\.\w+\(([^()]*)\)", r"\1", str(result)))


@pytest.mark.slow
@pytest.mark.parametrize("package", TABLES)
def test_numbers_of_numpy_and_jax_are_numbers(package):
    for name, (run, valid, _) in calls_of(package).items():
        wanted = shown(run(**valid))
        for arg, value in valid.items():
            for variant in variants(value):
                assert shown(run(**valid | {arg: variant})) == wanted, (name, arg, repr(variant))
