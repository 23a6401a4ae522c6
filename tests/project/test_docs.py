"""The pages of docs/ hold what they say: examples run and train, links lead somewhere."""

import inspect
import pathlib
import re

import pytest

import local_opt
import models
import ordering

ROOT = pathlib.Path(__file__).parents[2]
LOOPS = (ROOT / "docs" / "your_own_loop.md").read_text()
ALL_THREE = "## All three in one loop"


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.S)


SHORT, LONG = map(blocks, LOOPS.split(ALL_THREE))
EXAMPLES = {re.search(r"import (\w+)", code)[1] + f"-{i}": code for i, code in enumerate(SHORT)}
EXAMPLES["all"], EXAMPLES["shards"] = LONG


def run(code, capsys):
    """The losses that an example prints: the lines of a step and a number."""
    if "equinox" in code:
        pytest.importorskip("equinox")
    exec(compile(code, "docs/your_own_loop.md", "exec"), {})
    printed = capsys.readouterr().out
    return [float(loss) for loss in re.findall(r"^\d+ ([\d.e+-]+)$", printed, re.M)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_a_loop_runs_and_the_loss_that_it_prints_falls(name, capsys):
    code = EXAMPLES[name]
    losses = run(code, capsys)
    if "print(" in code and "loss" in code:
        assert len(losses) > 2
        assert losses[-1] < 0.75 * losses[0]


@pytest.mark.slow
def test_pair_balance_takes_the_place_of_coordinated_orders_by_name(capsys):
    code = LONG[0].replace("cd_grab", "pair_balance").replace(', gathers="sync"', "")
    assert "gathers" not in code
    losses = run(code, capsys)
    assert losses[-1] < 0.75 * losses[0]


def test_every_public_name_is_used_in_the_page_of_names():
    """Its blocks are one program, which runs."""
    pytest.importorskip("tensorflow")
    pytest.importorskip("grain")
    page = (ROOT / "docs" / "reference" / "names.md").read_text()
    code = "\n".join(blocks(page))
    exec(compile(code, "docs/reference/names.md", "exec"), {})
    used = set(re.findall(r"\b(ordering|local_opt|echo|input)\.(\w+)", code))
    known = {
        (package.__name__.rpartition(".")[2], name)
        for package in (ordering, ordering.echo, ordering.input, local_opt)
        for name in package.__all__
    } - {("ordering", "echo"), ("ordering", "input")}
    assert used == known
    assert page.split("\n")[2].startswith(f"{len(known)} names"), len(known)


def test_examples_are_short():
    for limit, codes in ((20, SHORT), (35, LONG)):
        for code in codes:
            lines = [line for line in code.split("\n") if line.strip()]
            assert len(lines) <= limit, lines[0]
            assert max(map(len, lines)) <= 100, max(lines, key=len)


def test_no_example_needs_the_experiments():
    assert (len(SHORT), len(LONG)) == (12, 2)
    assert "experiments" not in "".join(SHORT + LONG)


PAGES = [ROOT / "experiments" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_linked_files_are_there(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not link.startswith(("http:", "https:")):
            assert (page.parent / link).exists(), link


def test_the_reference_has_every_public_name_once():
    """On the site mkdocstrings puts its signature and its docstring there."""
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    shown = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.M)]
    public = [
        f"{package.__name__}.{name}"
        for package in (ordering, ordering.echo, ordering.input, local_opt, models)
        for name in package.__all__
        if not inspect.ismodule(getattr(package, name))
    ]
    # A name that is a module's, too, is given with it: ordering.grab.grab.
    assert sorted(re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in shown) == sorted(public)
