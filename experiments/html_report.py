r"""One comparison as one HTML file that opens in any browser, pictures inside.

    python -m experiments.html_report --folder=results/cd_grab_digits

Reads what an experiment has left in its output folder (settings.json, versions.json, table*.md,
*.png, command.txt where there is one) and writes report.html into it. Nothing is loaded from
elsewhere and no script runs: the file can be mailed, archived and printed. Takes a second.
"""

import glob
import html
import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from absl import app, flags

from experiments import records
from experiments.html_parts import Code, Files, Heading, Picture, Text, lines_of, parse, to_html
from experiments.html_style import STYLE

FLAGS = flags.FLAGS
NAME = "report.html"
# The browser itself refuses whatever is not in the file.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
ALTS = {  # starts of file names -> what such a picture shows
    "comparison": "Line charts of everything compared, mean over seeds with its 95 % interval",
    "effects": "Main effects and interactions on every response, with their 95 % intervals",
    "herding": "Line charts of herding bounds over rounds and over workers",
    "time_to_target": "Seconds to the target metric of every arm at every loading speed",
    "curves": "Line charts of the metric of every arm against loads, steps, seconds and rounds",
}
INTERVALS = (
    "± is the half width of the 95 % interval over seeds (Student's t); “2 of 5” counts the seeds "
    "that arrive at all."
)


def write(
    path: str,
    *,
    title: str,
    sections: Sequence[NamedTuple],
    command: str | None,
    versions: Mapping,
) -> None:
    """Writes one self-contained HTML file.

    Args:
      path: of the file; it is replaced as a whole.
      title: plain text.
      sections: records of experiments/html_parts.py, in their order.
      command: what makes the comparison, or None.
      versions: package, python or device -> version; what is None is left out.

    Raises:
      ValueError: for sections that cannot be shown (see `html_parts.to_html`).

    Example:
      >>> import pathlib, tempfile
      >>> path = f"{tempfile.mkdtemp()}/report.html"
      >>> write(path, title="a < b", sections=[Text("yes")], command=None, versions={})
      >>> "<h1>a &lt; b</h1>" in pathlib.Path(path).read_text()
      True
    """
    parts = [to_html(section) for section in sections]
    if command:
        parts += [to_html(Heading("Command")), to_html(Code(command))]
    found = {name: value for name, value in versions.items() if value is not None}
    if found:
        listed = ", ".join(f"{name} {value}" for name, value in found.items())
        parts.append(f"<footer><p>Made with {html.escape(listed)}.</p></footer>")
    body = "\n".join(parts)
    head = (
        '<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{html.escape(POLICY)}">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>"
    )
    records.write_whole(
        path,
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n<main>\n'
        f"<h1>{html.escape(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n",
    )


def of_folder(folder: str, *, title: str | None = None, command: str | None = None) -> str:
    """Writes report.html from what an experiment has left in its output folder.

    Args:
      folder: with table*.md, *.png or both; settings.json and versions.json where they are.
      title: None takes the task and the workers of the settings.
      command: None takes command.txt, if there is one.

    Returns:
      The path of the report.

    Raises:
      ValueError: if the folder has neither tables nor pictures.
    """
    tables = sorted(_named(folder, "table*.md"), key=_natural)
    pictures = sorted(_named(folder, "*.png"), key=_natural)
    if not tables and not pictures:
        raise ValueError(
            f"{folder!r} has neither table*.md nor *.png: give the --output_dir of an experiment "
            "that has ended."
        )
    settings = _json(os.path.join(folder, "settings.json"))
    title = title or title_of(settings) or os.path.basename(os.path.abspath(folder))
    sections = [Heading("Pictures")] if pictures else []
    for path in pictures:
        name = os.path.basename(path)
        alt = next((text for start, text in ALTS.items() if name.startswith(start)), "Chart")
        sections.append(
            Picture(path, f"{alt}: {title} ({name}). The tables hold the numbers.", name)
        )
    if tables:
        sections.append(Heading("Tables"))
    texts = [_read(path) for path in tables]
    if any("±" in text for text in texts):
        sections.append(Text(INTERVALS))
    for path, text in zip(tables, texts, strict=True):
        if len(tables) > 1:
            sections.append(Heading(os.path.splitext(os.path.basename(path))[0], 3))
        sections += parse(text)
    sections += _beside(folder)
    if settings:
        sections += [Heading("Settings"), Code(lines_of(settings))]
    written = os.path.join(folder, "command.txt")
    if command is None and os.path.exists(written):
        command = _read(written).strip()
    versions = _json(os.path.join(folder, "versions.json"))
    path = os.path.join(folder, NAME)
    write(path, title=title, sections=sections, command=command, versions=versions)
    return path


def title_of(settings: Mapping) -> str | None:
    """The task and the workers, of the settings of any experiment; None if they name no task."""
    inner = settings.get("recipe")
    name = settings.get("task") or (inner if isinstance(inner, str) else None)
    workers = (inner if isinstance(inner, Mapping) else settings).get("workers")
    return f"{name}, {workers} workers" if name and workers else name


def command_line() -> str:
    """The command of this process, as it would be typed: python -m MODULE --flags."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = ["python", "-m", spec.name] if spec else ["python", *sys.argv[:1]]
    return shlex.join(start + sys.argv[1:])


def _beside(folder: str) -> list[NamedTuple]:
    """Links to the data beside the report."""
    found = [p for kind in ("*.csv", "*.jsonl*", "*.json", "*.md") for p in _named(folder, kind)]
    note = "Beside this file, where it has not been moved; every picture is in it."
    return [Heading("Files"), Text(note), Files(sorted(found, key=_natural))] if found else []


def _named(folder: str, pattern: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(folder), pattern))


def _natural(path: str):
    """R2 before R16, and names without a number, which show everything at once, first."""
    parts = re.split(r"(\d+)", os.path.basename(path))
    return len(parts) > 1, [int(p) if p.isdigit() else p for p in parts]


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def _json(path: str) -> dict:
    return json.loads(_read(path)) if os.path.exists(path) else {}


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    flags.DEFINE_string("folder", None, "an experiment's output folder", flag_values=values)
    flags.DEFINE_string("title", None, "task and workers if unset", flag_values=values)
    flags.DEFINE_string("command", None, "command.txt if unset", flag_values=values)


def main(argv: Sequence[str]) -> None:
    del argv
    if not FLAGS.folder:
        raise app.UsageError("--folder is unset: give an experiment's output folder.")
    print(f"Written: {of_folder(FLAGS.folder, title=FLAGS.title, command=FLAGS.command)}")


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
