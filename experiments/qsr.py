r"""Compares rules for when workers synchronise: rules x seeds on one task.

    python -m experiments.qsr  # digits, which are bundled: a minute
    python -m experiments.qsr --task=cifar10_vit --data_dir=DIR  # or cifar10_resnet8, mnist_mlp
    python -m experiments.qsr --arms=parallel,qsr,qsr+int8,qsr+control+epoch

Every rule is trained once at each peak learning rate, then with the remaining seeds at the best
two. The mean over seeds on half of the test set chooses between these two, because one seed is too
noisy; the other half is reported. Under one seed all rules see the same examples in the same steps:
all examples, reshuffled and dealt to the workers in every epoch. Writes metrics, plans, table.md,
comparison.png and report.html into --output_dir; give the command again to resume.

docs/results/local_steps.md holds the tables of these commands, with --seeds=3 --evaluations=10 for
all but digits. Differences from Gu et al. 2024: small models on small sets, no augmentation, growth
= alpha / peak rate fixed per setting, and all workers on one device, so that seconds contain no
network time.
"""

from experiments.compare import study
from experiments.compare.arms import arm_of
from experiments.compare.study import Study
from experiments.data.metrics import METRICS
from experiments.report import plots, tables
from experiments.report.statistics import Criterion

RULES = ("parallel", "accumulate", "constant", "post_local", "swap", "inverse", "qsr", "cubic")


def fit(study, task, recipe, values):
    """Takes the metric from the task."""
    criterion = Criterion(f"valid/{task.metric}", METRICS[task.metric].lower)
    return study._replace(criterion=criterion)


STUDY = Study(
    "qsr",
    {name: arm_of(name) for name in RULES},
    recipe="digits_mlp",
    criterion=Criterion("valid/accuracy", lower=False),
    columns=tables.SYNC_COLUMNS,
    panels=plots.SYNC_PANELS,
    sections=(tables.rates_tried, tables.baseline_differences),
    fit=fit,
    question=__doc__,
)


if __name__ == "__main__":
    study.main(STUDY)
