"""The report of a comparison: tables, pictures, and one page that contains both.

report.html contains its pictures, loads nothing from elsewhere and runs no script, so that it can
be mailed, archived and printed.
"""

import base64
import contextlib
import functools
import html
import math
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from absl import flags

from experiments.cluster import files, lock
from experiments.results import archive, frame, plots, records, statistics, tables
from experiments.results.statistics import Comparison, last, spent
from experiments.results.tables import faster, form_of, markdown, name_of, rounded, show
from experiments.tasks.metrics import METRICS

TABLE = "table.md"
OUTPUT = {"output_dir", "overwrite", "traceback"}  # flags that are no settings of what is made
SHOWN = ("settings.json", "versions.json")
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
<h1>{title}</h1>
{body}
</body>
</html>
"""
INTERVALS = (
    "± is the half width of the 95 % interval over seeds (Student's t); “2 of 5” counts the seeds "
    "that arrive at all. A factor with ± is the arithmetic mean of the seeds' factors; one with "
    "its interval in brackets, as “1.2 (1.1 to 1.3)”, is the geometric mean."
)


def write(comparison: Comparison, study, folder: str, title: str) -> str:
    """Writes tables, pictures, comparison.json, command.txt and report.html into the folder.

    Args:
      study: a `Study`: its columns, a table per speed; its panels, a picture per speed; and its
        sections, functions of the comparison that give a text below the main table, (file name,
        text), or for a picture (file name, function of a path and a title).

    Returns:
      The tables.
    """
    texts, pictures = {TABLE: []}, []
    for speed in comparison.speeds:
        end = "" if speed is None else f"_R{speed:g}"
        head = "" if speed is None else f"### R = {speed:g}\n\n"
        texts[TABLE].append(head + tables.table(comparison, study.columns, speed))
        draw = functools.partial(plots.comparison, comparison, study.panels)
        pictures += _drawn(folder, f"comparison{end}.png", draw, title, speed)
    for section in study.sections:
        made = section(comparison)
        name, made = (TABLE, made) if isinstance(made, str) else made
        if made and not callable(made):
            texts.setdefault(name, []).append(made)
        elif name not in texts:
            pictures += _drawn(folder, name, made, title)
    texts = {name: "\n\n".join(parts) for name, parts in texts.items()}
    for name, text in texts.items():
        files.write_whole(os.path.join(folder, name), text + "\n")
    files.write_json(os.path.join(folder, archive.COMPARISON), archive.describe(comparison))
    archive.note_command(folder, command_line())
    write_page(folder, title, pictures=pictures, texts=texts)
    return "\n\n".join(texts.values())


@contextlib.contextmanager
def opened(command: str, values: flags.FlagValues) -> Iterator[str]:
    """Holds --output_dir for an experiment without a comparison, from before it computes.

    Args:
      command: its name; values: its flags. These are the settings of the folder.

    Raises:
      ValueError: if the folder holds what another command or other flags have made, and there is no
        --overwrite.
    """
    folder = values.output_dir or os.path.join("results", command)
    known = {flag.name: flag.value for flag in values.get_key_flags_for_module(sys.argv[0])}
    settings = {"command": command} | {k: v for k, v in known.items() if k not in OUTPUT}
    with lock.held(folder):
        records.open_folder(folder, settings, overwrite=values.overwrite)
        yield folder


def write_tables(
    folder: str,
    title: str,
    found: Sequence[Mapping],
    made: Mapping[str, str],
    pictures: Mapping[str, Callable[[str], None]],
) -> None:
    """Writes and prints the tables, pictures and page of an experiment without a comparison.

    Args:
      folder: as of `opened`.
      found: its records; made: tables by name; pictures: functions of a path by file name.
    """
    records.write_lines(os.path.join(folder, records.METRICS), found)
    for name, text in made.items():
        files.write_whole(os.path.join(folder, f"table_{name}.md"), text + "\n")
        print(f"\n{name}\n\n{text}")
    names = [found for name, draw in pictures.items() for found in _drawn(folder, name, draw)]
    texts = {f"table_{name}.md": text for name, text in made.items()}
    write_page(folder, title, pictures=names, texts=texts)
    print(f"\nWritten to {folder}")


def _drawn(folder: str, name: str, draw: Callable | None, *more) -> list[str]:
    """[name] if `draw(path, *more)` draws it; else [], and what an earlier call left is removed."""
    path = pathlib.Path(folder, name)
    path.unlink(missing_ok=True)
    if draw:
        draw(str(path), *more)
    return [name] * path.exists()


def write_page(
    folder: str, title: str, *, pictures: Iterable[str], texts: Mapping[str, str]
) -> None:
    """Writes report.html: what this call has made, the folder's settings, and this command.

    Args:
      pictures: names of PNG files in the folder; texts: Markdown by name, of which tables, headings
        and emphasis are shown as such, and everything else as it stands.
    """
    from markdown_it import MarkdownIt

    folder = pathlib.Path(folder)
    parser = MarkdownIt("zero").enable(["table", "heading", "emphasis"])
    parts = ["<h2>Pictures</h2>", *(_picture(folder / name) for name in pictures)]
    parts += ["<h2>Tables</h2>", f"<p>{INTERVALS}</p>"]
    for name, text in texts.items():
        parts.append(f"<h3>{html.escape(name)}</h3>\n{parser.render(text)}")
    texts = {name: folder / name for name in SHOWN if (folder / name).exists()}
    texts = {name: path.read_text(encoding="utf-8") for name, path in texts.items()}
    for name, text in (texts | {"Command": command_line()}).items():
        parts.append(f"<h2>{name}</h2>\n<pre>{html.escape(text)}</pre>")
    known = {"title": html.escape(title), "style": STYLE.read_text(encoding="utf-8")}
    files.write_whole(str(folder / "report.html"), PAGE.format(body="\n".join(parts), **known))


def _picture(path: pathlib.Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{html.escape(path.name)}" src="data:image/png;base64,{data}"></p>'


def command_line() -> str:
    """The command of this process: python -m MODULE --flags."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = ["python", "-m", spec.name] if spec else ["python", *sys.argv[:1]]
    return shlex.join(start + sys.argv[1:])


