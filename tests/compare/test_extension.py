"""What one addition of each kind touches, to a green CI: so many files, and no list of names.

Each is put into a copy of the tree, where the tests run that go through rows and names. All tests,
the site and the types: `pytest -m slow -n 0 tests/compare/test_extension.py`, minutes.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.additions import ADDITIONS
from tests.compare.in_copy import FUNCTIONS

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Tests that go through rows or names: those of the additions, and those that count all.
CHOSEN = (*FUNCTIONS, "blobs", "power", "has_a_row", "has_them_all", "of_the_additions")


def call(folder, *command, **environment):
    """What a command prints in the copy, which ends well."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XLA_FLAGS")}
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
        env=inherited | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"} | environment,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def add(folder, addition):
    """The files that an addition touches."""
    for path, text in addition.new.items():
        assert not (folder / path).exists(), path
        (folder / path).write_text(text)
    for path, old, new in addition.changes:
        text = (folder / path).read_text()
        assert text.count(old) == 1, (path, old)
        (folder / path).write_text(text.replace(old, new))
    return {*addition.new, *(path for path, *_ in addition.changes)}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tree with all additions, and the files that each has touched."""
    folder = tmp_path_factory.mktemp("copy")
    listed = call(ROOT, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    touched = {kind: add(folder, addition) for kind, addition in ADDITIONS.items()}
    call(folder, "git", "init", "-q")
    call(folder, "git", "add", "-A")
    return folder, touched


def test_an_addition_touches_few_files(copy):
    _, touched = copy
    few = {kind: len(files) for kind, files in touched.items()}
    print(few)
    most = {kind: addition.most for kind, addition in ADDITIONS.items()}
    assert all(few[kind] <= most[kind] for kind in most), (few, most)


def test_the_tests_that_go_through_rows_take_the_additions(copy):
    """Bad arguments of the additions are refused by name, and a study of all of them runs."""
    folder, _ = copy
    files = [
        "tests/compare/in_copy.py",
        "tests/project/test_use.py::test_the_page_of_commands_has_them_all",
        "tests/ordering/test_orders.py",
        "tests/ordering/test_echo_plans.py",
        "tests/local_opt/test_plans.py",
        "tests/data/test_abstract.py",
        "tests/data/test_optimizers.py",
        "tests/compare/test_arms.py",
        "ordering/backwards.py",
        "ordering/baselines/rules.py",
        "ordering/echo/plans.py",
        "local_opt/rules.py",
        "local_opt/presets.py",
        "local_opt/formats.py",
        "models/angles.py",
    ]
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-k", " or ".join(CHOSEN))
    text = call(folder, sys.executable, "-m", "pytest", *options, *files)
    assert " passed" in text


def test_the_linter_and_the_formatter_take_the_additions(copy):
    folder, touched = copy
    ruff = shutil.which(
        "ruff", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    )
    if ruff is None:
        pytest.skip("no ruff")
    files = {path for paths in touched.values() for path in paths if path.endswith(".py")}
    call(folder, ruff, "check", *files)
    call(folder, ruff, "format", "--check", *files)


@pytest.mark.slow
def test_the_site_and_the_types_take_the_additions(copy):
    folder, _ = copy
    call(folder, sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder / "site")
    call(folder, sys.executable, "-m", "pyright")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["project", "ordering", "local_opt", "models", "data", "compare"])
def test_all_tests_take_the_additions(copy, part):
    folder, _ = copy
    options = ("-q", "-p", "no:cacheprovider", "--deselect", "tests/compare/test_extension.py")
    call(folder, sys.executable, "-m", "pytest", *options, f"tests/{part}")
