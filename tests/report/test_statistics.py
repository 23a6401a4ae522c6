"""The protocol and its tables, compared with calculations by hand."""

import math

import numpy as np
import pytest

from experiments import cd_grab, combined, echoing
from experiments.compare import cost
from experiments.report import statistics, tables
from experiments.report.statistics import Criterion, compare, data_of
from tests.commands import rows_of

ARMS = {"rr": "D-RR", "cd_grab": "CD-GraB", "unzip": "unzip control"}
LOWEST = Criterion(when="lowest")


def cells(text):
    """{first cell of a row: {head: cell}} of a Markdown table."""
    return {next(iter(row.values())): row for row in rows_of(text)}


def run(arm, rate, seed, losses, *, phase="run", speed=None, diverged=None, **fields):
    """A run evaluated at every epoch of two steps, half a second each."""
    kept = [
        {"study": "s", "arm": arm, "order": arm, "sync": "parallel", "echo": "none",
         "speed": speed, "learning_rate": rate, "seed": seed, "phase": phase, "step": 2 * e,
         "epoch": e, "loads": 2 * e, "rounds": e, "allreduces": float(e), "seconds": 0.5 * e,
         "train/loss": loss, "test/accuracy": 0.5, "valid/accuracy": 1 - loss,
         "ended": e == len(losses) - 1, "diverged": None} | fields
        for e, loss in enumerate(losses)
    ]  # fmt: skip
    kept[-1]["diverged"] = diverged
    return kept


def both(arm, rate, losses, **fields):
    return [r for seed in (0, 1) for r in run(arm, rate, seed, losses, **fields)]


def test_epochs_to_the_baselines_best_are_counted():
    kept = [
        *both("rr", 0.1, [8, 4, 3, 2]),
        *both("rr", 0.2, [8, 9, 9, 9]),
        *both("cd_grab", 0.1, [8, 3, 2.5, 1]),
        *both("cd_grab", 0.2, [8, 1.5, 3, 3]),
        *run("unzip", 0.1, 0, [8, 7, 6, 5]),
        *run("unzip", 0.1, 1, [8, 4, 3, 2]),
    ]
    rows = cells(tables.table(compare(data_of(kept), ARMS, LOWEST), cd_grab.COLUMNS))
    rr, balanced, unzip = rows["D-RR"], rows["CD-GraB"], rows["unzip control"]
    assert rr["best lr"] == "0.1 (edge)" and rr["epochs, own lr"] == "3 ± 0"
    assert balanced["best lr"] == "0.1 (edge)" and balanced["own lr"] == "0.2 (edge)"
    assert balanced["epochs to D-RR's best, its lr"] == "3 ± 0"
    assert balanced["epochs, own lr"] == "1 ± 0" and balanced["times fewer"] == "3.00"
    assert balanced["seconds, own lr"] == "0.50 ± 0.00"
    assert unzip["epochs, own lr"] == "1 of 2" and unzip["times fewer"] == "-"


