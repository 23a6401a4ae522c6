"""What pages say is there: names, links, files, tables, and the commands that CI runs."""

import importlib.util
import inspect
import pathlib
import pkgutil
import re
import types

import pytest
import yaml

from experiments.compare.rows import TABLES
from tests import commands
from tests.additions import ADDITIONS
from tests.installed import module_of
from tests.public import PACKAGES

ROOT = pathlib.Path(__file__).parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = [*ROOT.glob("*.md"), *ROOT.glob("e*/**/*.md"), *ROOT.glob("notebooks/*.md"), *SITE]


def test_linked_files_are_there():
    for page in WRITTEN:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            result = link.startswith(("http:", "https:")) or (page.parent / link).exists()
            assert result, (page, link)


def test_programs_for_users_import_from_syncopate():
    """The only name of ours that a file of a user's own will hardly hide."""
    results = {p: re.findall(r"```(?:python|diff)\n(.*?)```", p.read_text(), re.S) for p in WRITTEN}
    scripts = (p for top in ("examples", "notebooks") for p in (ROOT / top).rglob("*.*"))
    results |= {p: [p.read_text()] for p in scripts if p.suffix in (".py", ".diff", ".ipynb")}
    other = r'^[ +"]*(import (.*[ ,])?(ordering|local_opt)\b|from (ordering\b|local_opt import))'
    for path, programs in results.items():
        assert not [p for p in programs if re.search(other, p, re.M)], path


def test_pages_name_what_there_is():
    """Finished research names what its commit had."""
    for page in (page for page in WRITTEN if page.parent.name != "results"):
        for name in re.findall(r"(?<![\w./])((?:ordering|local_opt)(?:\.\w+)+)", page.read_text()):
            if not name.endswith((".md", ".py")):
                assert pkgutil.resolve_name(name), page


def test_lists_are_lists_and_no_line_has_runs_of_spaces():
    """A tool that wraps lines folds the items of a list into one paragraph."""
    for page in WRITTEN:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
        assert not re.search(r"^[^|\n]+\n\|", text, re.M), "a table begins after an empty line"
        for line in text.splitlines():
            if not line.startswith(("|", "    ")):
                assert not re.search(r"\S {3,}\S|[.;:)] [2-9]\. [A-Z`]", line), (page, line)
        assert not re.search(r"^[^\n]*[^.:\n]\n0\. ", text, re.M), f"{page}: 0. begins a list"


@pytest.fixture(scope="module")
def hooks():
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    return module_of(ROOT / "docs" / "hooks.py")


def test_pictures_stand_on_a_page_with_the_command_that_draws_them(tmp_path):
    pictures, folder = module_of(ROOT / "docs" / "pictures.py"), ROOT / "docs" / "results"
    pages = "".join(page.read_text() for page in folder.glob("*.md"))
    assert {path.name for path in folder.glob("*.png")} == {*re.findall(r"\((\w+\.png)\)", pages)}
    commands = re.findall(r"(?<=\]\()(\w+\.png)\) `python -m docs\.pictures \1`", pages)
    assert {*commands} == {*pictures.PICTURES}
    function, *arguments = pictures.PICTURES["outer_muon.png"]
    function(str(tmp_path / "drawn.png"), *arguments)
    assert (tmp_path / "drawn.png").stat().st_size > 20_000


def _flags(module):
    """What a command may be called with: the flags of an experiment, the text of a benchmark."""
    if module.startswith("experiments"):
        return {*commands.flags_of(importlib.import_module(module)), "flagfile"}
    return (ROOT / f"{module.replace('.', '/')}.py").read_text()


def test_commands_on_pages_exist_or_say_in_their_line_at_which_commit_they_ran():
    folders = ("docs", "experiments", "examples", "benchmarks")
    pages = [
        *ROOT.glob("*.md"),
        *(page for name in folders for page in ROOT.glob(f"{name}/**/*.md")),
    ]
    pattern = r"python -m ((?:experiments|benchmarks)\.[a-z_]+)\b((?: [^`#\s]+)*)"
    printed = [
        (page.name, *each)
        for page in pages
        for line in page.read_text().split("\n")
        if "at commit" not in line
        for each in re.findall(pattern, line)
    ]
    assert printed
    lost = [each for each in printed if importlib.util.find_spec(each[1]) is None]
    for page, module, arguments in (each for each in printed if each not in lost):
        flags = _flags(module)
        for name, value in re.findall(r"--(?:no)?(\w+)(?:=(\w+))?", arguments.split(" -- ")[0]):
            lost += [(page, module, name)] * (name not in flags)
            lost += [(page, module, value)] * (name == "part" and value not in flags)
    assert not lost


