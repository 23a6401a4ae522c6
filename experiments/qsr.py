r"""When should workers talk? Synchronisation rules x seeds on one task.

    python -m experiments.qsr                                   # digits, embedded, a minute
    python -m experiments.qsr --task=mnist_mlp --data_dir=DIR
    python -m experiments.qsr --task=cifar10_resnet8 --data_dir=DIR
    python -m experiments.qsr --task=cifar10_vit --data_dir=DIR
    python -m experiments.qsr --arms=parallel,qsr,qsr+int8,qsr+control+epoch

Every rule trains once at each peak learning rate and then, with the remaining seeds, at the best
two; the mean over seeds on half of the test set chooses between them, for one seed cannot. The
other half is reported. Under one seed all rules see the same examples in the same steps: all
examples, shuffled anew and dealt to the workers in every epoch. Writes metrics, plans, table.md,
comparison.png and report.html into --output_dir; the same command goes on where it was stopped.

docs/results/local_steps.md has the tables, with --seeds=3 --evaluations=10 for all but
digits. Deviations from Gu et al. 2024: small models on small sets, no augmentation, growth = alpha
/ peak rate fixed per setting, and workers of one device: seconds show computation and no network.
"""

from experiments.results import plots, report, tables
from experiments.results.statistics import Criterion
from experiments.study import study
from experiments.study.study import Study, arm_of
from experiments.tasks.metrics import METRICS

RULES = ("parallel", "accumulate", "constant", "post_local", "swap", "inverse", "qsr", "cubic")


def fit(study, task, recipe, values):
    """The metric is the task's own."""
    criterion = Criterion(f"valid/{task.metric}", METRICS[task.metric].lower)
    return study._replace(criterion=criterion)


STUDY = Study(
    "qsr",
    {name: arm_of(name) for name in RULES},
    recipe="digits_mlp",
    criterion=Criterion("valid/accuracy", lower=False),
    columns=tables.SYNC_COLUMNS,
    panels=plots.SYNC_PANELS,
    sections=(report.rates_tried("rule"), report.against),
    fit=fit,
)


if __name__ == "__main__":
    study.main(STUDY)
