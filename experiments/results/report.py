"""All that is written of a comparison: tables, pictures, and one page that holds both."""

import os
from collections.abc import Callable, Sequence

from experiments.cluster import files
from experiments.results import archive, page, plots, tables
from experiments.results.statistics import Comparison
from experiments.results.tables import Column

TABLE = "table.md"


def write(
    comparison: Comparison,
    folder: str,
    *,
    title: str,
    command: str | None = None,
    columns: Sequence[Column],
    panels: Sequence[plots.Panel],
    sections: Sequence[Callable] = (),
) -> str:
    """Writes tables, pictures, comparison.json and report.html into the folder.

    Args:
      title: of the pictures and the page; command: what makes the comparison.
      columns: of the main table, one table per speed.
      panels: of comparison.png, one picture per speed.
      sections: functions of the comparison that give a text below the main table, (file name,
        text), or for a picture (file name, function of a path and a title).

    Returns:
      The tables.
    """
    texts = {TABLE: []}
    for speed in comparison.speeds:
        end = "" if speed is None else f"_R{speed:g}"
        head = "" if speed is None else f"### R = {speed:g}\n\n"
        texts[TABLE].append(head + tables.table(comparison, columns, speed))
        path = os.path.join(folder, f"comparison{end}.png")
        plots.comparison(comparison, panels, path, title, speed)
    for section in sections:
        made = section(comparison)
        name, made = (TABLE, made) if isinstance(made, str) else made
        if callable(made):
            made(os.path.join(folder, name), title)
        elif made:
            texts.setdefault(name, []).append(made)
    texts = {name: "\n\n".join(parts) for name, parts in texts.items()}
    for name, text in texts.items():
        files.write_whole(os.path.join(folder, name), text + "\n")
    files.write_json(os.path.join(folder, archive.COMPARISON), archive.describe(comparison))
    page.of_folder(folder, title=title, command=command)
    return "\n\n".join(texts.values())
