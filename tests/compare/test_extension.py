"""What one addition of each kind touches, to a green CI: so many files, and no list of names.

Each is put into a copy of the tree, where the parts of CI run that could object.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.additions import ADDITIONS

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Their names, in those of tests and of the rows that tests go through.
NAMES = (
    "backwards",
    "alternating",
    "thirds",
    "late",
    "blobs",
    "cosine_classifier",
    "power",
    "plain_momentum",
    "forgetting",
)
# Tests of the whole tree; of others those that name an addition.
WHOLE = (
    "test_structure",
    "test_docs",
    "test_conventions",
    "test_words",
    "has_a_row",
    "has_them_all",
    "of_the_additions",
)
CALLS = """
import importlib

from tests.bad_values import outcomes


def test_bad_arguments_of_the_additions_are_refused_by_name():
    tried = set()
    for package in ("ordering", "input", "local_opt", "models"):
        calls = importlib.import_module(f"tests.bad_calls_{package}").CALLS
        new = {name: calls[name] for name in calls if name in FUNCTIONS}
        for run, valid, _ in new.values():
            run(**valid)
        wrong = [(text, result) for text, result in outcomes(new) if result.kind != "refused"]
        assert not wrong, wrong
        tried |= {*new}
    assert tried == FUNCTIONS, tried
"""


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


def test_the_tests_of_the_tree_and_those_that_go_through_rows_take_the_additions(copy):
    """And bad arguments of the additions are refused by name."""
    folder, _ = copy
    functions = set(NAMES) - {"blobs", "power"}
    (folder / "tests" / "test_calls.py").write_text(f"FUNCTIONS = {functions}\n{CALLS}")
    files = [
        "tests/test_calls.py",
        *(
            f"tests/project/test_{name}.py"
            for name in ("structure", "docs", "conventions", "words", "keys", "plans")
        ),
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
    chosen = f"({' or '.join((*WHOLE, *NAMES))}) and not pictures"
    options = ("-q", "-n", "0", "-p", "no:cacheprovider", "-k", chosen)
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


def test_a_study_of_the_additions_runs(copy, tmp_path):
    folder, _ = copy
    out = tmp_path / "out"
    call(
        folder,
        sys.executable,
        "-m",
        "experiments.to_and_fro",
        "--distance=3",
        "--total_steps=40",
        "--schedule=power",
        "--evaluations=2",
        "--seeds=2",
        f"--output_dir={out}",
    )
    results = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = next(r for r in reversed(results) if r["arm"] == "all")
    assert (last["step"], last["rounds"], last["loads"], last["epoch"]) == (40, 3, 30, 3.0)
    words = {name: last[name].split("+")[0] for name in ("order", "sync", "echo")}
    assert words == {"order": "backwards", "sync": "thirds", "echo": "late"}
    assert last["test/accuracy"] > 0.9 and 0 < last["losses/spread"] < 1
    assert len([r for r in results if r["ended"]]) == 4 * (2 + 2)
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["task"], settings["distance"]) == ("blobs", 3.0)
    assert "all that is new" in (out / "table.md").read_text()
    assert all((out / name).stat().st_size > 10_000 for name in ("comparison.png", "report.html"))
