r"""Do the three decisions help each other? The factorial of order x sync x echo on one task.

    python -m experiments.combined                        # digits, embedded, a minute
    python -m experiments.combined --task=shakespeare_cosine --data_dir=DIR --seeds=3

Eight arms: --order against --baseline (D-RR), --sync against parallel, --echo against none. Every
arm trains once at each learning rate and then, with the remaining seeds, at its best two; the mean
over seeds of the last train loss chooses, or with --target=LOSS (above the optimum, where that is
known) of the steps until it is there. All arms take the same number of steps, under one seed from
the same parameters. Writes metrics, table*.md, comparison.png, effects.png and report.html into
--output_dir; the same command goes on where it was stopped.

Expected: docs/combined.md holds the tables of two tasks, with their commands.

Simulated workers show no network, and resident data no slow input: seconds are those of the
computation. --load_steps and --sync_steps price what they leave out, in steps of computation. With
--step_seconds the best runs are repeated with loads and syncs that take so long.
"""

import itertools
from collections.abc import Sequence

from absl import app
from absl import flags as absl_flags

from experiments.results import columns, factorial, plots, statistics
from experiments.results.statistics import Criterion
from experiments.study import cost, flags, study, tables
from experiments.study.study import Arm, Study, arm_of
from experiments.study.tables import ECHO_POLICIES

# The first level of every factor is what data-parallel training usually does.
FIRST = ("rr", "parallel", "none")


def arms_of(first: Sequence[str], second: Sequence[str]) -> dict[str, Arm]:
    """The eight arms of a factorial, of two levels (order, sync, echo); the first ones first."""
    levels = ("+".join(words) for words in itertools.product(*zip(first, second, strict=True)))
    return {words: arm_of(words) for words in levels}


STUDY = Study(
    "combined",
    arms_of(FIRST, ("cd_grab", "qsr", "diffusion+cosine")),
    recipe="digits_cosine",
    criterion=Criterion("train/loss"),
    columns=columns.COMBINED_COLUMNS,
    panels=plots.COMBINED_PANELS,
    sections=(factorial.target_line, factorial.effects_table, factorial.effects_picture),
)


def define_flags(values: absl_flags.FlagValues) -> None:
    define, number = flags.definer(values), absl_flags.DEFINE_float
    tables.define_flags(define, order="cd_grab", sync="qsr", echo="diffusion+cosine")
    text = "words of the first order; rr+dealt where --order is dealt"
    define(absl_flags.DEFINE_string, "baseline", "rr", text)
    define(number, "load_steps", 4.0, "priced: a load, in steps of computation")
    define(number, "sync_steps", 2.0, "priced: an all-reduce, in the same unit")
    define(number, "step_seconds", 0.0, "if not 0: loads and syncs are delayed by so many of these")


def fit(study, task, recipe, values):
    """The levels and the prices are those of the flags; a target ends the runs that are there."""
    criterion = study.criterion
    if recipe.target is not None:
        scalar = statistics.LOSS if task.optimum is None else statistics.ABOVE
        criterion = Criterion(scalar, when="target", target=recipe.target)
    first = (values.baseline, *FIRST[1:])
    second = tuple(tables.decisions(values).values())
    if same := set(first) & set(second):
        raise app.UsageError(f"--order, --sync, --echo name {same}: that is the first level.")
    if ECHO_POLICIES[second[2]].online:
        plans = [name for name, policy in ECHO_POLICIES.items() if not policy.online]
        raise app.UsageError(
            f"--echo is {values.echo}, which follows slow input, and data on the devices are not "
            f"slow: choose one of {', '.join(plans[1:])}."
        )
    machines = tuple(cost.machines(values.load_steps, values.sync_steps))
    sections = (*study.sections, factorial.priced_table(machines, cost.price))
    slow = {"speeds": (values.load_steps,), "sync_steps": values.sync_steps}
    return study._replace(
        arms=arms_of(first, second), criterion=criterion, sections=sections, machines=machines,
        paced=False, **(slow if values.step_seconds else {}),
    )  # fmt: skip


if __name__ == "__main__":
    study.main(STUDY, define=define_flags, fit=fit)