def test_averaged_weights_have_a_table_at_their_own_best_rates():
    def run_of(arm, rate, last, averaged):
        pairs = zip(both(arm, rate, last), 2 * averaged, strict=True)
        return [r | {"train/loss/averaged": a, "test/accuracy/averaged": 0.7} for r, a in pairs]

    kept = [
        *run_of("rr", 0.1, [8, 4, 3], [8, 4, 2]),
        *run_of("rr", 0.2, [8, 9, 9], [8, 2, 1]),
        *run_of("cd_grab", 0.1, [8, 3, 2], [8, 3, 2]),
        *run_of("cd_grab", 0.2, [8, 4, 4], [8, 1, 0.5]),
    ]
    compared = compare(data_of(kept), ARMS, LOWEST)
    last, title, averaged = tables.table(compared, cd_grab.COLUMNS).split("\n\n")
    alone = [{k: v for k, v in r.items() if not k.endswith("averaged")} for r in kept]
    assert last == tables.table(compare(data_of(alone), ARMS, LOWEST), cd_grab.COLUMNS)
    assert title == "Averaged weights, each arm at its best rate for them:"
    rows = [cells(text)["CD-GraB"] for text in (last, averaged)]
    assert [row["best lr"] for row in rows] == ["0.1 (edge)", "0.2 (edge)"]
    assert [row["best train loss"] for row in rows] == [
        "2.00e+00 ± 0.00e+00",
        "5.00e-01 ± 0.00e+00",
    ]
    assert [row["epochs, own lr"] for row in rows] == ["1 ± 0", "1 ± 0"]
    assert [row["times fewer"] for row in rows] == ["2.00", "2.00"]
    assert [row["test accuracy"] for row in rows] == ["0.5000 ± 0.0000", "0.7000 ± 0.0000"]
    assert cells(averaged)["D-RR"]["best lr"] == "0.2 (edge)"

    lost = run("cd_grab", 0.2, 1, [0], diverged="loss is nan")[-1]
    lost = {k: v for k, v in lost.items() if "/" not in k}  # such a record has no scalars
    of_averages = compare(data_of([*kept, lost]), ARMS, LOWEST).averaged
    assert of_averages.chosen["cd_grab", None].rate == 0.1


RR = {0: [8.0, 4.0, 2.0, 1.0], 1: [9.0, 5.0, 3.0, 2.0]}
FASTER = {0: [4.0, 1.0, 0.75, 0.5], 1: [5.0, 2.0, 1.75, 1.5]}  # in half the epochs, by half a unit


def gains_of(curves, averaged=None):
    """The cells of `gains`, of {arm: {seed: losses after epochs 1, 2, ...}} and of averages."""
    kept = [
        r
        | {"step": 10 * (r["epoch"] + 1), "epoch": r["epoch"] + 1}
        | ({"train/loss/averaged": averaged[arm][seed][r["epoch"]]} if averaged else {})
        for arm, by_seed in curves.items()
        for seed, losses in by_seed.items()
        for r in run(arm, 0.1, seed, losses)
    ]
    text = tables.gains(compare(data_of(kept), {arm: ARMS[arm] for arm in curves}, LOWEST))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n")]


def test_gains_at_the_end_are_paired_by_seed():
    head, _, base, row = gains_of({"rr": RR, "cd_grab": FASTER})
    assert head[4:] == ["train loss", "less D-RR", "times fewer epochs at this lr"]
    assert base == ["D-RR", "last", "0.1", "2", "1.5000 ± 6.3531", "-", "1.00"]
    assert row[5:] == ["-0.5000 ± 0.0000", "2.00"]
    assert gains_of({"rr": RR}) == [[]], "a baseline alone has none"
    nothing = {seed: [math.nan] * 4 for seed in RR}
    assert gains_of({"rr": nothing, "cd_grab": FASTER})[-1][5:] == ["-", "0 of 2 arrive"]


def test_gains_of_averaged_weights_follow_and_count_the_seeds_that_arrive():
    better = {seed: [x / 2 for x in losses] for seed, losses in RR.items()}
    late = {0: [8.0, 4.0, 2.0, 1.5], 1: [5.0, 2.0, 1.75, 1.5]}
    gains = gains_of({"rr": RR, "cd_grab": FASTER}, {"rr": better, "cd_grab": late})
    assert [row[1] for row in gains[2:]] == ["last", "last", "averaged", "averaged"]
    assert gains[-1][-1] == "0 of 2 arrive" and gains[-2][4].startswith("0.7500")


@pytest.mark.parametrize(
    "target,at", [(9.0, 1.0), (4.0, 3.0), (3.0, 4.0), (2.0, 5.0), (1.0, math.inf)]
)
def test_a_curve_arrives_between_its_points_that_are_finite(target, at):
    curve = zip([0, 1, 3, 5, 7], [None, 8.0, 4.0, 2.0, 5.0], strict=True)
    points = [{"seed": 0, "step": e, "epoch": e, "test/x": x} for e, x in curve]
    assert tables.arrival(data_of(points), "test/x", target) == at