def test_the_site_shows_docstrings_whole(hooks):
    """No part of an equation is a tag, and what is returned is one item with the annotated type."""
    plugins = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["plugins"]
    (plugin,) = (p["mkdocstrings"] for p in plugins if "mkdocstrings" in p)
    options = plugin["handlers"]["python"]["options"]["docstring_options"]
    shown = [each for objects in hooks.reference().values() for each in objects.values()]
    members = [m for each in shown if each.is_class for m in each.members.values()]
    shown += [m for m in members if m.docstring and not m.name.startswith("_")]
    code, powers, returned = r"`[^`]*`|^ *(>>>|\.\.\.).*|<https:\S+>", 0, 0
    for each in shown:
        text = re.sub(code, "", each.docstring.value, flags=re.M)
        assert not re.search(r"<(?!/?su[bp]>)[A-Za-z/!?]", text), each.path
        powers += text.count("</sup>")
        for section in each.docstring.parse("google", warnings=False, **options):
            if section.kind.value == "returns":
                (item,) = section.value
                assert str(item.annotation) == str(each.returns), each.path
                returned += 1
    assert returned > 60 and powers > 10


def test_the_reference_shows_every_public_name_on_one_page_and_in_its_index(hooks):
    """On the site mkdocstrings puts its signature and its docstring there."""
    public = [
        f"{package.__name__}.{name}"
        for package in PACKAGES
        for name in package.__all__
        if not inspect.ismodule(getattr(package, name))
    ]
    shown = []
    for name, objects in hooks.reference().items():
        page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri=f"reference/{name}.md"))
        text = (ROOT / "docs" / "reference" / f"{name}.md").read_text()
        text = hooks.on_page_markdown(text, page, None, None)
        assert re.findall(r"^::: (\S+)$", text, re.M) == [*objects] != []
        shown += objects
    # A name that is a module's, too, is given with it: models.gpt2.gpt2.
    assert sorted(re.sub(r"\.(\w+)\.\1$", r".\1", name) for name in shown) == sorted(public)
    rows = re.findall(r"^\| \[`(\w+)`\]\[(\S+)\] \| \S.*\S \|$", hooks.index(), re.M)
    assert [(path.rpartition(".")[2], path) for path in shown] == rows


def test_formulas_are_typeset_in_the_page_itself(hooks):
    """As MathML; a build that leaves one, or loads a script from elsewhere, ends."""
    formula = r'<{0} class="arithmatex">\{1}\frac{{a_1}}{{b}} &lt; \sqrt{{x^2}}\{2}</{0}>'
    both = formula.format("span", "(", ")") + formula.format("div", "[", "]")
    text = hooks.on_page_content(both, None, None, None)
    assert text.count("<math") == text.count("<msqrt>") == text.count("<mfrac>") == 2
    assert "arithmatex" not in text and text.count('display="block"') == 1
    page = types.SimpleNamespace(file=types.SimpleNamespace(src_uri="use/x.md"))
    assert hooks.on_post_page(text + "<code>$x$</code>", page, None).startswith(text)
    for wrong in ("$x$", both, "<script src=https://elsewhere.org/x.js></script>"):
        with pytest.raises(Exception, match="use/x.md (has a formula|loads a script)"):
            hooks.on_post_page(text + wrong, page, None)


def test_formulas_are_written_as_such():
    for path in (path for top in ("use", "results") for path in (ROOT / "docs" / top).glob("*.md")):
        text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(), flags=re.M | re.S)
        raw = re.sub(r"^    .*|\$\$.+?\$\$|\$[^$\n]+\$", "", text, flags=re.M | re.S)
        assert not re.search(r"\w\^[\w({]|\bsqrt\b|<<|>>", raw), path.stem


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_recipes_name_the_files_that_additions_touch():
    recipes = dict(re.findall(r"^\| ([a-z ]+) \| (.*) \|$", CONTRIBUTING, re.M))
    for kind, addition in ADDITIONS.items():
        yours = (re.sub(r"\w+\.py$", "yours.py", path) for path in addition.new)
        for path in (*yours, *(path for path, *_ in addition.changes)):
            assert f"`{path}`" in recipes[kind], (kind, path)
    paths = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", CONTRIBUTING)
    for path in paths:
        assert (ROOT / path).exists() or path.endswith("yours.py") or path == "build/site", path
    rows = re.findall(r"(?:row of )?`([A-Z_]+)` in\s`([\w/.]+)`", CONTRIBUTING)
    assert len(rows) > 5
    for name, path in rows:
        assert re.search(rf"^{name}\b.* = ", (ROOT / path).read_text(), re.M), (name, path)
    assert {*re.findall(r"experiments\.train --(\w+)=yours", CONTRIBUTING)} == {*TABLES, "task"}


def test_the_study_of_the_recipe_has_arms_and_a_criterion():
    (code,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.S)
    names = {}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    study = names["STUDY"]
    assert list(study.arms) == list(names["RULES"])
    assert study.criterion.scalar == "valid/accuracy" and study.recipe == "digits_mlp"
