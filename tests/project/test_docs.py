"""The pages of docs/ hold what they say: names are used, links lead somewhere."""

import inspect
import pathlib
import re

import pytest

import local_opt
import models
import ordering

ROOT = pathlib.Path(__file__).parents[2]


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.S)


def test_every_public_name_is_used_in_the_page_of_names():
    """Its blocks are one program, which runs."""
    pytest.importorskip("tensorflow")
    pytest.importorskip("grain")
    page = (ROOT / "docs" / "reference" / "names.md").read_text()
    code = "\n".join(blocks(page))
    exec(compile(code, "docs/reference/names.md", "exec"), {})
    used = set(re.findall(r"\b(ordering|local_opt|blocks|echo|input)\.(\w+)", code))
    known = {
        (package.__name__.rpartition(".")[2], name)
        for package in (ordering, ordering.blocks, ordering.echo, ordering.input, local_opt)
        for name in package.__all__
    } - {("ordering", "blocks"), ("ordering", "echo"), ("ordering", "input")}
    assert used == known
    assert page.split("\n")[2].startswith(f"{len(known)} names"), len(known)


PAGES = [ROOT / "experiments" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_linked_files_are_there(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        if not link.startswith(("http:", "https:")):
            assert (page.parent / link).exists(), link


WRITTEN = [*ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md"), *PAGES]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_are_lists_and_no_line_has_runs_of_spaces(page):
    """A tool that wraps lines folds the items of a list into one paragraph."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    "))]
    for line in prose:
        assert not re.search(r"\S {3,}\S", line), line
        assert not re.search(r"[.;:)] [2-9]\. [A-Z`]", line), line


def test_the_reference_has_every_public_name_once():
    """On the site mkdocstrings puts its signature and its docstring there."""
    pages = [path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
    shown = [name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.M)]
    public = [
        f"{package.__name__}.{name}"
        for package in (ordering, ordering.blocks, ordering.echo, ordering.input, local_opt, models)
        for name in package.__all__
        if not inspect.ismodule(getattr(package, name))
    ]
    # A name that is a module's, too, is given with it: ordering.grab.grab.
    assert sorted(re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in shown) == sorted(public)
