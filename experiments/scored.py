r"""Does a curriculum lower the loss, and does that depend on the decay of the rate and on averages?

    python -m experiments.scored --data_dir=DIR                                # a constant rate
    python -m experiments.scored --data_dir=DIR --schedule=linear              # down to zero
    python -m experiments.scored --data_dir=DIR --schedule=linear --floor=0.3  # a moderate decay

Windows of text are sorted by the loss of a bigram model of them, from easy to hard, in the patterns
of Dai et al. 2026 (arXiv 2605.30334) with their published defaults. Luo et al. 2025 (arXiv
2511.18903) find that a curriculum gains where the rate decays little and the weights are averaged.
So both kinds of weights are evaluated in all runs: the last ones, and the best of exponential
moving averages. Each arm has its own best rate, by half of the test windows; the other half is
reported.
"""

from collections.abc import Mapping

from experiments.compare import study
from experiments.compare.arms import arm_of
from experiments.compare.study import Study
from experiments.report import tables
from experiments.report.plots import Panel
from experiments.report.statistics import Comparison, Criterion
from experiments.report.tables import Column

ORDERS = (
    "rr+dealt",
    "scored",
    "scored+hard",
    "scored+folded",
    "scored+zigzag",
    "scored+segments",
    "scored+stairs",
    "scored+saw",
)
COLUMNS = (
    tables.arm("order"),
    tables.rate("best lr"),
    tables.SEEDS,
    Column("test loss", "{:.4f}", "test/loss"),
    Column("less {base}", "{:+.4f}", "test/loss", than="difference"),
    Column("{train_loss}", "{:.4f}", "train/loss"),
)
STUDY = Study(
    "scored",
    {name: arm_of(name) for name in ORDERS},
    recipe="scored",
    criterion=Criterion("valid/loss", lower=True, when="last"),
    finalists=1,
    columns=COLUMNS,
    panels=(Panel("test/loss", ("epoch",)),),
    sections=(tables.diverged_rates,),
    question=__doc__,
)


def summary(comparisons: Mapping[str, Comparison]) -> str:
    """Markdown: test losses of the baseline and what others end above it, last and averaged."""
    loss, above = COLUMNS[3:5]
    rows = {label: {"order": label} for label in (arm.label for arm in STUDY.arms.values())}
    for name, comparison in comparisons.items():
        for weights, of in (("last", comparison), ("averaged", comparison.averaged)):
            for label in rows:
                rows[label][f"{name}, {weights}"] = "-"
            for i, chosen in enumerate(of.at()):
                cell = (above if i else loss).cell(of, chosen)
                rows[chosen.label][f"{name}, {weights}"] = cell
    return tables.markdown([*rows.values()])


if __name__ == "__main__":
    study.main(STUDY)