# Sections.
def late(comparison: Comparison) -> list[str]:
    """The arms that miss the target with some seed."""
    arms = comparison.at(comparison.speeds[0])
    return [own.label for own in arms if math.inf in spent(comparison, own.runs, "step").values()]


def target_line(comparison: Comparison) -> str:
    """Section: the target of the main table."""
    if not math.isfinite(statistics.target_of(comparison)):
        return "No target: every run diverged. Pass lower --learning_rates."
    lost = late(comparison)
    who = f"{', '.join(lost)} do not reach" if lost else "every arm reaches"
    return f"Target: {statistics.target_of(comparison):.4g}, which {who} with every seed."


def diverged_rates(comparison):
    """A line per learning rate at which an arm diverged."""
    arms = comparison.at()
    lines = [f"{own.label} diverged at learning rate {r:g}." for own in arms for r in own.diverged]
    return "\n\n".join(lines)


def against(comparison: Comparison) -> str:
    """Section: the test metric of every arm less the baseline's, paired by seed."""
    metric, rows = statistics.metric_of(comparison), []
    base, label = next(iter(comparison.arms.items()))
    scale, unit = (100, "points") if metric == "accuracy" else (1, "difference")
    for own in comparison.at():
        less = frame.against(comparison, own, "metric")
        if own.arm != base and len(less) and np.isfinite(less).all():
            shown = {METRICS[metric].label: show(scale * less, "{:+.2f}")}
            rows.append({f"{unit} against {label}": own.label} | shown)
    return markdown(rows) if rows else ""


def gains(comparison: Comparison) -> str:
    """Section: the end of the baseline's runs, and what every other arm gains there.

    Times fewer epochs are those to the value with which the baseline's run of the same seed ends.
    """
    both = [c for c in (comparison, comparison.averaged) if c and c.baseline().runs]
    rows = [_gains(c, own) for c in both for own in c.at() if own.runs]
    return markdown(rows) if len(rows) > len(both) else ""


