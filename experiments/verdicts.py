r"""Which claims of the papers do our runs reproduce? The tables of experiments/README.md.

    python -m experiments.verdicts                      # writes them anew
    python -m experiments.verdicts --check              # fails if they are not up to date
    python -m experiments.verdicts --pictures           # and draws docs/orders_*.png
    python -m experiments.verdicts --record=results/cd_grab_hmda --name=hmda \
        --command="python -m experiments.cd_grab --task=hmda --data_dir=DIR"

Nothing is trained: everything comes from the records in experiments/runs. The claims are the rows
of experiments/claims.py, and the verdicts what experiments/verdict_rule.py makes of their effects.
Takes seconds.
"""

import json
import pathlib
import sys
from collections.abc import Mapping, Sequence

from absl import app, flags

from experiments import compare, plots, recorded, records
from experiments.claims import CLAIMS, Claim, decide
from experiments.flag_values import definer
from experiments.methods import METHODS
from experiments.verdict_rule import VERDICTS

FLAGS = flags.FLAGS
README = pathlib.Path(__file__).parent / "README.md"
PICTURES = README.parents[1] / "docs"
BEGIN = "<!-- begin: written by python -m experiments.verdicts -->"
END = "<!-- end: written by python -m experiments.verdicts -->"


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define = definer(values)
    define(flags.DEFINE_bool, "check", False, "write nothing; fail if the tables are out of date")
    define(flags.DEFINE_bool, "pictures", False, "draw the pictures of the runs of orders too")
    define(flags.DEFINE_string, "record", None, "an output folder to keep in experiments/runs")
    define(flags.DEFINE_string, "name", None, "of the run to record, as in RUNS")
    define(flags.DEFINE_string, "command", None, "that made it, DIR for the data")


def table(runs: Mapping[str, list[dict]], claims: Sequence[Claim] = CLAIMS) -> str:
    """One row per claim; of one thing at several learning rates one row, where all is equal."""
    rows = {}
    for claim in claims:
        ours, verdict = decide(claim, runs)
        row = (claim.text, claim.paper, ours, _scaled(claim), verdict, _command(claim, runs))
        rows.setdefault(row, []).append(claim.setting)
    head = ("claim", "paper's number", "ours", "scaled down", "verdict", "command")
    lines = []
    for row, settings in rows.items():
        cells = (", ".join(filter(None, (row[0], " and ".join(filter(None, settings))))), *row[1:])
        lines.append(dict(zip(head, cells, strict=True)))
    return compare.markdown(lines)


def _scaled(claim):
    return claim.scaled or (recorded.RUNS[claim.runs[0]].scaled if claim.runs else "-")


def _command(claim, runs):
    if claim.runs and claim.runs[0] in runs:
        return f"[{claim.runs[0]}](#{claim.runs[0]})"
    return claim.command or "-"


def count(text: str) -> str:
    """How many rows of the table have which verdict."""
    words = [line.split("|")[-3].strip().split(":")[0] for line in text.splitlines()[2:]]
    return ", ".join(f"{words.count(word)} {word}" for word in VERDICTS if word in words)


def section(name: str, rows: list[dict], folder=recorded.FOLDER) -> str:
    """A recorded run: its command, versions, table and picture, or where these are."""
    run, versions = recorded.RUNS[name], json.loads(recorded.text_of(name, "versions.json", folder))
    command = recorded.text_of(name, recorded.COMMAND, folder).rstrip()
    parts = [
        f"### {name}",
        f"{run.title}. Scaled down: {'; '.join(filter(None, (run.scaled, run.details)))}. JAX "
        f"{versions['jax']} on {versions['device']}.",
        "\n".join(f"    {line}" for line in command.splitlines()),
    ]
    if run.tables:
        return "\n\n".join([*parts, f"Tables and pictures: [{run.tables}]({run.tables})."])
    parts.append(compare.table(compare.summarise(rows)))
    for order, rate in compare.diverged(rows):
        parts.append(f"{METHODS[order].label} diverged at learning rate {rate:g}.")
    return "\n\n".join([*parts, f"![{run.title}](../docs/{picture(name)})"])


def picture(name: str) -> str:
    return f"orders_{name}.png"


def draw(runs: Mapping[str, list[dict]], folder: pathlib.Path = PICTURES) -> None:
    """Every run of orders against epochs and against seconds."""
    for name, rows in runs.items():
        run = recorded.RUNS[name]
        if not run.tables:
            shown = [r for r in rows if r["epoch"] >= run.shown_from]
            title = f"{run.title}, from epoch {run.shown_from}" if run.shown_from else run.title
            plots.comparison(shown, str(folder / picture(name)), title)


def generated(folder=recorded.FOLDER) -> str:
    """Everything between the markers."""
    runs = recorded.load(folder)
    verdicts = table(runs)
    parts = [f"{count(verdicts)}.", verdicts, "## Runs"]
    parts += [section(name, rows, folder) for name, rows in runs.items()]
    return "\n\n".join(parts)


def renewed(text: str, body: str) -> str:
    """The text with the body between its markers.

    Raises:
      ValueError: if the text has not each marker once, in this order.
    """
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the README needs the lines {BEGIN!r} and {END!r} once, in this order.")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"


def check(readme: pathlib.Path = README, folder=recorded.FOLDER) -> None:
    """Compares the tables with what they would be now.

    Raises:
      ValueError: if they are not those of the recorded runs.
    """
    text = readme.read_text(encoding="utf-8")
    if renewed(text, generated(folder)) != text:
        raise ValueError(
            f"the tables of {readme.name} are not those of the recorded runs: write them by "
            "python -m experiments.verdicts."
        )


def main(argv: Sequence[str]) -> None:
    del argv
    if FLAGS.check:
        try:
            check()
        except ValueError as error:
            sys.exit(str(error))
        print("The tables are up to date.")
        return
    if FLAGS.record:
        print(f"Recorded in {recorded.record(FLAGS.record, FLAGS.name, FLAGS.command)}")
    if FLAGS.pictures:
        draw(recorded.load())
    text = renewed(README.read_text(encoding="utf-8"), generated())
    records.write_whole(str(README), text)
    print(f"Written: {README.name}, {len(text.splitlines())} lines")


def run() -> None:
    define_flags()
    app.run(main)


if __name__ == "__main__":
    run()
