"""How many cases Hypothesis draws, and how programs are compiled that run once or twice.

Hypothesis draws SYNCOPATE_CASES times as many cases as in the default suite:

SYNCOPATE_CASES=20 pytest -m "slow or not slow" -n 0 tests/compare/test_flags.py
"""

import importlib.metadata
import os
from collections.abc import Container, Iterable

import pytest

# They generate a program in a quarter of the time that XLA's default takes.
FAST_XLA = "--xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # Known to these alone: XLA ends the process at a flag that it does not know.
    FAST_XLA += " --xla_cpu_use_fusion_emitters=false"


def mostly_slow(cases: Iterable, *, quick: Container) -> list:
    """The parameters of a test, of which only the quick ones run without `-m slow`."""

    def one(case):
        values = case if type(case) is tuple else (case,)
        return pytest.param(*values, marks=() if case in quick else pytest.mark.slow)

    return [one(case) for case in cases]


def times(examples: int) -> int:
    """`examples`, as often as the environment asks for."""
    return examples * int(os.environ.get("SYNCOPATE_CASES", "1"))
