r"""Does a coordinated example order need fewer epochs than random reshuffling?

    python -m experiments.cd_grab  # digits, which are bundled: half a minute
    python -m experiments.cd_grab --long               # the whole table, in minutes
    python -m experiments.cd_grab --task=hmda --data_dir=DIR --seeds=5
    python -m experiments.cd_grab --task=mnist --model=lenet --data_dir=DIR --arms=rr,cd_grab
    python -m experiments.cd_grab --arms=rr,cd_grab,cd_grab+sketch64,cd_grab+walk

Trains every order at every learning rate with every seed. All orders start from the same
parameters and the same first permutations. Metrics, table.md, comparison.png and report.html are
written to --output_dir. The same command, given again, continues where it was stopped.

The target is the lowest point of D-RR's mean training loss over seeds, at D-RR's best learning
rate. Without --arms, --learning_rates and --seeds digits are compared briefly: three orders, three
learning rates and three seeds. The table has how many epochs each order takes to the target at its
fastest learning rate. --long is the whole comparison, with columns for D-RR's learning rate,
seconds, test accuracy and herding bound, and a second table of what each order gains at the end of
the runs. It continues in the --output_dir of the short one.

Deviations from Cooper et al. 2023: the optimum is computed, every order is also shown at its own
best learning rate, and independent balance and the unzip order are added as controls.
"""

from absl import flags as absl_flags

from experiments.compare import flags, study
from experiments.compare.arms import arm_of
from experiments.compare.study import Study
from experiments.report import tables
from experiments.report.plots import Panel
from experiments.report.statistics import Criterion
from experiments.report.tables import Column, times
from syncopate.refusals import UserError

# The short comparison of digits: among its rates is every order's best of the long one.
SHORT = {"arms": ["rr", "id_pair", "cd_grab"], "learning_rates": [0.125, 0.25, 1.0], "seeds": 3}
COLUMNS = (
    tables.arm("order"),
    tables.rate("best lr"),
    Column("best {objective}", "{:.2e}", "lowest"),
    Column("epochs to {base}'s best, its lr", "{:.0f}", "to epoch", at="baseline"),
    tables.fastest_rate("own lr"),
    Column("epochs, own lr", "{:.0f}", "to epoch", at="fastest"),
    Column("times fewer", times, "to epoch", at="fastest", than="ratio"),
    Column("seconds, own lr", "{:.2f}", "to seconds", at="fastest"),
    Column("{metric}", "{:.4f}", "metric"),
    Column("last bound L∞", "{:.2f}", "bound/linf"),
)
FIRST = Panel("objective", ("epoch",), fastest=True)
FIRST_COLUMNS = (
    tables.arm("order"),
    Column("epochs to {base}'s best", "{:.0f}", "to epoch", at="fastest"),
    tables.fastest_rate("at lr"),
    Column("times fewer", times, "to epoch", at="fastest", than="ratio"),
    Column("lowest {objective}", "{:.1e}", "lowest"),
    tables.rate("reached at lr"),
)


def define_flags(values: absl_flags.FlagValues) -> None:
    text = "digits under all orders, learning rates and columns, and five seeds"
    with flags.shown(values):
        absl_flags.DEFINE_bool("long", False, text, values)


def is_short(values: absl_flags.FlagValues) -> bool:
    """Whether no flag chooses what is compared."""
    return values.task == "digits" and not values.long and not any(values[n].present for n in SHORT)


def default(values: absl_flags.FlagValues) -> None:
    if values.long and values.task != "digits":
        raise UserError("--long is for --task=digits: leave it out, as other tasks are not cut.")
    if is_short(values):
        for name, value in SHORT.items():
            setattr(values, name, value)


def chosen_rates(comparison) -> str:
    """Section: where the learning rates of the short comparison are from."""
    del comparison
    rates = ", ".join(f"{rate:g}" for rate in SHORT["learning_rates"])
    return (
        f"The learning rates {rates} were chosen knowing the long comparison (--long): every "
        "order's best of it is among them."
    )


def fit(study, task, recipe, values):
    """The study with the columns and panels of the chosen comparison."""
    del task, recipe
    if not is_short(values):
        return study
    return study._replace(
        columns=FIRST_COLUMNS,
        panels=(FIRST,),
        sections=(chosen_rates, *study.sections[1:]),
    )


STUDY = Study(
    "cd_grab",
    {name: arm_of(name) for name in ("rr", "unzip", "id_mean", "id_pair", "cd_grab")},
    recipe="digits",
    criterion=Criterion("train/loss", lower=True, when="lowest"),
    finalists=None,
    columns=COLUMNS,
    panels=(Panel("objective"), Panel("metric"), Panel("bound/linf")),
    sections=(tables.gains, tables.diverged_rates),
    define=define_flags,
    default=default,
    fit=fit,
    question=__doc__,
)


if __name__ == "__main__":
    study.main(STUDY)
