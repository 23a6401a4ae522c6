r"""Does a coordinated example order need fewer epochs than random reshuffling?

    python -m experiments.cd_grab                      # digits, which are bundled: 25 seconds
    python -m experiments.cd_grab --long               # the whole table: two minutes
    python -m experiments.cd_grab --task=hmda --data_dir=DIR --seeds=5
    python -m experiments.cd_grab --task=mnist --model=lenet --data_dir=DIR --arms=rr,cd_grab
    python -m experiments.cd_grab --arms=rr,cd_grab,cd_grab+sketch64,cd_grab+walk

Trains every order at every learning rate with every seed. All orders start from the same
parameters and the same first permutations. Metrics, table.md, comparison.png and report.html are
written to --output_dir. The same command, given again, continues where it was stopped.

The target is the lowest point of D-RR's mean training loss over seeds, at D-RR's best learning
rate. The table shows how many epochs each order takes to reach it, at the learning rate at which
that order is fastest. --long adds the controls (independent mean and the unzip order), two
learning rates, two seeds, and the columns for D-RR's learning rate, seconds, test accuracy and
herding bound. Its runs include those of the short table, so that both can use one --output_dir.

Deviations from Cooper et al. 2023: the optimum is computed, every order is also shown at its own
best learning rate, and independent balance and the unzip order are added as controls.
"""

from absl import flags as absl_flags

from experiments.results import plots, report, tables
from experiments.results.statistics import Criterion
from experiments.study import flags, study
from experiments.study.study import Study, arm_of

SHORT = {"arms": ["rr", "id_pair", "cd_grab"], "seeds": 3}
RATES = {"digits": ["0.125", "0.25", "1"]}  # among them every order's best of the long table


def define_flags(values: absl_flags.FlagValues) -> None:
    text = "all orders, learning rates and columns, and five seeds"
    flags.definer(values)(absl_flags.DEFINE_bool, "long", False, text)


def default(values: absl_flags.FlagValues) -> None:
    """Without --long, the flags that are unset ask for fewer runs."""
    rates = {"learning_rates": RATES[values.task]} if values.task in RATES else {}
    for name, value in (SHORT | rates).items():
        if not (values.long or values[name].present):
            setattr(values, name, value)


def fit(study, task, recipe, values):
    """The columns are those of the table that is asked for."""
    del task, recipe
    return study if values.long else study._replace(columns=tables.FIRST_ORDER_COLUMNS)


STUDY = Study(
    "cd_grab",
    {name: arm_of(name) for name in ("rr", "unzip", "id_mean", "id_pair", "cd_grab")},
    recipe="digits",
    criterion=Criterion("train/loss", lower=True, when="lowest"),
    finalists=None,
    columns=tables.ORDER_COLUMNS,
    panels=plots.ORDER_PANELS,
    sections=(report.diverged_rates,),
    define=define_flags,
    default=default,
    fit=fit,
)


if __name__ == "__main__":
    study.main(STUDY)
