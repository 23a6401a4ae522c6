r"""Does a coordinated example order need fewer epochs than random reshuffling?

    python -m experiments.cd_grab                      # digits, embedded, about a minute
    python -m experiments.cd_grab --task=hmda --data_dir=DIR --seeds=5
    python -m experiments.cd_grab --task=mnist --model=lenet --data_dir=DIR --arms=rr,cd_grab

Trains every order at every learning rate with every seed, from the same first orders, and writes
metrics, table.md, comparison.png and report.html into --output_dir. The same command, given again,
goes on where it was stopped. An order's best rate is that whose mean over seeds goes lowest.

Expected on digits (32 workers, 5 seeds): see the table in the README. Deviations from Cooper et
al. 2023: the optimum is computed, every order is also shown at its own best learning rate, and
independent balance and the unzip order stand beside as controls.
"""

from experiments.results import columns, plots
from experiments.results.statistics import Criterion
from experiments.studies import study
from experiments.studies.study import Arm, Study
from experiments.studies.tables import ORDERS
from experiments.training.config import EXAMPLES

# D-RR, the baseline, first. Examples that are dealt one by one are no units of any order.
ARMS = {name: Arm(row.label, order=name) for name, row in ORDERS.items() if row.deals != EXAMPLES}

STUDY = Study(
    "cd_grab",
    ARMS,
    recipe="digits",
    criterion=Criterion("train/loss", lower=True, when="lowest"),
    finalists=None,
    columns=columns.ORDER_COLUMNS,
    panels=plots.ORDER_PANELS,
    sections=(columns.diverged_rates,),
    default=("rr", "unzip", "id_mean", "id_pair", "cd_grab"),
)


if __name__ == "__main__":
    study.main(STUDY)
