"""What a report is made of, and its HTML: headings, text, tables, pictures, code and file names.

Everything is escaped here and nowhere else; inside text and cells, **bold** and `code` are known.
"""

import base64
import html
import json
import os
import re
import struct
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PNG = b"\x89PNG\r\n\x1a\n"
NUMBER = re.compile(r"[-+−±]?\s?[\d.]*\d|[-+−]?(inf|nan|∞)\b")
EMPTY = ("", "-", "–")


class Heading(NamedTuple):
    text: str
    level: int = 2  # 2 to 4; the title is 1


class Text(NamedTuple):
    text: str


class Table(NamedTuple):
    markdown: str  # a pipe table


class Picture(NamedTuple):
    path: str  # a PNG file
    alt: str  # what it shows, for those who do not see it
    caption: str = ""


class Code(NamedTuple):
    text: str


class Files(NamedTuple):
    names: Sequence[str]  # beside the report


def to_html(section: NamedTuple) -> str:
    """One section as HTML.

    Args:
      section: one of the records above.

    Returns:
      HTML with balanced tags.

    Raises:
      ValueError: for a level that is none, a table without rows, or a picture that is no PNG.

    Example:
      >>> to_html(Text("**all** & `rr`"))
      '<p><strong>all</strong> &amp; <code>rr</code></p>'
    """
    return RENDER[type(section)](section)


def inline(text: str) -> str:
    """Escaped text, with **bold** and `code`."""
    parts = re.split(r"(`[^`]+`|\*\*[^*]+\*\*)", text)
    return "".join(_inline(part) for part in parts)


def _words(text: str) -> str:
    """Escaped text whose words do not break at their hyphens: D-RR and --flags stay whole."""
    parts = (html.escape(part) for part in re.split(r"(\S*-\S+)", text))
    return "".join(f'<span class="word">{p}</span>' if i % 2 else p for i, p in enumerate(parts))


def _inline(part: str) -> str:
    if len(part) > 2 and part[0] == part[-1] == "`":
        return f"<code>{_words(part[1:-1])}</code>"
    if len(part) > 4 and part.startswith("**") and part.endswith("**"):
        return f"<strong>{_words(part[2:-2])}</strong>"
    return _words(part)


def parse(markdown: str) -> list[NamedTuple]:
    """Our own Markdown as sections: pipe tables, # headings, fenced code and paragraphs.

    A line that ends without a stop and stands over a table is that table's heading.

    Args:
      markdown: as in table.md.

    Returns:
      Headings, tables, code and text, in their order.

    Example:
      >>> parse("R = 2\\n\\n| arm |\\n| --- |\\n| a   |")[0]
      Heading(text='R = 2', level=3)
    """
    found = []
    for block in _blocks(markdown):
        if block.startswith("|"):
            if found and isinstance(found[-1], Text) and _is_head(found[-1].text):
                found[-1] = Heading(found[-1].text, 3)
            found.append(Table(block))
        elif block.startswith("```"):
            found.append(Code(re.sub(r"^```.*\n|\n?```$", "", block)))
        elif head := re.match(r"(#+)\s+(.*)", block):
            found.append(Heading(head[2], min(max(len(head[1]), 2), 4)))
        else:
            found.append(Text(block))
    return found


def _blocks(markdown: str) -> list[str]:
    """Runs of lines of one kind; a blank line ends them, except inside fenced code."""
    blocks, before, fenced = [], None, False
    for line in markdown.splitlines():
        fence = line.startswith("```")
        kind = "code" if fenced or fence else next((c for c in "|#" if line.startswith(c)), "text")
        if kind == "text" and not line.strip():
            kind = None
        elif kind != before or kind == "#" or (fence and not fenced):
            blocks.append(line)
        else:
            blocks[-1] += "\n" + line
        before, fenced = kind, fenced != fence
        if fence and not fenced:
            before = None
    return blocks


def _is_head(text: str) -> bool:
    return "\n" not in text and not text.rstrip().endswith((".", ":", "!", "?"))


