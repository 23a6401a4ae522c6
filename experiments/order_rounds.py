r"""Does an order keep its gain where workers meet seldom? Orders x rules on one task.

    python -m experiments.order_rounds                        # digits, embedded, two minutes
    python -m experiments.order_rounds --workers=4 --units_per_step=16 --h_base=24

Every order of --orders trains under every rule of --rules, once at each learning rate and then,
with the remaining seeds, at its best two; the mean over seeds of the last train loss chooses. The
target is the highest of all last train losses. --arms=ORDER+RULE,.. takes some of them. Writes
metrics, table.md, comparison.png and report.html into --output_dir.

Expected: docs/orders_and_local_steps.md holds the tables, beside what `two_errors` predicts.
"""

import itertools

from absl import flags as absl_flags

from experiments import flags
from experiments.results import columns, factorial, plots
from experiments.results.statistics import Criterion
from experiments.studies import study
from experiments.studies.study import Arm, Study
from experiments.studies.tables import ORDERS, SYNC_RULES

ASKED = ("rr", "cd_grab"), ("parallel", "constant")


def arms_of(orders, rules) -> dict[str, Arm]:
    """Every order under every rule."""
    return {
        f"{order}+{rule}": Arm(f"{ORDERS[order].label} + {SYNC_RULES[rule].label}", order, rule)
        for rule, order in itertools.product(rules, orders)
    }


STUDY = Study(
    "order_rounds",
    arms_of(*ASKED),
    recipe="digits_cosine",
    criterion=Criterion("train/loss"),
    columns=columns.COMBINED_COLUMNS,
    panels=plots.COMBINED_PANELS,
    sections=(factorial.target_line,),
)


def define_flags(values: absl_flags.FlagValues) -> None:
    define, names = flags.definer(values), absl_flags.DEFINE_list
    define(names, "orders", [*ASKED[0]], f"of {', '.join(ORDERS)}")
    define(names, "rules", [*ASKED[1]], f"of {', '.join(SYNC_RULES)}")


def fit(study, task, recipe, values):
    """The arms are those of the flags."""
    del task, recipe
    orders = flags.names_of(values, "orders", ORDERS)
    return study._replace(arms=arms_of(orders, flags.names_of(values, "rules", SYNC_RULES)))


if __name__ == "__main__":
    study.main(STUDY, define=define_flags, fit=fit)
