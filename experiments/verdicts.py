"""Compares the papers' claims with the recorded runs, and writes the verdicts into the pages.

    python -m experiments.verdicts                          # writes both pages and their picture
    python -m experiments.verdicts --check                  # fails if they are out of date
    python -m experiments.verdicts --pictures               # also draws the pictures of the orders
    python -m experiments.verdicts --record=results/hmda    # keeps a study's output as run hmda

Nothing is trained: everything comes from the records in experiments/runs, in seconds. The pages are
docs/results/index.md and papers.md. Claims are the rows of experiments/results/claims.py; rule.py
there turns effects into verdicts. For every undecided claim it prints the command that would decide
it: the run's latest, with more seeds. A run that is recorded again gets another look, at that
look's confidence level.
"""

import functools
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from experiments.cluster import entry, files
from experiments.results import archive, plots, statistics
from experiments.results import claims as claimed
from experiments.results import verdict_page as written
from experiments.study import recipes
from experiments.study.flags import definer
from experiments.study.tables import Arm, plans_of
from syncopate.refusals import UserError

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "results"
PAGES = (DOCS / "papers.md", DOCS / "index.md")
BEGIN = "<!-- begin: written by python -m experiments.verdicts -->"
END = "<!-- end: written by python -m experiments.verdicts -->"


def define_flags(values: flags.FlagValues) -> None:
    define = definer(values)
    define(flags.DEFINE_bool, "check", False, "write nothing, and fail if a page is out of date")
    define(flags.DEFINE_bool, "pictures", False, "also draw the pictures of the runs of orders")
    text = "output folder of a study, to keep as the run of that name"
    define(flags.DEFINE_string, "record", None, text)


@functools.cache
def claims() -> tuple:
    """All claims; cached, because QSR's plans have tens of thousands of rounds."""

    def plan_of(name):
        return plans_of(*recipes.planned(name), Arm(sync="qsr")).sync

    return claimed.claims(plan_of)


def record(results: str, folder=archive.FOLDER) -> pathlib.Path:
    """Keeps a finished output folder as the run of its name, one of `RUNS`."""
    name = pathlib.Path(results).name
    if name not in claimed.RUNS:
        raise UserError(
            f"--record is {results!r}: the folder must be named {', '.join(claimed.RUNS)}. For a "
            "new run, add a row to RUNS in experiments/results/claims.py."
        )
    archive.record(results, pathlib.Path(folder) / name)
    return pathlib.Path(folder) / name


def commands(found: Sequence[written.Row], folder=archive.FOLDER) -> str:
    """Commands that would decide the undecided claims, fewest seeds first.

    Each is the run's latest command, restricted to the arms, rates and speed that are compared.
    """
    lines = []
    for row in written.undecided(found):
        if not row.verdict.needed:
            continue
        lines += [f"{row.text}: {row.verdict.seeds} seeds{row.needs}"]
        measure, rates = row.claim.measure, row.verdict.again.rates
        own = {"arms": f"{measure.against},{measure.arm}", "seeds": row.verdict.needed}
        own |= {"learning_rates": ",".join(f"{rate:g}" for rate in rates)} if rates else {}
        own |= {"speeds": measure.speed} if measure.speed else {}
        for name in row.claim.runs:
            command = archive.commands(pathlib.Path(folder, name))[-1]
            command = re.sub(rf" --({'|'.join(own)})=\S+", "", command)
            flags = "".join(f" --{flag}={value}" for flag, value in own.items())
            lines += [f"    {command}{flags} --output_dir=results/{name}"]
    return "\n".join(lines)


def pages(rows, recorded, paths=PAGES, folder=archive.FOLDER) -> dict[pathlib.Path, str]:
    """The up-to-date text of each page: what was recorded, between its markers."""
    bodies = (
        written.page_of_claims(rows, recorded, folder), written.page_of_results(rows, recorded),
    )  # fmt: skip
    found = {}
    for path, body in zip(paths, bodies, strict=True):
        text = path.read_text(encoding="utf-8")
        if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
            raise UserError(f"{path} must hold {BEGIN!r} and {END!r}, once each, in order.")
        found[path] = f"{text.split(BEGIN)[0]}{BEGIN}\n\n{body}\n\n{END}{text.split(END)[1]}"
    return found


def check(found: Mapping[pathlib.Path, str]) -> None:
    """Raises ValueError if a page is out of date."""
    if stale := [path.name for path, text in found.items() if path.read_text("utf-8") != text]:
        raise UserError(
            f"out of date with the recorded runs: {' and '.join(stale)}. Run "
            "python -m experiments.verdicts to write them."
        )


def draw_orders(recorded: Mapping, folder: pathlib.Path) -> None:
    """Draws every run of orders against epochs; seeds may come from calls of unequal speed."""
    panels = [panel._replace(x=("epoch",)) for panel in plots.ORDER_PANELS]
    for name, compared in recorded.items():
        run = claimed.RUNS[name]
        if compared.records[0]["study"] == "cd_grab":
            kept = [r for r in compared.records if r["epoch"] >= run.shown_from]
            shown = statistics.compare(kept, compared.arms, compared.criterion)
            title = f"{run.title}, from epoch {run.shown_from}" if run.shown_from else run.title
            plots.comparison(shown, panels, str(folder / f"orders_{name}.png"), title)


def main(values: flags.FlagValues) -> None:
    if values.check and (values.pictures or values.record):
        raise UserError("--check writes nothing: leave --pictures and --record out, or --check.")
    if values.record is not None:
        print(f"Recorded in {record(values.record)}")
    print("Reading the recorded runs", file=sys.stderr, flush=True)
    recorded = written.load()
    rows = written.rows(recorded, claims())
    found = pages(rows, recorded)
    if values.check:
        check(found)
        return print("The pages are up to date.")
    for path, text in found.items():
        files.write_whole(str(path), text)
        print(f"Written: {path.name}, {len(text.splitlines())} lines")
    written.picture(rows, str(DOCS / "results.png"))
    if values.pictures:
        draw_orders(recorded, DOCS)
    print(commands(rows))


if __name__ == "__main__":
    entry.main(define_flags, main)
