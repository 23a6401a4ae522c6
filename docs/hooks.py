"""What the documentation site shows of files outside docs/: pages, downloads and docstrings.

In the repository a link from a page leads to the file; in the site, to its copy. A page of the
reference says in a comment of which modules it shows the public names.
"""

import functools
import html
import pathlib
import re
from collections.abc import Iterator

import griffe
from latex2mathml import converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = {"CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "contributing/changelog.md"}
FOLDERS = ("examples", "notebooks", "experiments/presets")
SHOWN = {".py", ".md", ".ipynb", ".flags", ".json", ".diff"}
RECORDED = "experiments/runs/*/command.txt", "benchmarks/rows/*.jsonl"


def copied() -> dict[str, str]:
    """{path in the repository: path in the site}."""
    inside = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHOWN
    } | {path.relative_to(ROOT).as_posix() for kind in RECORDED for path in ROOT.glob(kind)}
    return PAGES | {path: path for path in sorted(inside)}


def on_files(files, config):
    reference.cache_clear()  # for `mkdocs serve`
    for source, target in copied().items():
        file = File.generated(config, target, abs_src_path=str(ROOT / source))
        file.edit_uri = f"../{source}"
        files.append(file)
    return files


def on_page_markdown(markdown, page, config, files):
    """Leads links out of docs/ to the copies, and those of a copied page back into docs/."""
    places = {target: source for source, target in copied().items()}
    here = pathlib.PurePosixPath(places.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def moved(match):
        target = resolved(here.parent / match[2])
        site = copied().get(target, target.removeprefix("docs/"))
        depth = page.file.src_uri.count("/")
        return f"{match[1]}{'../' * depth}{site}{match[3]}"

    markdown = NAMES.sub(lambda _: listed(page.file.src_uri), markdown)
    return re.sub(r"(\]\()((?!\w+:|#)[^)#\s]+)((?:#[^)\s]*)?\))", moved, markdown)


def on_page_content(text, page, config, files):
    """Typesets formulas, opens pictures whole, and keeps a number and its interval on one line."""
    text = re.sub(r'<img [^>]*?src="([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', text)
    text = re.sub(r"<td>(?=[^<]{,24}</td>)(?=[^<]*±)", '<td style="white-space: nowrap">', text)
    return re.sub(
        r'<(span|div) class="arithmatex">\\[([](.*?)\\[)\]]</\1>', typeset, text, flags=re.S
    )


def typeset(formula: re.Match[str]) -> str:
    """MathML, which browsers show without a script or a font; a wide one scrolls, as tables do."""
    display = "block" if formula[1] == "div" else "inline"
    shown = converter.convert(html.unescape(formula[2]).strip(), display=display)
    return f'<div class="formula">{shown}</div>' if display == "block" else shown


def on_post_page(output, page, config):
    """Refuses a page with a formula that is not typeset, or a script from elsewhere."""
    text = re.sub(r"<(script|pre|code|style)\b.*?</\1>", "", output, flags=re.S)
    if "$" in text or "arithmatex" in text:
        raise PluginError(f"{page.file.src_uri} has a formula that is not typeset: close its $.")
    if re.search(r"<script[^>]+src=.?(https?:)?//", output):
        raise PluginError(f"{page.file.src_uri} loads a script from elsewhere: keep it beside us.")
    return output


def resolved(path: pathlib.PurePosixPath) -> str:
    """The path without its "..": both are of the repository."""
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


class Docstrings(griffe.Extension):
    """Docstrings as Markdown reads them; mkdocs.yml names this class."""

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = shown(obj.docstring.value)


SECTION = re.compile(r"^(?:Args|Attributes|Example|Fields|Raises|References|Returns):", re.M)
SIGNS = {  # of an equation, as help() shows it: as a page does
    r"\bx_bar\b": "x̄",
    r"\bsum(?=_)": "Σ",
    r"<-": "←",
    r"<=": "≤",
    r">=": "≥",
    r"_\{([^}]*)\}": r"<sub>\1</sub>",
    r"(?<=[\w)|])\^(\w+|\([^)]*\))": r"<sup>\1</sup>",
    r"\b(\w|Σ|max|eta|fresh|ready|order|loss|lr)_(\w+|\([^)]*\))": r"\1<sub>\2</sub>",
    r"\balpha\b": "α",
    r"\beta\b": "η",
    r"\bgamma\b": "γ",
    r"\bmu\b": "μ",
}


def equations(text: str) -> str:
    """With subscripts, powers and signs, except in code."""
    parts = re.split(r"(`[^`]*`|^ {4}.*$)", text, flags=re.M)
    for plain, sign in SIGNS.items():
        parts[::2] = [re.sub(plain, sign, part) for part in parts[::2]]
    return "".join(parts)


def shown(docstring: str) -> str:
    """With equations, links, brackets that are no tags, and no type before Returns' colons."""
    docstring = re.sub(r"<([^\s=<>-][^<>]{0,30}[^\s=<>-])>", r"⟨\1⟩", docstring)
    end = heading.start() if (heading := SECTION.search(docstring)) else len(docstring)
    docstring = equations(docstring[:end]) + docstring[end:]
    docstring = re.sub(r"^(Returns:\n +)", r"\1: ", docstring, flags=re.M)
    docstring = re.sub(r"\bdocs/(\w+/\w+)\.md", r"[\1](../\1.md)", docstring)
    return re.sub(r"https://[^\s,;)]+[^\s,;).]", r"<\g<0>>", docstring)


NAMES = re.compile(r"^<!-- names of (.+) -->$", re.M)


def public(package: griffe.Module) -> Iterator[griffe.Object | griffe.Alias]:
    """What the `__all__` of a package names, and of the modules that it names."""
    for name in package.exports:
        member = package[name]
        if not member.is_module:
            yield member
        elif member.exports is None:  # it hides the function that has its name: models.gpt2.gpt2
            yield member[name]
        else:
            yield from public(member)


@functools.cache
def reference() -> dict[str, dict[str, griffe.Object | griffe.Alias]]:
    """{page: {path: object}}: a name is on the page that has the nearest module around it."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.load_extensions(Docstrings))
    packages = [loader.load(name) for name in ("ordering", "local_opt", "models")]
    loader.resolve_aliases()
    pages = re.findall(r": reference/(?!names)(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    names, pages_of = {page: {} for page in pages}, {}
    for page in pages:
        text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
        pages_of |= dict.fromkeys(NAMES.search(text)[1].split(", "), page)
    for package in packages:
        for member in public(package):
            module = member.canonical_path
            while module not in pages_of:
                module = module.rpartition(".")[0]
            names[pages_of[module]][member.path] = member
    return names


def listed(uri: str) -> str:
    """The names of a page, which mkdocstrings shows, or a table of all names."""
    page = pathlib.PurePosixPath(uri).stem
    return index() if page == "names" else "\n\n".join(f"::: {path}" for path in reference()[page])


def index() -> str:
    """A linked table of the names of each page, with the first lines of their docstrings."""
    lines = []
    for page, objects in reference().items():
        lines += ["", f"| [{page.replace('_', ' ').capitalize()}]({page}.md) | |", "|---|---|"]
        for path, member in objects.items():
            first = member.docstring.value.partition("\n")[0]
            lines.append(f"| [`{path.rpartition('.')[2]}`][{path}] | {first} |")
    return "\n".join([*lines, ""])