def test_a_frame_has_a_row_per_run_and_pairs_two_arms_by_seed():
    kept = [
        *both("rr", 0.1, [8, 4, 2]),
        *run("rr", 0.1, 2, [8, 4, 3], timed=False),
        *run("cd_grab", 0.1, 1, [8, 1, 1]),
        *run("cd_grab", 0.1, 0, [8, 2, 0.5]),
        *run("cd_grab", 0.1, 3, [8, 8, 8]),
    ]
    compared = compare(data_of(kept), ARMS, Criterion(when="target", target=2.0))
    table = statistics.frame(compared)
    assert [*table.index] == [("rr", 0), ("rr", 1), ("rr", 2), *(("cd_grab", s) for s in (0, 1, 3))]
    assert table.loc["rr", "to epoch"].tolist() == [2, 2, math.inf]
    assert table.loc["rr", "seconds"].tolist()[:2] == [1, 1] and math.isnan(table.seconds["rr", 2])
    less = statistics.paired(table, "cd_grab", "rr", "train/loss")
    assert less.to_dict() == {0: -1.5, 1: -1.0}  # the seeds that both have
    logs = statistics.paired(table, "cd_grab", "rr", "to epoch", ratio=True)
    np.testing.assert_allclose(logs, np.log([2, 2]))
    assert statistics.paired(table, "cd_grab", "rr", "bound/linf").size == 0  # never measured
    assert statistics.paired(table, "unzip", "rr", "train/loss").size == 0  # never ran


def test_intervals_are_student_s_t():
    mean, half = statistics.interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.302652729911275 / math.sqrt(3), rel=1e-9)
    assert statistics.interval([0.1, 0.1, 0.1]) == (0.1, 0.0)
    assert all(np.isnan(statistics.interval([])))


def test_seed_0_chooses_finalists_and_the_mean_over_most_seeds_decides():
    last = Criterion("valid/accuracy", lower=False)
    first = [
        r
        for rate, loss in ((0.1, 0.3), (0.2, 0.1), (0.4, 0.2))
        for r in run("rr", rate, 0, [1, loss])
    ]
    assert statistics.finalists(data_of(first), last) == [0.2, 0.4, 0.1]
    assert statistics.best_rate(data_of(first), last) == 0.2
    more = run("rr", 0.2, 1, [1, 0.9]) + run("rr", 0.4, 1, [1, 0.2])
    assert statistics.best_rate(data_of(first + more), last) == 0.4


def of_rates(values, scalar="train/loss"):
    """Runs at rates: {rate: [last loss of seed 0, 1, ...]}."""
    return [
        r
        for rate, losses in values.items()
        for seed, loss in enumerate(losses)
        for r in run("rr", rate, seed, [9, loss])
    ]


@pytest.mark.parametrize(
    "values,best",
    [
        ({0.1: [0.5], 0.2: [1.0, 1.0]}, 0.1),  # a further seed of the worse one
        ({0.1: [0.5] * 5, 0.2: [1.0] * 6}, 0.1),
        ({0.1: [0.5] * 3, 0.2: [1.0] * 6, 0.4: [0.9] * 7}, 0.1),
        ({0.1: [0.5] * 3, 0.2: [0.4] * 6, 0.4: [0.9] * 7}, 0.2),
        ({0.1: [0.5], 0.2: [0.6, 0.1], 0.4: [0.9]}, 0.1),  # its good second seed has no rival
        ({0.1: [0.3, 0.9], 0.2: [0.4, 0.4], 0.4: [0.5]}, 0.2),  # 0.4 lost on the seed that it has
        ({0.1: [1.0, 0.1], 0.2: [0.9, 0.9, 0.0]}, 0.1),  # means 0.55 and 0.9 of the shared seeds
        ({0.1: [0.5, 0.5], 0.2: [0.5, 0.5, 0.9]}, 0.2),  # equal on both: the one with more seeds
    ],
)
def test_rates_are_compared_on_the_seeds_that_they_share(values, best):
    for sign in (1, -1):
        scalar = "train/loss" if sign > 0 else "valid/accuracy"
        criterion = Criterion(scalar, lower=sign > 0)
        assert statistics.best_rate(data_of(of_rates(values)), criterion) == best
    assert statistics.best_rate(data_of(of_rates(values)), LOWEST) == best
    reach = Criterion(when="target", target=0.0)  # none arrives but 0.2 with its last seed
    rows = data_of(of_rates({0.1: [0.0], 0.2: [1.0, 0.0]}))
    assert statistics.best_rate(rows, reach) == 0.1


