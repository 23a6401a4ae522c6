"""How many cases Hypothesis draws: SYNCOPATE_CASES times as many as in the default suite.

SYNCOPATE_CASES=20 pytest -m "slow or not slow" -n 0 tests/study/test_any_flags.py

The sum over all properties is the last line of a session.
"""

import os


def times(examples: int) -> int:
    """`examples`, as often as the environment asks for."""
    return examples * int(os.environ.get("SYNCOPATE_CASES", "1"))
