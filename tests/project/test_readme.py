"""The examples of the README and of the pages to learn from run as they are written."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "learn").glob("*.md"))]
EXAMPLES = {
    page.stem: code
    for page in PAGES
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_runs(name):
    lines = [line for line in EXAMPLES[name].split("\n") if line.strip()]
    assert len(lines) <= 17 and max(map(len, lines)) <= 100
    exec(compile(EXAMPLES[name], f"{name}.md", "exec"), {})


def test_the_readme_is_short_and_shows_pictures_that_are_there():
    assert {"README", "local_steps", "echoing"} <= set(EXAMPLES)
    assert len(README.splitlines()) <= 180
    first = re.search(r"^\|.*\|$", README, re.M)[0]
    assert first.count("|") - 1 <= 5
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)|<img src=\"([^\"]+)\"", README)
    assert shown and all((ROOT / (a or b)).exists() for a, b in shown)
