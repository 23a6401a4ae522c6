"""The report of a comparison: tables, pictures, and one page that contains both.

report.html contains its pictures, loads nothing from elsewhere and runs no script, so that it can
be mailed, archived and printed.
"""

import base64
import contextlib
import functools
import html
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from absl import flags

from experiments import files, lock
from experiments.report import plots, records, statistics, tables
from experiments.report.statistics import Comparison, Criterion

TABLE = "table.md"
OUTPUT = {"output_dir", "overwrite", "traceback"}  # flags that do not change the result
SHOWN = (records.COMMAND, "settings.json", "versions.json")
STYLE = pathlib.Path(__file__).with_name("style.css")
# The browser refuses everything that is not in the file.
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
{body}
</body>
</html>
"""
INTERVALS = (
    "± is the half width of the 95 % interval over seeds (Student's t); “2 of 5” counts the seeds "
    "that arrive at all. A factor with its interval in brackets, as “1.2 (1.1 to 1.3)”, is the "
    "geometric mean of the seeds' factors. A rate is at an “edge” if it is the smallest or the "
    "largest of those tried: a better one may lie beyond."
)


def write(comparison: Comparison, study, folder: str, title: str) -> str:
    """Writes tables, pictures and report.html. Returns the tables.

    Args:
      study: a `Study`: its question; its columns, a table per speed; its panels, a picture per
        speed; and its sections, functions of the comparison that give a text below the main table,
        (file name, text), or for a picture (file name, function of a path and a title).
    """
    main, parts = [], {TABLE: ""}
    for speed in comparison.speeds:
        end = "" if speed is None else f"_R{speed:g}"
        head = "" if speed is None else f"### R = {speed:g}\n\n"
        main.append(head + tables.table(comparison, study.columns, speed))
        draw = functools.partial(plots.comparison, comparison, study.panels, speed=speed)
        parts[f"comparison{end}.png"] = draw
    for section in study.sections:
        made = section(comparison)
        if isinstance(made, str):
            main.append(made)
        else:
            name, parts[name] = made
    parts[TABLE] = "\n\n".join(filter(None, main))
    question = (study.question or "").partition("\n")[0]
    return write_all(folder, title, parts, (question, tables.answer(comparison)))


def write_run(rows: Sequence[Mapping], label: str, folder: str, title: str) -> str:
    """Writes a table, a picture and report.html of the records of one run. Returns its result."""
    above = any(statistics.ABOVE in row for row in rows)
    criterion = Criterion(statistics.ABOVE if above else statistics.LOSS)
    compared = statistics.compare(statistics.data_of(rows), {"run": label}, criterion)
    draw = functools.partial(plots.comparison, compared, plots.RUN_PANELS)
    sentence = tables.result(rows[-1])
    parts = {"table_run.md": tables.course(rows), "run.png": draw}
    write_all(folder, title, parts, (label, sentence))
    return sentence


@contextlib.contextmanager
def opened(command: str, values: flags.FlagValues) -> Iterator[str]:
    """Holds --output_dir for a command without a comparison, whose flags are the folder's settings.

    Raises:
      ValueError: if the folder holds what another command or other flags have made, and there is no
        --overwrite.
    """
    folder = values.output_dir or os.path.join("results", command)
    flags_of = {flag.name: flag.value for flag in values.get_key_flags_for_module(sys.argv[0])}
    settings = {"command": command} | {k: v for k, v in flags_of.items() if k not in OUTPUT}
    with lock.held(folder):
        records.open_folder(folder, settings, overwrite=values.overwrite)
        yield folder


def write_all(
    folder: str,
    title: str,
    parts: Mapping[str, str | Callable],
    asked: tuple[str, str] = ("", ""),
) -> str:
    """Writes tables, pictures, and report.html of both. Returns the tables.

    Args:
      parts: by the names of their files, the tables and pictures. A table is Markdown, of which
        tables, headings and emphasis are shown as such, and everything else as it stands. A picture
        is a function of a path and a title, which may draw none. Of "", and where none is drawn,
        the file of an earlier call is removed.
      asked: the question, and its answer in a sentence.
    """
    texts, drawn = {}, []
    for name, part in parts.items():
        path = pathlib.Path(folder, name)
        if part and not callable(part):
            texts[name] = part
            files.write_whole(str(path), part + "\n")
            continue
        path.unlink(missing_ok=True)
        if part:
            part(path=str(path), title=title)
        drawn += [path] * path.exists()
    fields = {"title": html.escape(title), "style": STYLE.read_text(encoding="utf-8")}
    body = "\n".join(_body(pathlib.Path(folder), title, texts, drawn, asked))
    files.write_whole(os.path.join(folder, "report.html"), PAGE.format(body=body, **fields))
    return "\n\n".join(texts.values())


def _body(folder, title, texts, drawn, asked) -> Iterator[str]:
    """The parts of the page: tables, pictures, the commands, and the folded settings."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("zero").enable(["table", "heading", "emphasis"])
    question, answer, title = map(html.escape, (*asked, title))
    yield f"<h1>{question or title}</h1>"
    yield f"<p><strong>{answer}</strong></p>" * bool(answer)
    yield f"<p>{title}</p>" * bool(question)
    for name, text in texts.items():
        words = name.removesuffix(".md").removeprefix("table").strip("_").replace("_", " ")
        words = html.escape(words[:1].upper() + words[1:] or "Comparison")
        yield f"<h2>{words}</h2>\n{parser.render(text)}"
    yield f"<p>{INTERVALS}</p>" * any("±" in text or "arrive" in text for text in texts.values())
    yield from map(_picture, drawn)
    for path in filter(pathlib.Path.exists, (folder / name for name in SHOWN)):
        head, text = path.stem.capitalize(), html.escape(files.content(path).decode())
        if path.name == records.COMMAND:
            yield f"<h2>{head}</h2>\n<pre>{text}</pre>"
        else:
            yield f"<details><summary>{head}</summary><pre>{text}</pre></details>"


def _picture(path: pathlib.Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(path.name)}" src="data:image/png;base64,{data}"></p>'
