"""Effects, to which the rule of verdicts applies, from records of orders, rules and echoing."""

import numpy as np
import pytest

from experiments import verdicts
from experiments.results.claims import RUNS
from experiments.results.effects import Measure
from experiments.results.rule import history, judge, ratio
from experiments.results.statistics import Criterion
from tests.recorded_runs import LOWEST, compared, order_records


def words(measure, records, size=0.0, criterion=LOWEST):
    return judge(1, size, measure(compared(records, criterion))).words


def seen(effect):
    return effect.text(effect.interval(0.05))


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({"rr": 1.0, "cd_grab": 0.9, "unzip": 1.0}, "reproduced"),
        ({"rr": 1.0, "cd_grab": 0.97, "unzip": 1.0}, "smaller"),
        ({"rr": 1.0, "cd_grab": 0.9, "id_pair": 0.9}, "reproduced; independent pair as well"),
        ({"rr": 1.0, "cd_grab": 1.0}, "none of that size"),
        ({"rr": 1.0, "cd_grab": 1.1}, "opposite"),
        ({"rr": 1.0}, "not run; 0 of 3 seeds"),
    ],
)
def test_verdicts_follow_records_of_orders(losses, expected):
    assert words(Measure("train/loss"), order_records(losses), ratio(0.9, 1.0)) == expected


def test_an_arm_s_own_learning_rate_has_the_lowest_last_loss():
    records = order_records({"rr": 1.0, "cd_grab": 0.9}, rates=(0.1, 0.2, 0.15))
    for r in records:
        r["test/accuracy"] += 0.1 * (r["learning_rate"] == 0.2)
    own, same = (Measure("test/accuracy", rate=rate)(compared(records)) for rate in (None, 0.15))
    assert seen(own).endswith("lr 0.1") and seen(same).endswith("lr 0.15")
    np.testing.assert_allclose([*own.values.values()], np.full(3, 1.0))  # points, paired by seed


def alike(losses):
    """Three seeds that do not differ."""
    return [r | {"seed": s} for r in order_records(losses, seeds=1) for s in range(3)]


def test_epochs_to_the_best_of_the_baseline_are_counted():
    records = compared(alike({"rr": 1.0, "cd_grab": 0.5}))
    assert seen(Measure("epoch")(records)).startswith("4 against 6 epochs: 1.50 times less")


def arriving(rr, cd_grab):
    """Records of orders whose loss falls from 2 to 0 at an epoch per seed; 0 for never."""
    rows = []
    for arm, at in {"rr": rr, "cd_grab": cd_grab}.items():
        for seed, epoch in enumerate(at):
            for r in order_records({arm: 1.0}, seeds=1):
                fallen = epoch and r["epoch"] >= epoch
                rows.append(r | {"seed": seed, "train/loss": 0.0 if fallen else 2.0})
    return rows


@pytest.mark.parametrize(
    ("rr", "cd_grab", "word", "text"),
    [
        ([6] + 7 * [0], 8 * [3], "reproduced",
         "8 of 8 seeds arrive, of D-RR 1; median: ∞ times less (2.00 to ∞)"),
        ([6, 0, 0, 0], 4 * [3], "undecided", "4 of 4 seeds arrive, of D-RR 1; lr 0.1"),
        (8 * [6], 8 * [0], "opposite",
         "0 of 8 seeds arrive, of D-RR 8; median: 0.00 times less (0.00 to 0.00)"),
        (3 * [6], 3 * [0], "undecided", "0 of 3 seeds arrive, of D-RR 3; lr 0.1"),
        # Neither arrives with seven of nine, and no arm is better for that.
        ([6, 6] + 7 * [0], [1, 1] + 7 * [0], "undecided",
         "2 of 9 seeds arrive, of D-RR 2; median: 1.00 times less (1.00 to 6.00)"),
        ([6] + 7 * [0], [3] + 7 * [0], "none of that size",
         "1 of 8 seeds arrive, of D-RR 1; median: 1.00 times less (1.00 to 2.00)"),
    ],
)  # fmt: skip
def test_seeds_that_never_arrive_are_ranked(rr, cd_grab, word, text):
    found = judge(1, ratio(1, 6), Measure("epoch")(compared(arriving(rr, cd_grab))))
    assert (found.word, found.seeds) == (word, len(rr))
    assert (found.needed is not None) == (word == "undecided")
    assert found.text.startswith(text), found.text


def test_an_order_that_diverges_is_undecided():
    records = alike({"rr": 1.0, "cd_grab": 1.2})
    records[-1] |= {"diverged": "loss is nan"}
    for measure in (Measure("epoch"), Measure("train/loss"), Measure("train/loss", rate=0.1)):
        assert words(measure, records) == "undecided; CD-GraB diverges"


