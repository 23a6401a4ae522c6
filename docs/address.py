"""Writes the address of docs/address.ini wherever it is needed, and takes it away if there is none.

    python -m docs.address                   # after a change of docs/address.ini
    python -m docs.address --package FOLDER  # the README of an export from which a package is built

These are the links of setup.cfg, CITATION.cff and mkdocs.yml, the badges of the README, and the
install lines and badges of the notebooks. On the package index a README is alone: there its links
and pictures lead to the repository at the tag of this version.
"""

import argparse
import configparser
import json
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import syncopate

ROOT = pathlib.Path(__file__).resolve().parents[1]
COLAB = "https://colab.research.google.com"
INDEX = f"https://pypi.org/project/{syncopate.DISTRIBUTION}/"
SHIELDS = "https://img.shields.io"
REPOSITORY = re.compile(r"https://github\.com/(?P<owner>[\w.-]+)/(?P<name>[\w.-]+?)(?:\.git)?/?")
PICTURE = re.compile(r"\.(?:png|svg|gif|jpe?g)$")
TARGET = re.compile(r'(\]\(|<img [^>]*?src=")(?![a-z]+:|#)([^)"\s]+)')  # neither URL nor anchor


class Address(NamedTuple):
    """Where the project is.

    Fields:
      place: OWNER/NAME on GitHub.
      site: the URL of the documentation.
    """

    place: str
    site: str

    @property
    def url(self) -> str:
        return f"https://github.com/{self.place}"


def read(root: pathlib.Path) -> Address | None:
    """The address that docs/address.ini has, if any.

    Raises:
      ValueError: for a repository that Colab and the badges cannot name.
    """
    config = configparser.ConfigParser()
    config.read(root / "docs" / "address.ini")
    repository, site = (config["address"][name].strip() for name in ("repository", "site"))
    if not repository:
        return None
    if not (match := REPOSITORY.fullmatch(repository)):
        raise ValueError(
            f"repository is {repository!r} in docs/address.ini, which is no "
            "https://github.com/OWNER/NAME: write one, or nothing."
        )
    owner, name = match["owner"], match["name"]
    return Address(f"{owner}/{name}", site or f"https://{owner.lower()}.github.io/{name}/")


def put(text: str, new: str, *, old: str, after: str) -> str:
    """The text without what `old` matches, with `new` behind what `after` matches, once.

    Raises:
      ValueError: if there is no such place.
    """
    text, places = re.subn(
        f"(?m)({after})", lambda match: match[1] + new, re.sub(f"(?m){old}", "", text), count=1
    )
    if not places:
        raise ValueError(f"there is no place for an address, which goes behind {after!r}.")
    return text


def in_setup(text: str, address: Address | None) -> str:
    """setup.cfg with `project_urls`, which the package index shows."""
    new = address and (
        "project_urls =\n"
        f"    Documentation = {address.site}\n"
        f"    Source = {address.url}\n"
        f"    Issues = {address.url}/issues\n"
        f"    Changelog = {address.url}/blob/main/CHANGELOG.md\n"
    )
    old, after = r"^project_urls =\n(?: +.*\n)*", r"^long_description_content_type = .*\n"
    return put(text, new or "", old=old, after=after)


def in_citation(text: str, address: Address | None) -> str:
    new = address and f"repository-code: {address.url}\nurl: {address.site}\n"
    return put(text, new or "", old=r"^(?:repository-code|url): .*\n", after=r"^type: .*\n")


def in_site(text: str, address: Address | None) -> str:
    """mkdocs.yml with the site's address and a link to each page's file."""
    new = address and (
        f"site_url: {address.site}\nrepo_url: {address.url}\nedit_uri: edit/main/docs/\n"
    )
    old, after = r"^(?:site_url|repo_url|edit_uri): .*\n", r"^site_description: .*\n"
    return put(text, new or "", old=old, after=after)


