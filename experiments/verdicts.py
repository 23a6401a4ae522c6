r"""Which claims of the papers do our runs bear out? docs/results.md, and experiments/README.md.

    python -m experiments.verdicts                      # writes both anew, and their picture
    python -m experiments.verdicts --check              # fails if they are not up to date
    python -m experiments.verdicts --pictures           # and draws docs/orders_*.png
    python -m experiments.verdicts --record=results/cd_grab_hmda --name=hmda \
        --command="python -m experiments.cd_grab --task=hmda --data_dir=DIR"
    python -m experiments.verdicts --run=undecided --hours=8 --data=DIR
    python -m experiments.verdicts --again=hmda,sst2 --arms=rr,cd_grab --data=DIR

Without --run and --again nothing is trained: everything comes from the records in experiments/runs,
in seconds. The claims are the rows of experiments/verdict_parts/claims.py, and the verdicts what
rule.py there makes of their effects. A run recorded again with more seeds is looked at again, at
the level of that look.

--run=undecided trains further seeds of recorded runs, in pairs, the cheapest look first, until
nothing is undecided or the hours are spent; given again, it goes on. --again trains a recorded seed
anew and shows how far it is from its record. --data is the folder of all tasks' folders, named as
in the rows of RUNS.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from experiments.advice_parts import recorded
from experiments.flags import definer
from experiments.processes import distributed
from experiments.results import archive, records
from experiments.verdict_parts import again, page, picture, runs, undecided

FLAGS = flags.FLAGS
README = pathlib.Path(__file__).parent / "README.md"
PICTURES = README.parents[1] / "docs"
PAGES = (README, PICTURES / "results.md")
BEGIN = "<!-- begin: written by python -m experiments.verdicts -->"
END = "<!-- end: written by python -m experiments.verdicts -->"


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define, switch, text = definer(values), flags.DEFINE_bool, flags.DEFINE_string
    define(switch, "check", False, "write nothing; fail if a page is out of date")
    define(switch, "pictures", False, "draw the pictures of the runs of orders too")
    define(text, "record", None, "an output folder to keep in experiments/runs")
    define(text, "name", None, "of the run to record, as in RUNS")
    define(text, "command", None, "that made it, DIR for the data")
    define(flags.DEFINE_list, "again", [], "recorded runs of which a seed is trained again")
    define(flags.DEFINE_list, "arms", [], "of --again; the first of each run if unset")
    define(flags.DEFINE_enum, "run", None, "train more seeds of these", ["undecided"])
    define(flags.DEFINE_float, "hours", 8.0, "that may be spent on it", lower_bound=0.0)
    define(flags.DEFINE_float, "most_hours", 24.0, "that a single look may take", lower_bound=0.0)
    define(flags.DEFINE_list, "names", [], "of the runs that may be continued; all if unset")
    define(text, "data", None, "folder of all tasks' data")
    define(text, "results", "results/verdicts", "for what is not recorded yet")
    define(switch, "delays", False, "wait for slow loads, as claims about seconds ask for")
    define(flags.DEFINE_integer, "side_by_side", 1, "runs trained in one program", lower_bound=1)


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


def generated(folder=archive.FOLDER) -> tuple[str, str]:
    """Everything between the markers of `PAGES`."""
    recorded = runs.load(folder)
    found = page.rows(recorded)
    parts = [f"{page.count(found)}.", page.table(found, recorded), "## Runs"]
    sections = [runs.section(name, own, folder) for name, own in recorded.items()]
    return "\n\n".join(parts + sections), page.results(found)


def replace_section(text: str, body: str) -> str:
    """The text with the body between its markers; ValueError if it has not each of them once."""
    if (text.count(BEGIN), text.count(END)) != (1, 1) or text.index(BEGIN) > text.index(END):
        raise ValueError(f"a page needs the lines {BEGIN!r} and {END!r} once, in this order.")
    return f"{text.split(BEGIN)[0]}{BEGIN}\n\n{body}\n\n{END}{text.split(END)[1]}"


def check(pages: Sequence[pathlib.Path] = PAGES, folder=archive.FOLDER) -> None:
    """Raises ValueError if a page is not that of the recorded runs."""
    for path, body in zip(pages, generated(folder), strict=True):
        text = path.read_text(encoding="utf-8")
        if replace_section(text, body) != text:
            raise ValueError(
                f"{path.name} is not that of the recorded runs: write it by "
                "python -m experiments.verdicts."
            )


def main(argv: Sequence[str]) -> None:
    del argv
    if FLAGS.check:
        try:
            check()
        except ValueError as error:
            sys.exit(str(error))
        print("The pages are up to date.")
        return
    if FLAGS.again:
        print(again.compare(FLAGS.again, data=FLAGS.data or "", arms=FLAGS.arms))
        return
    if FLAGS.record:
        print(f"Recorded in {record(FLAGS.record, FLAGS.name, FLAGS.command)}")
    stopped = 0
    if FLAGS.run:
        stopped = undecided.run(
            hours=FLAGS.hours, data=FLAGS.data or "", results=FLAGS.results, names=FLAGS.names,
            most_hours=FLAGS.most_hours, side_by_side=FLAGS.side_by_side, delays=FLAGS.delays,
        )  # fmt: skip
    write_pages()
    if stopped:
        distributed.say("Stopped and saved: the same command goes on.")
        sys.exit(128 + stopped)


def write_pages() -> None:
    recorded = runs.load()
    picture.draw(page.rows(recorded), str(PICTURES / page.PICTURE))
    if FLAGS.pictures:
        runs.draw(recorded, PICTURES)
    for path, body in zip(PAGES, generated(), strict=True):
        records.write_whole(str(path), replace_section(path.read_text(encoding="utf-8"), body))
        print(f"Written: {path.name}, {len(body.splitlines())} lines")


if __name__ == "__main__":
    define_flags()
    app.run(main)
