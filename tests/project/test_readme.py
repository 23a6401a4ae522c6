"""The README's examples run as they are written."""

import pathlib
import re

import pytest

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.S)


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code):
    lines = [line for line in code.split("\n") if line.strip()]
    assert len(lines) <= (16 if "study.main" in code else 15)  # a study is no newcomer's first loop
    exec(compile(code, "README.md", "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 2


def test_pictures_are_there():
    for path in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README):
        assert (pathlib.Path(__file__).parents[2] / path).exists(), path