def _gains(comparison, own) -> Mapping[str, str]:
    scalar, base = comparison.criterion.scalar, comparison.baseline()
    plain = scalar.removesuffix(statistics.AVERAGED)
    form = "{:.2e}" if plain == statistics.ABOVE else "{:.4f}"  # distances are of any size
    less = tables.less(scalar, form.replace(":", ":+"))
    own_epochs, before = (
        {seed: arrival(run, scalar, last(base.runs[seed], scalar))
         for seed, run in of.runs.items() if seed in base.runs} for of in (own, base)
    )  # fmt: skip
    if late := sum(map(math.isinf, own_epochs.values())):
        fewer = f"{len(own_epochs) - late} of {len(own_epochs)} arrive"
    else:
        both = frame.measured({own.arm: own_epochs, base.arm: before})
        fewer = tables.times(frame.paired(both, own.arm, base.arm, "value", ratio=True))
    return {
        "at the end": own.label, "weights": "last" if plain == scalar else "averaged",
        "lr": f"{own.rate:g}", "seeds": f"{len(own.runs)}",
        name_of(scalar): show([last(run, scalar) for run in own.runs.values()], form),
        less.head(comparison): less.cell(comparison, own),
        "times fewer epochs at this lr (geometric mean)": fewer,
    }  # fmt: skip


def arrival(run: statistics.Run, scalar: str, target: float) -> float:
    """The epoch at which a curve first is at most `target`, linearly between its points; or inf."""
    known = [(r["epoch"], r[scalar]) for r in run if r.get(scalar) is not None]
    at, values = np.array(known, float).reshape(-1, 2).T
    if not (values <= target).any():
        return math.inf
    i = int(np.argmax(values <= target))
    if i == 0 or not math.isfinite(values[i - 1]):
        return float(at[i])
    return float(np.interp(-target, -values[i - 1 : i + 1], at[i - 1 : i + 1]))


def times_faster(comparison: Comparison) -> str:
    """Section: how many times faster than the baseline an arm is at the target, by speed."""
    head, rows = f"times faster than {next(iter(comparison.arms.values()))}", []
    for arm, label in comparison.arms.items():
        row = {head: label}
        for speed in comparison.speeds:
            own = comparison.chosen.get((arm, speed))
            row[f"R = {speed:g}"] = faster(comparison, own, who=True) if own else "-"
        rows.append(row)
    return markdown(rows)


def rates_tried(head: str = "arm"):
    """A table per speed of what chose the learning rates."""

    def section(comparison):
        criterion, parts = comparison.criterion, []
        what = f"mean {name_of(criterion.scalar)}"
        if criterion.when == "target":
            what = "mean steps to the target on the validation half"
        for speed in comparison.speeds:
            start = "Tuning" if speed is None else f"R = {speed:g}, tuning"
            title = f"{start}: {what} at every learning rate (seeds)"
            parts.append(f"{title}\n\n{sweep(comparison, speed, head)}")
        return "\n\n".join(parts)

    return section


def sweep(comparison: Comparison, speed: float | None = None, head: str = "arm") -> str:
    """What chose the rates: the criterion at every learning rate, in brackets the seeds if many."""
    at, criterion = comparison.at(speed), comparison.criterion
    rates = sorted({rate for own in at for rate in own.tried})

    def cell(own, rate):
        if rate in own.diverged:
            return "diverged"
        runs = statistics.runs_of(comparison.records, own.arm, speed).get(rate)
        if not runs:
            return "-"
        late, mean = statistics.score([*runs.values()], criterion)
        if late:
            return f"{len(runs) - late:.0f} of {len(runs)} arrive"
        if not math.isfinite(mean):
            return "not finite"
        target = criterion.when == "target"
        mean = mean if target or criterion.lower else -mean
        text = rounded(mean, "{:.0f}" if target else form_of(criterion.scalar))
        return text + (f" ({len(runs)})" if len(runs) > 1 else "")

    return markdown([{head: own.label} | {f"lr {r:g}": cell(own, r) for r in rates} for own in at])
