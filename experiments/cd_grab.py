r"""Does a coordinated example order need fewer epochs than random reshuffling?

    python -m experiments.cd_grab                      # digits, embedded, about a minute
    python -m experiments.cd_grab --task=hmda --data_dir=DIR --seeds=5
    python -m experiments.cd_grab --task=mnist --model=lenet --data_dir=DIR --arms=rr,cd_grab
    python -m experiments.cd_grab --arms=rr,cd_grab,cd_grab+sketch64,cd_grab+walk

Trains every order at every learning rate with every seed, from the same first orders, and writes
metrics, table.md, comparison.png and report.html into --output_dir. The same command, given again,
goes on where it was stopped. An order's best rate is that whose mean over seeds goes lowest.

Expected on digits (32 workers, 5 seeds): see the table in the README. Deviations from Cooper et
al. 2023: the optimum is computed, every order is also shown at its own best learning rate, and
independent balance and the unzip order stand beside as controls.
"""

from experiments.results import plots, report, tables
from experiments.results.statistics import Criterion
from experiments.study import study
from experiments.study.study import Study, arm_of

STUDY = Study(
    "cd_grab",
    {name: arm_of(name) for name in ("rr", "unzip", "id_mean", "id_pair", "cd_grab")},
    recipe="digits",
    criterion=Criterion("train/loss", lower=True, when="lowest"),
    finalists=None,
    columns=tables.ORDER_COLUMNS,
    panels=plots.ORDER_PANELS,
    sections=(report.diverged_rates,),
)


if __name__ == "__main__":
    study.main(STUDY)
