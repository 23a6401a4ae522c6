"""What arms gain at the end of their runs."""

import math

import pytest

from experiments.results import gains
from experiments.results.statistics import Criterion, compare

LABELS = {"rr": "D-RR", "cd_grab": "CD-GraB"}


def compared(curves, scalar="train/loss", averaged=None):
    """Of {arm: {seed: losses after epochs 1, 2, ...}}, and the same of averaged weights."""
    records = [
        {"arm": arm, "speed": None, "learning_rate": 0.1, "seed": seed, "phase": "run",
         "step": 10 * epoch, "epoch": float(epoch), "test/loss": loss, scalar: loss}
        | ({f"{scalar}/averaged": averaged[arm][seed][epoch - 1]} if averaged else {})
        for arm, by_seed in curves.items() for seed, losses in by_seed.items()
        for epoch, loss in enumerate(losses, 1)
    ]  # fmt: skip
    return compare(records, {arm: LABELS[arm] for arm in curves}, Criterion(scalar, when="lowest"))


RR = {0: [8.0, 4.0, 2.0, 1.0], 1: [9.0, 5.0, 3.0, 2.0]}
FASTER = {0: [4.0, 1.0, 0.75, 0.5], 1: [5.0, 2.0, 1.75, 1.5]}  # in half the epochs, by half a unit


@pytest.mark.parametrize(
    "target,at", [(9.0, 1.0), (4.0, 3.0), (3.0, 4.0), (2.0, 5.0), (1.0, math.inf)]
)
def test_a_curve_arrives_between_its_points(target, at):
    assert gains.arrival([1, 3, 5, 7], [8.0, 4.0, 2.0, 5.0], target) == at


def test_a_curve_that_is_not_finite_at_first_arrives_where_it_is():
    assert gains.arrival([1, 2], [math.nan, 1.0], 3.0) == 2


def cells(comparison):
    lines = gains.section(comparison).split("\n")
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_gains_are_paired_by_seed():
    head, _, base, own = cells(compared({"rr": RR, "cd_grab": FASTER}))
    assert head[4:] == ["train loss", "less D-RR", "times fewer epochs at this lr (geometric mean)"]
    assert base == ["D-RR", "last", "0.1", "2", "1.5000 ± 6.3531", "-", "1.00"]
    assert own[5:] == ["-0.5000 ± 0.0000", "2.00"]


def test_gains_of_averaged_weights_follow_and_count_the_seeds_that_arrive():
    better = {seed: [x / 2 for x in losses] for seed, losses in RR.items()}
    late = {0: [8.0, 4.0, 2.0, 1.5], 1: [5.0, 2.0, 1.75, 1.5]}
    found = cells(compared(
        {"rr": RR, "cd_grab": FASTER}, averaged={"rr": better, "cd_grab": late}
    ))  # fmt: skip
    assert [row[1] for row in found[2:]] == ["last", "last", "averaged", "averaged"]
    assert found[-1][-1] == "0 of 2 arrive" and found[-2][4].startswith("0.7500")


def test_a_baseline_alone_or_one_that_diverged_has_no_gains():
    assert gains.section(compared({"rr": RR})) == ""
    nothing = {seed: [math.nan] * 4 for seed in RR}
    assert cells(compared({"rr": nothing, "cd_grab": FASTER}))[-1][5:] == ["-", "0 of 2 arrive"]
