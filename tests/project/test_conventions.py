"""The public functions keep the conventions."""

import inspect
import re

import pytest

from syncopate import plans
from tests.public import PACKAGES

PUBLIC = [(package, name) for package in (*PACKAGES, plans) for name in package.__all__]


def functions():
    return [
        pytest.param(getattr(package, name), id=name)
        for package, name in PUBLIC
        if inspect.isfunction(getattr(package, name))
    ]


@pytest.mark.parametrize("function", functions())
def test_docstrings(function):
    doc = inspect.getdoc(function)
    assert doc and doc.split("\n")[0].endswith((".", ":")), "one line first"
    assert "Examples:" in doc
    if inspect.signature(function).parameters:
        assert "Args:" in doc
    if "raise ValueError" in inspect.getsource(function):
        assert "Raises" in doc


def test_references_of_algorithms_have_an_address():
    docs = [inspect.getdoc(getattr(package, name)) for package, name in PUBLIC]
    cited = [doc for doc in docs if doc and "References:" in doc]
    assert len(cited) > 40, "they name who published them"
    for doc in cited:
        address = re.search(r"References:\n(.*\n){0,2}.*https?://", doc)
        assert address, f"the first of References: needs an address, https://...:\n{doc}"


@pytest.mark.parametrize("function", functions())
def test_hyper_parameters_are_keyword_only_and_shown_by_help(function):
    for parameter in inspect.signature(function).parameters.values():
        assert parameter.kind is not inspect.Parameter.VAR_KEYWORD, parameter.name
        if parameter.default is not inspect.Parameter.empty and parameter.name not in ALLOWED:
            assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter.name
        assert parameter.name not in ("rng", "seed_key", "prng"), "keys are called key"


@pytest.mark.parametrize("function", functions())
def test_every_parameter_is_annotated_and_described(function):
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name
    assert signature.return_annotation is not inspect.Signature.empty
    section = re.search(r"^Args:\n((?:  .*\n|\n)*)", inspect.getdoc(function) + "\n", re.M)
    lines = re.findall(r"^  ([a-z]\w*(?:, \w+)*): ", section[1] if section else "", re.M)
    described = [name for line in lines for name in line.split(", ")]
    assert sorted(described) == sorted(signature.parameters)


# (a state that is usually there, a second argument of an accessor, what a function is called with)
ALLOWED = ("front", "backend", "key", "units", "workers", "like")
