"""What the documentation site shows of files outside docs/: they are pages and downloads of it too.

In the repository a link from a page leads to the file; in the site, to its copy.
"""

import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = {"CONTRIBUTING.md": "contributing/index.md", "CHANGELOG.md": "contributing/changelog.md"}
FOLDERS = ("examples", "notebooks", "experiments/presets")
SHOWN = {".py", ".md", ".ipynb", ".flags", ".json", ".diff"}


def copied() -> dict[str, str]:
    """{path in the repository: path in the site}."""
    inside = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHOWN
    }
    return PAGES | {path: path for path in sorted(inside)}


def on_files(files, config):
    for source, target in copied().items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Leads links out of docs/ to the copies, and those of a copied page back into docs/."""
    places = {target: source for source, target in copied().items()}
    here = pathlib.PurePosixPath(places.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def moved(found):
        target = resolved(here.parent / found[2])
        site = copied().get(target, target.removeprefix("docs/"))
        depth = page.file.src_uri.count("/")
        return f"{found[1]}{'../' * depth}{site}{found[3]}"

    return re.sub(r"(\]\()((?!\w+:|#)[^)#\s]+)((?:#[^)\s]*)?\))", moved, markdown)


def on_page_content(html, page, config, files):
    """Keeps a number and its interval on one line of a table."""
    return re.sub(r"<td>(?=[^<]{,24}</td>)(?=[^<]*±)", '<td style="white-space: nowrap">', html)


def resolved(path: pathlib.PurePosixPath) -> str:
    """The path without its "..": both are of the repository."""
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)