def test_seeds_that_no_other_rate_has_count_where_none_is_shared():
    kept = run("rr", 0.1, 0, [9, 2]) + run("rr", 0.2, 1, [9, 1]) + run("rr", 0.2, 2, [9, 1])
    assert statistics.best_rate(data_of(kept), Criterion()) == 0.2


def test_a_rate_with_a_diverging_seed_is_dropped():
    last = Criterion()
    kept = both("rr", 0.1, [3, 2]) + both("rr", 0.2, [3, 1]) + both("rr", 0.4, [3, 1.5])
    kept += run("rr", 0.2, 2, [3], diverged="loss is nan")
    assert statistics.finalists(data_of(kept), last) == [0.4, 0.1]
    assert statistics.best_rate(data_of(kept), last) == 0.4
    assert "diverged" in tables.sweep(compare(data_of(kept), {"rr": "D-RR"}, last))
    lost = run("cd_grab", 0.2, 0, [3], diverged="loss is nan")
    compared = compare(data_of(kept + lost), {"rr": "D-RR", "cd_grab": "CD-GraB"}, LOWEST)
    row = cells(tables.table(compared, cd_grab.COLUMNS))["CD-GraB"]
    assert row["best lr"] == "all diverge" and row["epochs, own lr"] == "-"
    assert tables.diverged_rates(compared).endswith("CD-GraB diverged at learning rate 0.2.")


def test_the_first_record_that_reaches_a_target_counts():
    kept = run("rr", 0.1, 0, [3, 2, 1, 2])
    for scalar, lower, target, step in (
        ("train/loss", True, 2, 2),
        ("train/loss", True, 0.5, math.inf),
        ("test/accuracy", False, 0.5, 0),
    ):
        goal = Criterion(scalar, lower, "target", target)
        table = statistics.frame(compare(data_of(kept), {"rr": "D-RR"}, goal))
        assert table["to step"].tolist() == [step]


def test_the_arm_with_most_arriving_seeds_and_fewest_steps_is_chosen():
    goal = Criterion("valid/accuracy", False, "target", 0.5)
    first = [
        *run("rr", 0.1, 0, [1, 1, 0.4], phase="tune", speed=2.0),
        *run("rr", 0.2, 0, [1, 0.4], phase="tune", speed=2.0),
        *run("rr", 0.4, 0, [1, 1, 1], phase="tune", speed=2.0),
    ]
    assert statistics.finalists(data_of(first), goal) == [0.2, 0.1, 0.4]
    late = run("rr", 0.2, 1, [1, 1], phase="tune", speed=2.0)
    late += run("rr", 0.1, 1, [1, 1, 1, 0.4], phase="tune", speed=2.0)
    assert statistics.best_rate(data_of(first + late), goal) == 0.1
    reported = both("rr", 0.1, [1, 0.4], phase="report", speed=2.0, **{"test/accuracy": 0.6})
    compared = compare(data_of(first + late + reported), {"rr": "no echo"}, goal)
    assert {*compared.at(2.0)[0].runs.seed} == {0, 1}
    swept = cells(tables.sweep(compared, 2.0))["no echo"]
    assert [swept[f"lr {rate}"] for rate in (0.1, 0.2, 0.4)] == [
        "5 (2)",
        "1 of 2 arrive",
        "0 of 1 arrive",
    ]
    row = cells(tables.table(compared, echoing.COLUMNS, 2.0))["no echo"]
    assert row["lr"] == "0.1 (edge)" and row["steps"] == "0 ± 0"  # on the half that is reported


