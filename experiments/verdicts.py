r"""Which claims of the papers do our runs bear out? docs/results.md, and experiments/README.md.

    python -m experiments.verdicts                      # writes both anew, and their picture
    python -m experiments.verdicts --check              # fails if they are not up to date
    python -m experiments.verdicts --pictures           # and draws docs/orders_*.png
    python -m experiments.verdicts --record=results/cd_grab_hmda --name=hmda \
        --command="python -m experiments.cd_grab --task=hmda --data_dir=DIR"
    python -m experiments.verdicts --run=undecided --hours=8 --data=DIR
    python -m experiments.verdicts --again=hmda,sst2 --arms=rr,cd_grab --data=DIR

Without --run and --again nothing is trained: everything comes from the records in experiments/runs,
in seconds. The claims are the rows of experiments/results/claims.py, and the verdicts what rule.py
there makes of their effects. A run recorded again with more seeds is looked at again, at the level
of that look.

--run=undecided trains further seeds of recorded runs, in pairs, the cheapest look first, until
nothing is undecided or the hours are spent; given again, it goes on. --again trains a recorded seed
anew and shows how far it is from its record. --data is the folder of all tasks' folders, named as
in the rows of RUNS.
"""

import functools
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags

from experiments import forecast, more_seeds
from experiments.cluster import files, processes
from experiments.results import archive, verdict_picture
from experiments.results import claims as claimed
from experiments.results import verdict_page as written
from experiments.study import factorials, recipes
from experiments.study.flags import definer
from experiments.study.tables import SYNC_RULES

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
    define(flags.DEFINE_list, "names", [], "of the runs that may be continued; all if unset")
    define(text, "data", "", "folder of all tasks' data")
    define(switch, "delays", False, "wait for slow loads, as claims about seconds ask for")


@functools.cache
def claims() -> tuple:
    """All of them, with QSR's plans of tens of thousands of rounds."""

    def plan_of(name):
        return SYNC_RULES["qsr"].plan(forecast.config_of(recipes.planned(name)[1]))

    return claimed.claims(plan_of)


def record(results: str, name: str, command: str, folder=archive.FOLDER) -> pathlib.Path:
    """Keeps a finished output folder as a run of `RUNS`, as of `archive.record`."""
    if name not in claimed.RUNS and not factorials.is_name(name):
        raise ValueError(
            f"--name is {name!r}: it must be one of {', '.join(claimed.RUNS)}, or of a factorial, "
            "as map_TASK_WxB_eUSES or slow_TASK_eUSES. Add a row to RUNS in "
            "experiments/results/claims.py for a new run."
        )
    target = pathlib.Path(folder) / name
    archive.record(results, target, command)
    return target


def generated(folder=archive.FOLDER) -> tuple[str, str]:
    """Everything between the markers of `PAGES`."""
    recorded = written.load(folder)
    rows = written.rows(recorded, claims())
    return written.page_of_claims(rows, recorded, folder), written.page_of_results(rows)


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


def write_pages(*, pictures: bool = False) -> None:
    recorded = written.load()
    rows = written.rows(recorded, claims())
    verdict_picture.draw(rows, str(PICTURES / written.PICTURE))
    if pictures:
        written.draw_orders(recorded, PICTURES)
    for path, body in zip(PAGES, generated(), strict=True):
        files.write_whole(str(path), replace_section(path.read_text(encoding="utf-8"), body))
        print(f"Written: {path.name}, {len(body.splitlines())} lines")


def main(argv: Sequence[str]) -> None:
    del argv
    if FLAGS.check:
        try:
            check()
        except ValueError as error:
            sys.exit(str(error))
        return print("The pages are up to date.")
    if FLAGS.again:
        return print(more_seeds.train_again(FLAGS.again, data=FLAGS.data, arms=FLAGS.arms))
    if FLAGS.record:
        print(f"Recorded in {record(FLAGS.record, FLAGS.name, FLAGS.command)}")
    stopped = 0
    if FLAGS.run:
        stopped = more_seeds.decide(
            claims(), hours=FLAGS.hours, data=FLAGS.data, names=FLAGS.names, delays=FLAGS.delays
        )
    write_pages(pictures=FLAGS.pictures)
    if stopped:
        processes.say("Stopped and saved: the same command goes on.")
        sys.exit(128 + stopped)


if __name__ == "__main__":
    define_flags()
    app.run(main)
