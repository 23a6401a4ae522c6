r"""Compares data echoing policies when input is slow: arms x loading speeds x seeds on one task.

    python -m experiments.echoing  # digits, which are bundled: over half an hour
    python -m experiments.echoing --task=mnist_lenet --data_dir=DIR
    python -m experiments.echoing --task=cifar10_resnet8_race --data_dir=DIR
    python -m experiments.echoing --task=cifar10_mobilenet_race --data_dir=DIR
    python -m experiments.echoing --task=shakespeare_race --data_dir=DIR

Measures the seconds, loads, steps and rounds until the test metric reaches a target. A load takes
R times t_step, the time of a step without echo (measured at the start, or --step_seconds); a real
loader thread waits that long. The echo factor e is R, and 2 at R = 1, where no echo is free; p
falls from 1 to 1/e over the setting's horizon. Workers average once per load unless the arm says
otherwise.

Every arm is tuned at every R on the validation half of the test set: seed 0 at every learning
rate, then all seeds at the best two. The delay is left out unless the arm's decisions depend on it.
The arm is then run with the delay and all seeds, and the other half is reported. Under one seed all
arms see the same batches in the same loads.

Writes metrics, table.md and pictures into --output_dir; give the command again to resume.
docs/results/echoing.md holds the tables of these commands and explains their numbers.
"""

import numpy as np

from experiments.compare import study
from experiments.compare.arms import Arm, arm_of
from experiments.compare.study import Study
from experiments.data.metrics import METRICS
from experiments.report import tables
from experiments.report.plots import Panel
from experiments.report.statistics import Comparison, Criterion, column, frame, interval
from experiments.report.tables import Column, times
from syncopate.refusals import UserError

USUAL = {"sync": "every_load"}  # unless an arm says otherwise


def by_words(*names: str) -> dict[str, Arm]:
    """Arms named by their words, with the usual synchronisation."""
    return {name: arm_of(name, **USUAL) for name in names}


ARMS = {
    "none": Arm("no echo"),
    "larger_lr": Arm("no echo, lr × e", rate_factor=lambda run: run.recipe.echo_factor),
    "accumulate": Arm("gradient accumulation", sync="accumulate_factor"),
    "local": Arm("local steps, no echo", sync="every_factor"),
    **by_words("fixed", "bernoulli"),
    **by_words("bernoulli+linear", "bernoulli+multistep", "bernoulli+cosine"),
    "algorithm2": Arm("Bernoulli, coins for syncs too", sync="coins", echo="bernoulli"),
    "bernoulli_every": Arm("Bernoulli, sync every step", echo="bernoulli"),
    **by_words("diffusion", "diffusion+linear", "diffusion+multistep", "diffusion+cosine"),
    "diffusion_every": Arm("error diffusion, sync every step", echo="diffusion"),
    "diffusion_coins": Arm("error diffusion, coins for syncs", sync="coins", echo="diffusion"),
    **by_words("measured"),
    "proximal": Arm("fixed factor, proximal", sync="every_load+proximal", echo="fixed"),
    "proximal_strong": Arm(
        "fixed factor, proximal, 10 λ", sync="every_load+proximal1", echo="fixed"
    ),
}


def mean_alone(values) -> str:
    return f"{interval(values)[0]:.2f}"


FASTER = Column("times faster than {base}", times, "to seconds", than="ratio")
LOADS, STEPS, ROUNDS = (
    Column(head, "{:.0f}", f"to {cost}", word="arrive")
    for head, cost in (("loads", "loads"), ("steps", "step"), ("rounds", "rounds"))
)
COLUMNS = (
    tables.arm("arm"),
    tables.rate("lr"),
    Column("seconds", "{:.2f}", "to seconds", word="arrive"),
    FASTER,
    LOADS,
    STEPS,
    ROUNDS,
    Column("ms per step", "{:.2f}", lambda runs: 1e3 * (runs.seconds / runs.step)),
    Column("loads per step", mean_alone, lambda runs: runs.loads / runs.step),
)
COUNTS = (  # of runs without a delay: their seconds mean nothing
    tables.arm("arm"),
    tables.rate("lr"),
    LOADS,
    Column("times fewer loads than {base}", times, "to loads", than="ratio"),
    STEPS,
    ROUNDS,
    Column("times fewer rounds", times, "to rounds", than="ratio"),
)


def times_faster(comparison: Comparison) -> str:
    """Section: how many times faster than the baseline an arm is at the target, by speed."""

    def cell(arm, speed):
        if (arm, speed) not in comparison.chosen:
            return "-"
        taken = column(frame(comparison, speed=speed), arm, "to seconds")
        if np.isinf(taken).any():
            return tables.show(taken, "", "arrive")
        return FASTER.cell(comparison, comparison.chosen[arm, speed])

    head = f"times faster than {next(iter(comparison.arms.values()))}"
    return tables.markdown(
        [
            {head: label} | {f"R = {speed:g}": cell(arm, speed) for speed in comparison.speeds}
            for arm, label in comparison.arms.items()
        ]
    )


def fit(study, task, recipe, values):
    """Takes the metric and the target from the setting, and leaves out seconds without a delay."""
    del task
    if recipe.target is None:
        raise UserError(
            f"--task={values.task} has no target: pass --target, a value of its --metric."
        )
    metric = METRICS[recipe.metric]
    criterion = Criterion(f"valid/{recipe.metric}", metric.lower, "target", recipe.target)
    study = study._replace(criterion=criterion)
    if values.step_seconds == 0:
        return study._replace(columns=COUNTS, sections=(tables.rates_tried,))
    return study


STUDY = Study(
    "echoing",
    ARMS,
    recipe="digits_wide",
    criterion=Criterion("valid/accuracy", lower=False, when="target"),
    columns=COLUMNS,
    panels=(Panel("metric", ("loads", "step")), Panel("metric", ("seconds", "rounds"))),
    sections=(times_faster, tables.rates_tried),
    fit=fit,
    usual=USUAL,
    speeds=(1, 2, 4, 8),
    seeds=3,
    question=__doc__,
)


if __name__ == "__main__":
    study.main(STUDY)
