"""Writes the project's address where it is needed: setup.cfg, and every notebook.

    python notebooks/address.py https://github.com/OWNER/NAME

Each notebook then opens on Colab by one click on the badge at its top, and installs the project
from there. `url` in setup.cfg is the one constant; the notebooks follow it.
"""

import configparser
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
COLAB = "https://colab.research.google.com/github/{place}/blob/main/notebooks/{name}"
ADDRESS = re.compile(r"https://github\.com/([\w.-]+/[\w.-]+?)(?:\.git)?/?")


def address_of(root: pathlib.Path) -> str | None:
    """`url` of setup.cfg, if there is one."""
    config = configparser.ConfigParser()
    config.read(root / "setup.cfg")
    return config["metadata"].get("url")


def write(root: pathlib.Path, url: str) -> None:
    """Makes `url` the address of the project in `root`.

    Raises:
      ValueError: for an address that Colab cannot open.
    """
    if not (match := ADDRESS.fullmatch(url)):
        raise ValueError(
            f"{url!r} is no https://github.com/OWNER/NAME, which Colab opens: pass one."
        )
    setup, url = root / "setup.cfg", f"https://github.com/{match[1]}"
    text = re.sub(r"^url = .*\n", "", setup.read_text(), flags=re.M)
    setup.write_text(re.sub(r"^(version = .*\n)", rf"\1url = {url}\n", text, flags=re.M))
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        title, code = notebook["cells"][:2]
        title["source"] = with_badge(title["source"], match[1], path.name)
        code["source"] = [
            re.sub(r'^(REPOSITORY = )"[^"]*"', rf'\1"git+{url}"', line) for line in code["source"]
        ]
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def with_badge(lines: list[str], place: str, name: str) -> list[str]:
    """The text of a notebook's first cell, whose first line is its title."""
    badge = f"[![Open in Colab]({BADGE})]({COLAB.format(place=place, name=name)})\n"
    rest = [line for line in lines[1:] if BADGE not in line]
    while rest and not rest[0].strip():
        rest = rest[1:]
    return [lines[0].rstrip("\n") + "\n", "\n", badge, *(["\n", *rest] if rest else [])]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(ROOT, sys.argv[1])