@pytest.mark.parametrize("what", ["train/loss", "epoch"])
def test_averaged_weights_have_their_own_rates_target_and_seeds(what):
    rows = order_records({"rr": 1.0, "cd_grab": 1.1}, rates=(0.1, 0.2), seeds=5)
    means = order_records({"rr": 0.5, "cd_grab": 0.4}, rates=(0.2, 0.1), seeds=5)
    for r, mean in zip(rows, means, strict=True):
        mean |= {"learning_rate": r["learning_rate"]}
        r |= {"train/loss/averaged": mean["train/loss"]} if r["seed"] else {}
    plain, averaged = (Measure(what, averaged=on)(compared(rows)) for on in (False, True))
    same = Measure(what)(compared([mean for mean in means if mean["seed"]]))
    assert len(plain.values) == 5 and "lr 0.1" in seen(plain)
    assert averaged.values == same.values and set(averaged.values) == {1, 2, 3, 4}
    assert "lr 0.2" in seen(averaged) and averaged.again == same.again
    assert Measure(what, averaged=True)(compared(means)).values == {}  # nothing was averaged


def test_a_further_seed_takes_the_mean_seconds_of_both_arms_at_their_rates():
    rows = order_records({"rr": 1.0, "cd_grab": 0.9}, epochs=6)
    for r in rows:
        r["seconds"] *= {"rr": 1, "cd_grab": 2}[r["arm"]] + r["seed"]
    found = judge(1, 1.0, Measure("train/loss", against="rr")(compared(rows)))
    assert found.again.rates == (0.1,) and found.again.seconds == 12 * (2 + 3)
    assert found._replace(seeds=3, needed=10).hours == 7 * 60 / 3600
    other = order_records({"rr": 2.0}, rates=(0.2,))  # the better one of D-RR alone
    found = Measure("train/loss")(compared([r for r in rows if r["arm"] != "rr"] + other))
    assert found.again == ((0.1, 0.2), 2 * (12 * 3 + 12))


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ({"parallel": 0.6, "constant": 0.6, "qsr": 0.61}, "reproduced"),
        ({"parallel": 0.6, "constant": 0.61, "qsr": 0.61}, "reproduced; constant H as well"),
        ({"parallel": 0.6, "constant": 0.6, "qsr": 0.604}, "smaller"),
        ({"parallel": 0.6, "constant": 0.6, "qsr": 0.59}, "opposite"),
        ({"parallel": 0.6}, "not run; 0 of 3 seeds"),
    ],
)
def test_verdicts_follow_records_of_rules(accuracies, expected):
    records = [
        {"arm": rule, "speed": None, "learning_rate": rate, "seed": seed, "phase": "run",
         "step": 12, "rounds": 3, "seconds": 1.0, "train/loss": 1.0,
         "valid/accuracy": accuracy - rate,
         "test/accuracy": accuracy - rate + 0.05 * seed + 1e-4 * ((seed + len(rule)) % 2)}
        for rule, accuracy in accuracies.items() for rate in (0.1, 0.2) for seed in range(3)
    ]  # fmt: skip
    measure = Measure("test/accuracy", "qsr", "parallel")
    assert words(measure, records, 1.1, Criterion("valid/accuracy", False)) == expected


def echo_records(steps, timed=3):
    """Arms that arrive after these steps, tuned and timed at one rate; None for never."""
    return [
        {"arm": arm, "speed": 2.0, "learning_rate": 0.1, "seed": seed, "phase": phase,
         "step": (number := (count or 0) + seed + len(arm) % 2),
         "loads": (loads := number / (1 + (arm == "diffusion"))), "seconds": 0.1 * loads,
         "valid/accuracy": float(bool(count)), "test/accuracy": float(bool(count)),
         "timed": seed < timed}
        for arm, count in steps.items() for seed in range(3) for phase in ("tune", "report")
    ]  # fmt: skip


ECHOED = Criterion("valid/accuracy", False, "target", 0.5)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({"none": 100, "local": 100, "diffusion": 110}, "reproduced"),
        ({"none": 100, "local": 100, "diffusion": 160}, "smaller"),
        ({"none": 100, "local": 60, "diffusion": 110}, "reproduced; local steps, no echo as well"),
        ({"none": 100, "local": None, "diffusion": 110}, "reproduced"),
        ({"none": 100, "diffusion": 300}, "opposite"),
        ({"none": 100, "diffusion": None}, "undecided"),
        ({"none": 100}, "not run; 0 of 3 seeds"),
    ],
)
def test_verdicts_follow_records_of_echoing(steps, expected):
    measure = Measure("loads", "diffusion", "none", speed=2)
    assert words(measure, echo_records(steps), ratio(1, 2), ECHOED) == expected


def test_every_claim_names_known_runs_and_has_a_verdict_without_them():
    for claim in verdicts.claims():
        assert set(claim.runs) <= set(RUNS)
        assert history(claim, {})[-1].word == (claim.known.word if claim.known else "not run")
    known = [claim.known.word for claim in verdicts.claims() if claim.known]
    assert known.count("reproduced") == 2  # plans need no run
    texts = [(claim.text, claim.setting) for claim in verdicts.claims()]
    assert len(set(texts)) == len(texts)