def in_readme(text: str, address: Address | None) -> str:
    """The README with badges: CI, package, Python, documentation, licence."""
    new = address and (
        f"[![CI]({address.url}/actions/workflows/ci.yml/badge.svg)]"
        f"({address.url}/actions/workflows/ci.yml)\n"
        f"[![Package]({SHIELDS}/pypi/v/{syncopate.DISTRIBUTION})]({INDEX})\n"
        f"[![Python]({SHIELDS}/pypi/pyversions/{syncopate.DISTRIBUTION})]({INDEX})\n"
        f"[![Documentation]({SHIELDS}/badge/documentation-online-blue)]({address.site})\n"
        f"[![Licence]({SHIELDS}/badge/licence-Apache--2.0-blue)](LICENSE)\n\n"
    )
    return put(text, new or "", old=r"^(?:\[!\[.*\n)+\n", after=r"\A# .*\n\n")


def in_notebook(text: str, address: Address | None, name: str) -> str:
    """A notebook with a badge that opens it, and a first cell that installs from the repository."""
    notebook = json.loads(text)
    title, code = notebook["cells"][:2]
    rest = "".join(line for line in title["source"][1:] if COLAB not in line).lstrip("\n")
    badge = address and (
        f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]"
        f"({COLAB}/github/{address.place}/blob/main/notebooks/{name})"
    )
    parts = [title["source"][0].strip(), badge, rest]
    title["source"] = "\n\n".join(filter(None, parts)).splitlines(keepends=True)
    source = f"git+{address.url}" if address else ""
    code["source"] = [
        re.sub(r'^(REPOSITORY = )"[^"]*"', rf'\1"{source}"', line) for line in code["source"]
    ]
    return json.dumps(notebook, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


CLONE = (  # what is typed in a clone, and without one; tests need a clone
    (r"pip install -e \.` in a clone", f"pip install {syncopate.DISTRIBUTION}`"),
    (r'pip install -e "\.(\[\w+\])"(?! && pytest)', rf'pip install "{syncopate.DISTRIBUTION}\1"'),
)
WRITERS: dict[str, Callable[[str, Address | None], str]] = {
    "setup.cfg": in_setup,
    "CITATION.cff": in_citation,
    "mkdocs.yml": in_site,
    "README.md": in_readme,
}


def write(root: pathlib.Path) -> None:
    """Writes the address of `root` into its files, or takes it away."""
    address = read(root)
    for name, writer in WRITERS.items():
        path = root / name
        path.write_text(writer(path.read_text(), address))
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        path.write_text(in_notebook(path.read_text(), address, path.name))


def of_package(text: str, address: Address | None, version: str) -> str:
    """A README whose relative links and pictures are absolute; without an address they are gone.

    Of a link its text stays. What is installed is the package, and programs stay as they are.
    """

    def absolute(match: re.Match[str]) -> str:
        raw = PICTURE.search(match[2])
        start = f"https://raw.githubusercontent.com/{address.place}" if raw else address.url
        return f"{match[1]}{start}{'' if raw else '/blob'}/v{version}/{match[2]}"

    for typed, other in CLONE:
        text = re.sub(typed, other, text)
    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    for i, part in enumerate(parts[::2]):
        if address:
            parts[2 * i] = TARGET.sub(absolute, part)
        else:
            part = re.sub(r"(?m)^(?:!\[|<img )[^\n]*\n\n?", "", part)
            parts[2 * i] = re.sub(r"\[([^\]]+)\]\((?![a-z]+:|#)[^)\s]+\)", r"\1", part)
    return "".join(parts)


def write_package(folder: pathlib.Path, root: pathlib.Path = ROOT) -> None:
    """Makes the README of `folder` that of a package."""
    path = folder / "README.md"
    path.write_text(of_package(path.read_text(), read(root), syncopate.__version__))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--package", type=pathlib.Path, metavar="FOLDER", help="of an export")
    if folder := parser.parse_args().package:
        write_package(folder)
    else:
        write(ROOT)
