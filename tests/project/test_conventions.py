"""The public functions keep the house's conventions."""

import inspect
import re

import pytest

import local_opt
import models
import ordering
from syncopate import plans

PACKAGES = (ordering, ordering.blocks, ordering.echo, ordering.input, models, local_opt, plans)
PUBLIC = [(package, name) for package in PACKAGES for name in package.__all__]
# Algorithms out of papers: name who published them.
CITED = (
    "random_reshuffling", "shuffle_once", "flip_flop", "block_reshuffling", "grab", "pair_balance",
    "cd_grab", "greedy_herding", "greedy", "self_balancing_walk", "kernel_halving", "herding_bound",
    "lenet", "vit", "gpt2", "mobilenet_v2", "resnet",
    "lstm", "forecaster",
    "local_steps", "local_rounds", "parallel_rounds", "accumulated_rounds", "qsr",
    "constant", "from_function", "diloco", "slowmo",
    "muloco",
    "streaming_rounds", "stream_segments",
    "control_variates", "proximal", "echo_batches", "fixed", "bernoulli",
)  # fmt: skip


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


@pytest.mark.parametrize("function", functions())
def test_hyper_parameters_are_keyword_only(function):
    for parameter in inspect.signature(function).parameters.values():
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


@pytest.mark.parametrize("function", functions())
def test_help_shows_every_argument(function):
    kinds = {p.kind for p in inspect.signature(function).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


# (a state that is usually there, a second argument of an accessor, what a function is called with)
ALLOWED = ("front", "backend", "key", "units", "workers", "roles", "gradients", "args")


@pytest.mark.parametrize("name", CITED)
def test_references(name):
    docs = [inspect.getdoc(getattr(p, name)) for p in PACKAGES if hasattr(p, name)]
    assert any(re.search(r"References:\n(.*\n){0,2}.*https?://", doc) for doc in docs)
