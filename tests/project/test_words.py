"""Private words are not to come back: the field has others, and a stranger knows those."""

import ast
import functools
import pathlib
import re
import subprocess
import textwrap
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What stands in names, alone or between underscores: {word: what to say}. In prose these are English.
NAMES = {
    "found": "result, or what it is",
    "own": "what it is the arm's, worker's or process's",
    "known": "choices, metadata, names",
    "told": "message, expected",
    "said": "output",
    "met": "members",
    "whose": "owner",
    "against": "baseline, difference",
    "apart": "independent, distance",
    "dealt": "global",
    "priced": "modelled",
    "settled": "reconciled",
    "living": "members",
    "alike": "equal, same",
}
# Terms of art, which no comment, docstring, message or page has either.
TERMS = {
    r"lift(s|ed|ing)?": "map_workers",
    "owned": "of the worker, replicated",
    "wires?": "compressor, bytes sent",
    "patience": "timeout",
    "meetings?": "sync",
    "priced": "modelled",
}
SKIPPED = ("ordering/", "local_opt/", "syncopate/", "tests/ordering/", "tests/local_opt/")
HERE = "tests/project/test_words.py"


@functools.cache
def texts(*kinds: str) -> dict[str, str]:
    """{path: text} of the files of these kinds that git tracks."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "--", *kinds], cwd=ROOT, text=True)
    paths = [path for path in listed.split("\0") if path and not path.startswith(SKIPPED)]
    return {path: (ROOT / path).read_text() for path in paths if (ROOT / path).is_file()}


def names(code: types.CodeType):
    """Every name that a piece of code binds, reads or passes; of tests' names, which are sentences,
    none."""
    yield from (*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names(constant)
        elif isinstance(constant, tuple):  # of keywords, among others
            yield from (one for one in constant if isinstance(one, str) and one.isidentifier())


def private(identifiers) -> list[str]:
    parts = ((name, part) for name in identifiers for part in name.lower().split("_"))
    return sorted({f"{name}: {NAMES[part]}" for name, part in parts if part in NAMES
                   and not name.startswith("test_")})  # fmt: skip
