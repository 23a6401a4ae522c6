"""A folder's tables and pictures as one HTML file that opens in any browser, pictures inside.

Nothing is loaded from elsewhere and no script runs: the file can be mailed, archived and printed.
Markdown becomes HTML by markdown-it, which escapes whatever else is in it.
"""

import base64
import html
import json
import os
import pathlib
import re
import shlex
import struct
import sys
import textwrap
import urllib.parse

from experiments.cluster import files

NAME, PNG = "report.html", b"\x89PNG\r\n\x1a\n"
NUMBER = re.compile(r"[-+−±×*]*\s?[\d.]*\d|[-+−]?(inf|nan|∞)\b")
INTERVALS = (
    "± is the half width of the 95 % interval over seeds (Student's t); “2 of 5” counts the seeds "
    "that arrive at all."
)
SCROLL = '<div class="scroll" role="region" tabindex="0" aria-label="Table">'
STYLE = pathlib.Path(__file__).with_name("style.css")
# The browser itself refuses whatever is not in the file.
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
</main>
</body>
</html>
"""


def of_folder(folder: str, *, title: str, command: str | None = None) -> str:
    """Writes report.html from what a study has left in its output folder, and gives its path.

    Args:
      folder: with table*.md, *.png or both; settings.json and versions.json where they are.
      title: plain text; command: what makes the comparison.

    Raises:
      ValueError: if the folder has neither tables nor pictures.
    """
    tables, pictures = _named(folder, "table*.md"), _named(folder, "*.png")
    if not tables and not pictures:
        raise ValueError(
            f"{folder!r} has neither table*.md nor *.png: give the --output_dir of an experiment "
            "that has ended."
        )
    parts = ["## Pictures"] if pictures else []
    for name in pictures:
        parts.append(f"![Chart; the tables hold its numbers]({urllib.parse.quote(name)})\n\n{name}")
    parts += ["## Tables", INTERVALS] if tables else []
    for name in tables:
        parts += [f"### {name}"] if len(tables) > 1 else []
        parts.append(pathlib.Path(folder, name).read_text(encoding="utf-8"))
    if settings := files.read_json(os.path.join(folder, "settings.json")):
        lines = [f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in settings.items()]
        parts += ["## Settings", _code("\n".join(lines))]
    if command:
        parts += ["## Command", _code(command)]
    if versions := files.read_json(os.path.join(folder, "versions.json")):
        found = ", ".join(f"{k} {v}" for k, v in versions.items() if v is not None)
        parts.append(f"Made with {found}.")
    path = os.path.join(folder, NAME)
    files.write_whole(path, page("\n\n".join(parts), title=title, folder=folder))
    return path


def page(markdown: str, *, title: str, folder: str) -> str:
    """Markdown as a whole HTML page; pictures are PNG files of the folder.

    Example:
      >>> "<h1>a &lt; b</h1>" in page("| x |\\n| - |\\n| 1 |", title="a < b", folder=".")
      True
    """
    import markdown_it

    parser = markdown_it.MarkdownIt("commonmark", {"html": False}).enable("table")
    parser.add_render_rule("image", _image)
    parser.add_render_rule("table_open", lambda *args: f"{SCROLL}\n<table>\n")
    parser.add_render_rule("table_close", lambda *args: "</table>\n</div>\n")
    env = {"folder": folder}
    tokens = parser.parse(markdown, env)
    _align(tokens)
    body = parser.renderer.render(tokens, parser.options, env)
    return PAGE.format(title=html.escape(title), style=STYLE.read_text("utf-8"), body=body)


def command_line() -> str:
    """The command of this process, as it would be typed: python -m MODULE --flags."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = ["python", "-m", spec.name] if spec else ["python", *sys.argv[:1]]
    return shlex.join(start + sys.argv[1:])


def _align(tokens) -> None:
    """A column is of numbers when most of what is there is; then it stands to the right."""
    for token, inside in zip(tokens, tokens[1:], strict=False):
        if token.type == "table_open":
            table = []
        elif token.type == "tr_open":
            table.append([])
        elif token.type in ("th_open", "td_open"):
            table[-1].append((token, inside.content))
        elif token.type == "table_close":
            for column in zip(*table, strict=True):
                there = [text for _, text in column[1:] if text not in ("", "-", "–")]
                if 2 * sum(bool(NUMBER.match(text)) for text in there) >= len(there) + bool(there):
                    for cell, _ in column:
                        cell.attrSet("class", "number")


def _image(self, tokens, i, options, env) -> str:
    path = pathlib.Path(env["folder"], urllib.parse.unquote(tokens[i].attrs["src"]))
    data = path.read_bytes()
    if not data.startswith(PNG) or len(data) < 24:
        raise ValueError(f"{str(path)!r} is no PNG file: save the picture as PNG.")
    width, height = struct.unpack(">II", data[16:24])
    return (
        f'<span class="card"><img alt="{html.escape(tokens[i].content)}" width="{width}" '
        f'height="{height}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></span>'
    )


def _code(text: str) -> str:
    """Indented, for text that may hold fences."""
    return textwrap.indent(text, "    ", lambda line: True)


def _named(folder: str, pattern: str) -> list[str]:
    return sorted(path.name for path in pathlib.Path(folder).glob(pattern))
