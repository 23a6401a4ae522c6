"""CONTRIBUTING.md names files, tables and commands that exist, and its study is one."""

import pathlib
import re

import pytest

from experiments.study import tables

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = ("an order", "a synchronisation rule", "an echo policy", "a task", "a study")


def test_every_recipe_is_there_on_a_short_page():
    assert re.findall(r"^## Add (.*)$", PAGE, re.M) == list(RECIPES)
    assert len(PAGE.splitlines()) <= 120


def test_files_and_tables_of_the_recipes_exist():
    paths = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", PAGE)
    assert len(paths) > 12
    for path in paths:
        assert (ROOT / path).exists() or path.endswith("yours.py") or path == "build/site", path
    rows = re.findall(r"row (?:to|of) `(\w+)` in\s`([\w/.]+)`", PAGE)
    assert len(rows) == 9
    for name, path in rows:
        assert re.search(rf"^{name} = ", (ROOT / path).read_text(), re.M), (name, path)


def test_flags_of_the_recipes_take_a_row_of_the_tables():
    for flag in re.findall(r"experiments\.train --(\w+)=yours", PAGE):
        assert flag in tables.TABLES
    for name in re.findall(r"`experiments\.(\w+)", PAGE):
        assert (ROOT / "experiments" / f"{name}.py").is_file(), name


@pytest.mark.parametrize("check", ["pytest", "ruff check .", "pyright", "mkdocs build --strict"])
def test_ci_runs_every_check(check):
    run = (ROOT / ".ci" / "run").read_text()
    assert check in PAGE and re.search(rf"^ *{re.escape(check)}$", run, re.MULTILINE)


def test_the_study_has_arms_a_recipe_and_a_criterion():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    study = names["STUDY"]
    assert list(study.arms) == list(names["RULES"])
    assert study.criterion.scalar == "valid/accuracy" and study.recipe == "digits_mlp"


def test_the_workflow_runs_the_checks_on_every_python_and_the_oldest_jax_of_the_metadata():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    setup = (ROOT / "setup.cfg").read_text()
    for command in ("pre-commit run --all-files", "mkdocs build --strict", "pytest"):
        assert f"- run: {command}\n" in workflow
    known = re.findall(r"Python :: (3\.\d+)$", setup, re.M)
    assert re.search(r"python: (\[.*\])", workflow)[1] == str(known).replace("'", '"')
    oldest = re.search(r"jax: jax==(\d+\.\d+)\.0", workflow)[1]
    assert f"jax>={oldest}\n" in setup and f"python_requires = >={known[0]}\n" in setup
