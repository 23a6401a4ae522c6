"""The program of the README runs, and prints what stands there."""

import pathlib
import re

import syncopate

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_first_program_is_short_and_prints_what_the_readme_says(capsys):
    lines = [line for line in PROGRAM.split("\n") if line.strip()]
    assert len(lines) <= 23 and max(map(len, lines)) <= 100
    exec(compile(PROGRAM, "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed == re.findall(r"`(\S+ above the lowest loss)`", README) and len(printed) == 2


def test_the_readme_is_read_in_a_minute():
    assert len(README.splitlines()) <= 100
    before = re.sub(r"```.*?```", "", README.partition("## Is it for me?")[0], flags=re.S)
    assert before != README and len(before.split()) <= 250
    assert re.search(r"^\|.*\|$", README, re.M)[0].count("|") - 1 <= 5
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)|<img src=\"([^\"]+)\"", README)
    assert shown and all((ROOT / (a or b)).exists() for a, b in shown)


def test_the_readme_names_what_there_is():
    (changes,) = re.findall(r"```diff\n(.*?)```", README, re.S)
    named = re.findall(r"\b((?:ordering|local_opt)(?:\.\w+)+)", changes)
    assert len(named) >= 7
    for name in named:
        found = syncopate
        for part in name.split("."):
            found = getattr(found, part)
