"""Studies: comparisons of arms, their flags, and the `main` that runs any of them.

A study is one file: a table of arms, a `Study`, and `study.main(STUDY)`. All have one protocol,
that of `search`; `commands` carries it out, needs JAX, and is imported when a study runs.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from absl import flags as absl_flags

from experiments import entry
from experiments.compare import flags
from experiments.compare.arms import Arm
from experiments.data.base import COUNT, SECONDS, SLOWNESS
from experiments.report.statistics import Criterion


class Study(NamedTuple):
    """A comparison: its arms, its setting and its question."""

    name: str  # of its folders
    arms: Mapping[str, Arm]  # by name, the baseline first; --arms takes others by their words
    recipe: str  # what --task is if unset, a name of RECIPES or TASKS
    criterion: Criterion  # what chooses an arm's rate; a train loss less its minimum, if known
    columns: Sequence  # these three: as of `page.write`
    panels: Sequence
    sections: Sequence[Callable] = ()
    define: Callable[[absl_flags.FlagValues], None] = lambda values: None  # its own flags
    default: Callable[[absl_flags.FlagValues], None] = lambda values: None  # sets unset flags
    fit: Callable = lambda study, task, recipe, values: study  # adapts it to the flags
    speeds: tuple[float, ...] = ()  # R of slow input; () if input is not slow
    paced: bool = True  # batches are used as often as R says, and runs are longer by it
    sync_steps: float = 0.0  # with slow input: the delay of a sync, in steps
    finalists: int | None = 2  # learning rates that run with all seeds; None: all
    seeds: int = 5  # what --seeds is if unset
    usual: Mapping[str, str] = {}  # decisions that the words of an arm leave open
    question: str | None = None  # the docstring of its file: the first line heads the page
    metrics: Collection[str] = ()  # of METRICS, recorded beside those that it names elsewhere


def define_flags(study: Study, values: absl_flags.FlagValues) -> None:
    """Defines the flags of a study: its setting, how it runs, and what is compared."""
    flags.define(values, "task", "setting", "run", "forecast", task=study.recipe)
    with flags.shown(values, f"{entry.GROUP}the comparison"):
        text = f"of {', '.join(study.arms)}, or any words, as cd_grab+sketch64+qsr; unset: these"
        absl_flags.DEFINE_list("arms", None, text, values)
        flags.define_value(values, COUNT, "seeds", study.seeds, "runs per arm at its best rates")
        if study.speeds:
            text = "R, a load's time in steps"
            flags.define_list(values, SLOWNESS, "speeds", [*study.speeds], text)
            text = "behind the delays; measured if unset; 0: no delay, for loads and steps alone"
            flags.define_value(values, SECONDS, "step_seconds", None, text)
    study.define(values)


def main(study: Study) -> None:
    """Runs a study from the command line, as `python -m` does."""

    def run(values):
        from experiments.compare import commands

        commands.run_study(study, values)

    entry.main(functools.partial(define_flags, study), run, defaults=flags.defaults)