def eight(values):
    """A factorial: arms by their decisions, with two seeds."""
    kept = []
    for i, (order, sync, echo) in enumerate(np.ndindex(2, 2, 2)):
        names = {
            "order": ("rr", "cd_grab")[order],
            "sync": ("parallel", "qsr")[sync],
            "echo": ("none", "diffusion")[echo],
        }
        kept += both(f"arm{i}", 0.1, [9, values[order, sync, echo]], **names)
    return kept, {f"arm{i}": f"arm {i}" for i in range(8)}


def test_known_effects_are_recovered():
    a, b, c = np.meshgrid([-1, 1], [-1, 1], [-1, 1], indexing="ij")
    y = 3 + 0.5 * a - 2 * b + 0.25 * a * b - 0.125 * a * b * c
    results = {name: mean for name, (mean, _) in combined.effects(np.stack([y, y], -1)).items()}
    assert results == {
        "order": 1,
        "sync": -4,
        "echo": 0,
        "order × sync": 0.5,
        "order × echo": 0,
        "sync × echo": 0,
        "order × sync × echo": -0.25,
    }
    losses = np.exp2(np.array([[[0, 1], [0, 1]], [[1, 2], [1, 2]]]))  # order and echo double it
    kept, arms = eight(losses)
    compared = compare(data_of(kept), arms, Criterion())
    row = cells(combined.effects_table(compared)[1].split("\n\n")[1])
    assert row["order"]["last train loss"].startswith("**× 2.00")
    assert row["sync"]["last train loss"] == "× 1.00 (1.00 to 1.00)"
    modelled = combined.modelled_table(compared, cost.machines(4.0, 2.0))[1]
    assert modelled.count("1.00 (1.00 to 1.00)") >= 4
    assert combined.show_effect(0.1, 0.2, relative=False) == "+0.10 (-0.10 to +0.30)"
    assert combined.show_effect(np.log(2), float("nan"), relative=True) == "× 2.00"


def test_a_study_without_effects_says_why():
    values = np.ones((2, 2, 2))
    values[1, 1, 1] = 8  # of a target of 2
    kept, arms = eight(values)
    compared = compare(data_of(kept), arms, Criterion(when="target", target=2.0))
    assert "arm 7 do not reach" in tables.target_line(compared)
    assert "arm 7 never arrive" in combined.effects_table(compared)[1]
    assert combined.effects_picture(compared)[1] == ""
    modelled = combined.modelled_table(compared, cost.machines(4.0, 2.0))[1]
    assert [line.count(" - ") for line in modelled.splitlines()[4:]] == [0] * 7 + [4]
    first, *others = arms
    for rows, names in ((kept, [first, *others[:6]]), (kept[2:], arms), (kept, [*others, first])):
        comparison = compare(data_of(rows), {name: arms[name] for name in names}, Criterion())
        assert "of the eight arms" in combined.no_effects(comparison)


def test_a_value_that_is_not_finite_is_worse_than_every_number():
    for criterion in (Criterion(), Criterion("valid/accuracy", lower=False)):
        kept = both("rr", 0.1, [0.8, 0.4]) + both("rr", 0.2, [0.8, 0.1])
        kept[-1][criterion.scalar] = None
        for when in ("last", "lowest"):
            compared = compare(data_of(kept), ARMS, criterion._replace(when=when))
            assert compared.chosen["rr", None].rate == 0.1
        target = statistics.target_of(compare(data_of(kept[4:]), ARMS, criterion))
        assert target == (0.1 if criterion.lower else 0.9), "of the seed that ends with a number"