def cells(line: str) -> list[str]:
    r"""The cells of a line of a pipe table; `\|` is a bar inside a cell."""
    parts = re.split(r"(?<!\\)\|", line.strip().removeprefix("|"))
    if not parts[-1].strip():
        parts.pop()
    return [part.strip().replace(r"\|", "|") for part in parts]


def _is_number(column: Sequence[str]) -> bool:
    """Most of what is there starts with a number: "2 of 5 arrive" and "0.25 (edge)" do.

    A column in which nothing is there has numbers that are missing.
    """
    there = [cell.strip("*` ") for cell in column if cell not in EMPTY]
    return 2 * sum(bool(NUMBER.match(cell)) for cell in there) > len(there) or not there


def _table(section: Table) -> str:
    lines = [cells(line) for line in section.markdown.strip().splitlines()]
    if len(lines) < 2 or any(len(line) != len(lines[0]) for line in lines):
        raise ValueError(
            f"a table starts with {section.markdown[:60]!r}: it needs a head, a line of dashes and "
            "as many cells in every row; put `\\|` for a bar inside a cell."
        )
    head, rules, *body = lines
    columns = list(zip(*body, strict=True)) if body else [()] * len(head)
    right = [_aligned(rule, column) for rule, column in zip(rules, columns, strict=True)]

    def row(line, tag, scope):
        out = []
        for i, (cell, number) in enumerate(zip(line, right, strict=True)):
            is_head = scope == "col" or (i == 0 and not number)
            kind = f'th scope="{scope}"' if is_head else tag
            css = ' class="number"' if number else ""
            out.append(f"<{kind}{css}>{inline(cell)}</{kind.split()[0]}>")
        return f"<tr>{''.join(out)}</tr>"

    body_rows = "\n".join(row(line, "td", "row") for line in body)
    label = html.escape(f"Table: {head[0]}")
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">\n<table>\n'
        f"<thead>{row(head, 'th', 'col')}</thead>\n<tbody>\n{body_rows}\n</tbody>\n</table>\n</div>"
    )


def _aligned(rule: str, column: Sequence[str]) -> bool:
    """The line of dashes decides where it has colons, else what is in the column."""
    if ":" in rule:
        return rule.endswith(":") and not rule.startswith(":")
    return _is_number(column)


def _picture(section: Picture) -> str:
    with open(section.path, "rb") as file:
        data = file.read()
    if not data.startswith(PNG) or len(data) < 24:
        raise ValueError(f"{section.path!r} is no PNG file: save the picture as PNG.")
    width, height = struct.unpack(">II", data[16:24])
    caption = f"<figcaption>{inline(section.caption)}</figcaption>" if section.caption else ""
    return (
        f'<figure><div class="card" role="region" tabindex="0" '
        f'aria-label="{html.escape(section.caption or section.alt)}">'
        f'<img alt="{html.escape(section.alt)}" width="{width}" height="{height}" '
        f'src="data:image/png;base64,{base64.b64encode(data).decode()}"></div>{caption}</figure>'
    )


def _heading(section: Heading) -> str:
    if section.level not in (2, 3, 4):
        raise ValueError(f"a heading's level is {section.level}: 2, 3 or 4; the title is 1.")
    return f"<h{section.level}>{inline(section.text)}</h{section.level}>"


def _files(section: Files) -> str:
    links = [
        f'<li><a href="{html.escape(urllib.parse.quote(f"./{name}"))}">{html.escape(name)}</a></li>'
        for name in map(os.path.basename, section.names)
    ]
    return f'<ul class="files">{"".join(links)}</ul>'


RENDER = {
    Heading: _heading,
    Text: lambda section: f"<p>{inline(section.text)}</p>",
    Table: _table,
    Picture: _picture,
    Code: lambda section: f"<pre><code>{_words(section.text)}</code></pre>",
    Files: _files,
}


def lines_of(settings: Mapping, prefix: str = "") -> str:
    """Settings as lines of code: one `name = JSON value` each, nested names with dots."""
    lines = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            lines.append(lines_of(value, f"{prefix}{name}."))
        else:
            lines.append(f"{prefix}{name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines)
