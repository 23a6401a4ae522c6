r"""Which claims of the papers do our runs reproduce? The tables of experiments/README.md.

    python -m experiments.verdicts                      # writes them anew
    python -m experiments.verdicts --check              # fails if they are not up to date
    python -m experiments.verdicts --pictures           # and draws docs/orders_*.png
    python -m experiments.verdicts --record=results/cd_grab_hmda --name=hmda \
        --command="python -m experiments.cd_grab --task=hmda --data_dir=DIR"

Nothing is trained: everything comes from the records in experiments/runs. The claims are the rows
of experiments/verdict_parts/claims.py, and the verdicts what rule.py there makes of their effects.
Takes seconds.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from experiments.advice_parts import recorded
from experiments.flags import definer
from experiments.results import archive, records
from experiments.verdict_parts import page, runs

FLAGS = flags.FLAGS
README = pathlib.Path(__file__).parent / "README.md"
PICTURES = README.parents[1] / "docs"
BEGIN = "<!-- begin: written by python -m experiments.verdicts -->"
END = "<!-- end: written by python -m experiments.verdicts -->"


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define, switch, text = definer(values), flags.DEFINE_bool, flags.DEFINE_string
    define(switch, "check", False, "write nothing; fail if the tables are out of date")
    define(switch, "pictures", False, "draw the pictures of the runs of orders too")
    define(text, "record", None, "an output folder to keep in experiments/runs")
    define(text, "name", None, "of the run to record, as in RUNS")
    define(text, "command", None, "that made it, DIR for the data")


def record(results: str, name: str, command: str, folder=archive.FOLDER) -> pathlib.Path:
    """Keeps a finished output folder as a run of `RUNS`, as of `archive.record`."""
    if name not in runs.RUNS and not recorded.is_name(name):
        raise ValueError(
            f"--name is {name!r}: it must be one of {', '.join(runs.RUNS)}, or of a factorial, as "
            "map_TASK_WxB_eUSES or slow_TASK_eUSES. Add a row to RUNS in "
            "experiments/verdict_parts/runs.py for a new run."
        )
    target = pathlib.Path(folder) / name
    archive.record(results, target, command)
    return target


def generated(folder=archive.FOLDER) -> str:
    """Everything between the markers."""
    recorded = runs.load(folder)
    found = page.rows(recorded)
    parts = [f"{page.count(found)}.", page.table(found, recorded), "## Runs"]
    sections = [runs.section(name, own, folder) for name, own in recorded.items()]
    return "\n\n".join(parts + sections)


def replace_section(text: str, body: str) -> str:
    """The text with the body between its markers; ValueError if it has not each of them once."""
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the README needs the lines {BEGIN!r} and {END!r} once, in this order.")
    return f"{text.split(BEGIN)[0]}{BEGIN}\n\n{body}\n\n{END}{text.split(END)[1]}"


def check(readme: pathlib.Path = README, folder=archive.FOLDER) -> None:
    """Raises ValueError if the tables are not those of the recorded runs."""
    text = readme.read_text(encoding="utf-8")
    if replace_section(text, generated(folder)) != text:
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
        print(f"Recorded in {record(FLAGS.record, FLAGS.name, FLAGS.command)}")
    if FLAGS.pictures:
        runs.draw(runs.load(), PICTURES)
    text = replace_section(README.read_text(encoding="utf-8"), generated())
    records.write_whole(str(README), text)
    print(f"Written: {README.name}, {len(text.splitlines())} lines")


if __name__ == "__main__":
    define_flags()
    app.run(main)
