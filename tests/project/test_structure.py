"""What docs/contributing/structure.md says of the code: sizes, layers and the way of imports."""

import ast
import functools
import graphlib
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
# From the ground up: a folder imports from those of lower rows alone.
LAYERS = (
    ("syncopate",),
    ("ordering", "local_opt", "models"),
    ("experiments/data", "experiments/distributed"),
    ("experiments/shared",),
    ("experiments/report", "experiments/trainer"),
    ("experiments/compare",),
    ("experiments",),
    ("benchmarks",),
)
# Files of experiments/ that are no commands: one room.
SHARED = ("entry", "files", "fingerprints", "lock", "progress")
LEVEL = {folder: i for i, row in enumerate(LAYERS) for folder in row}
PACKAGES = [folder for folder in LEVEL if "/" not in folder]
LONGEST_FUNCTION = 60


def files(*tops):
    return sorted(path for top in tops for path in (ROOT / top).rglob("*.py"))


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def room(name: str) -> str:
    """The folder of LAYERS in which a file or a module with slashes lies, or its first name."""
    inside = "/".join(name.removesuffix(".py").split("/")[:2])
    if inside in {f"experiments/{module}" for module in SHARED}:
        return "experiments/shared"
    return inside if inside in LEVEL else name.split("/")[0]


def imported(path):
    """The modules that a file imports, anywhere in it, with slashes."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.replace(".", "/") for name in names)


def test_imports_go_down():
    wrong = []
    for path in files(*PACKAGES):
        name = str(path.relative_to(ROOT))
        for module in imported(path):
            here, other = room(name), room(module)
            if other != here and LEVEL.get(other, -1) >= LEVEL[here]:
                wrong.append(f"{name} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_no_two_files_import_each_other():
    """By any way, and also where a function imports; packages' own `__init__` aside."""
    names = {str(path.relative_to(ROOT)).removesuffix(".py"): path for path in files(*PACKAGES)}
    names = {name.removesuffix("/__init__"): path for name, path in names.items()}
    graph = {}
    for name, path in names.items():
        modules = {m if m in names else m.rpartition("/")[0] for m in imported(path)}
        graph[name] = {m for m in modules if m in names and not f"{name}/".startswith(f"{m}/")}
    graphlib.TopologicalSorter(graph).prepare()  # CycleError names the files


def test_one_file_imports_what_jax_does_not_promise_to_keep():
    unstable = re.compile("jax/(experimental|_src)")
    results = {
        str(path.relative_to(ROOT))
        for path in files(*PACKAGES, "tests", "examples")
        for module in imported(path)
        if unstable.match(module)
    }
    assert results == {"syncopate/unstable.py"}


def lines_of(function) -> int:
    """The lines of a function, without its docstring and the functions inside it."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    inner = [n for n in ast.walk(function) if isinstance(n, kinds) and n is not function]
    gone = {line for n in inner for line in range(n.lineno, n.end_lineno + 1)}
    if ast.get_docstring(function):
        text = function.body[0]
        gone |= set(range(text.lineno, text.end_lineno + 1))
    return len(set(range(function.lineno, function.end_lineno + 1)) - gone)


def test_functions_are_small():
    long = []
    for path in files(*PACKAGES):
        name = path.relative_to(ROOT)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and lines_of(node) > LONGEST_FUNCTION:
                long.append(f"{name}:{node.lineno} {node.name}: {lines_of(node)} lines")
    assert not long, "\n".join(long)


def test_the_page_says_where_changes_go():
    page = (ROOT / "docs" / "contributing" / "structure.md").read_text()
    assert len(page.splitlines()) <= 90
    rows = re.findall(r"^\| (?:add|change|make|keep|read|do) .*\? \| .*`[\w/]+\.py`", page, re.M)
    assert rows, "questions of a stranger, each with its file"
    for file in re.findall(r"`((?:experiments|ordering|local_opt)/[\w/]+\.py)`", page):
        assert (ROOT / file).is_file(), file
