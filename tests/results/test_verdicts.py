"""Verdicts: what the rule is applied to, recorded runs, and that the pages are up to date."""

import json
import re

import numpy as np
import pytest

from experiments import verdicts
from experiments.results import archive, verdict_page
from experiments.results.claims import RUNS
from experiments.results.effects import Difference, at_end, cheaper, over_run, points, to_best
from experiments.results.rule import MATTERS, VERDICTS, Effect, Gain, bounds, history, ratio
from experiments.results.statistics import Criterion
from tests.recorded_runs import LOWEST, compared, finished, order_records


def words(measure, records, size=0.0, criterion=LOWEST):
    return Gain(measure, size)(1, compared(records, criterion)).words


def seen(effect):
    return effect.text(bounds(effect, 0.05))


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ({"rr": 1.0, "cd_grab": 0.9, "unzip": 1.0}, "reproduced"),
        ({"rr": 1.0, "cd_grab": 0.97, "unzip": 1.0}, "smaller"),
        ({"rr": 1.0, "cd_grab": 0.9, "id_pair": 0.9}, "reproduced; independent pair as well"),
        ({"rr": 1.0, "cd_grab": 1.0}, "none of that size"),
        ({"rr": 1.0, "cd_grab": 1.1}, "opposite"),
        ({"rr": 1.0}, "not run; 0 of 3 seeds"),
    ],
)
@pytest.mark.parametrize("measure", [at_end, over_run])
def test_records_of_orders_drive_the_verdict(measure, losses, verdict):
    size = ratio(0.9, 1.0) if measure is at_end else ratio(0.96, 1.0)
    assert words(measure("train/loss"), order_records(losses), size) == verdict


def test_an_own_learning_rate_is_the_one_whose_loss_ends_lowest():
    records = order_records({"rr": 1.0, "cd_grab": 0.9}, rates=(0.1, 0.2, 0.15))
    worse = [r | {"test/accuracy": 0.99} for r in records if r["learning_rate"] == 0.2]
    records = [r for r in records if r["learning_rate"] != 0.2] + worse
    own, same = (at_end("test/accuracy", rate=rate)(compared(records)) for rate in (None, 0.15))
    assert seen(own).endswith("lr 0.1") and seen(same).endswith("lr 0.15")
    assert own.runs == ((("cd_grab", None, 0.1), ("rr", None, 0.1)),)
    np.testing.assert_allclose(own.each, np.full(3, 1.0))  # points, paired by seed


def alike(losses):
    """Three seeds that do not differ."""
    return [r | {"seed": s} for r in order_records(losses, seeds=1) for s in range(3)]


def test_epochs_to_the_best_of_the_baseline_are_counted():
    records = alike({"rr": 1.0, "cd_grab": 0.5})
    epochs = to_best("epochs")(compared(records))
    assert seen(epochs).startswith("4 against 6 epochs: 1.50 times less")
    assert seen(to_best("seconds")(compared(records))).startswith("8 against 12 s: 1.50 times less")
    np.testing.assert_allclose(epochs.each, np.full(3, np.log(1.5)))


def arriving(rr, cd_grab):
    """Records of orders whose loss falls from 2 to 0 at an epoch of each seed, or never (0)."""
    rows = []
    for arm, at in {"rr": rr, "cd_grab": cd_grab}.items():
        for seed, epoch in enumerate(at):
            own = order_records({arm: 1.0}, seeds=1)
            fallen = [2.0 * (not epoch or r["epoch"] < epoch) for r in own]
            rows += [
                r | {"seed": seed, "train/loss": loss} for r, loss in zip(own, fallen, strict=True)
            ]
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
def test_seeds_that_never_arrive_count_by_their_order(rr, cd_grab, word, text):
    verdict = Gain(to_best("epochs"), ratio(1, 6))(1, compared(arriving(rr, cd_grab)))
    assert (verdict.word, verdict.seeds) == (word, len(rr))
    assert (verdict.needed is not None) == (word == "undecided")
    assert verdict.needed is None or verdict.needed > len(rr)
    assert verdict.text.startswith(text), verdict.text


def test_an_order_that_diverges_is_undecided():
    records = alike({"rr": 1.0, "cd_grab": 1.2})
    records[-1] |= {"diverged": "loss is nan"}
    for measure in (to_best("epochs"), at_end("train/loss"), at_end("train/loss", rate=0.1)):
        assert words(measure, records) == "undecided; CD-GraB diverges"


@pytest.mark.parametrize(
    ("untimed", "verdict"),
    [
        ((4,), "reproduced"),  # of which four are left
        ((2, 3, 4), "not run; 2 of 3 seeds"),
        ((0, 1, 2, 3, 4), "not run; seconds were not taken alone"),
    ],
)
def test_seconds_count_only_where_they_were_taken(untimed, verdict):
    rows = order_records({"rr": 1.0, "cd_grab": 0.5}, seeds=5)
    for r in rows:  # the same loss with all seeds, so that all arrive
        r["timed"] = not (r["arm"] == "rr" and r["seed"] in untimed)
        r["train/loss"] = round(r["train/loss"] / (1 + r["seed"]), 2)
    assert words(to_best("seconds"), rows) == verdict
    assert words(to_best("epochs"), rows) == "reproduced"


def rule_records(accuracies):
    return [
        {"arm": rule, "speed": None, "learning_rate": rate, "seed": seed, "phase": "run",
         "step": 12, "rounds": 3, "train/loss": 1.0, "valid/accuracy": accuracy - rate,
         "diverged": None,
         "test/accuracy": accuracy - rate + 0.05 * seed + 1e-4 * ((seed + len(rule)) % 2)}
        for rule, accuracy in accuracies.items()
        for rate in (0.1, 0.2)
        for seed in range(3)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [
        ({"parallel": 0.6, "constant": 0.6, "qsr": 0.61}, "reproduced"),
        ({"parallel": 0.6, "constant": 0.61, "qsr": 0.61}, "reproduced; constant H as well"),
        ({"parallel": 0.6, "constant": 0.6, "qsr": 0.604}, "smaller"),
        ({"parallel": 0.6, "constant": 0.6, "qsr": 0.59}, "opposite"),
        ({"parallel": 0.6}, "not run; 0 of 3 seeds"),
    ],
)
def test_records_of_rules_drive_the_verdict(accuracies, verdict):
    measure, criterion = points("qsr", "parallel", controls=["constant"]), ("valid/accuracy", False)
    assert words(measure, rule_records(accuracies), 1.1, Criterion(*criterion)) == verdict


def echo_records(steps, *, loads_per_step):
    """Arms that arrive after so many steps, tuned and timed at one rate; None: never."""
    found = []
    for arm, count in steps.items():
        for seed in range(3):
            number = (count or 0) + seed + len(arm) % 2
            cost = number * loads_per_step.get(arm, 1)
            score = {"valid/accuracy": float(bool(count)), "test/accuracy": float(bool(count))}
            row = {
                "arm": arm, "speed": 2.0, "learning_rate": 0.1, "seed": seed, "step": number,
                "loads": cost, "rounds": number, "seconds": 0.1 * cost, "diverged": None,
            }  # fmt: skip
            found += [row | score | {"phase": phase} for phase in ("tune", "report")]
    return found


@pytest.mark.parametrize(
    ("steps", "verdict"),
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
@pytest.mark.parametrize("cost", ["loads", "seconds"])
def test_records_of_echoing_drive_the_verdict(cost, steps, verdict):
    records = echo_records(steps, loads_per_step={"diffusion": 0.5})
    criterion = Criterion("valid/accuracy", False, "target", 0.5)
    assert words(cheaper(cost, speed=2), records, ratio(1, 2), criterion) == verdict
    untimed = [r | {"timed": r["seed"] == 0} for r in records]
    if "diffusion" in steps and cost == "seconds":
        assert words(cheaper(cost, speed=2), untimed, 0.0, criterion) == "not run; 1 of 3 seeds"


def test_a_difference_is_paired_by_seed_and_asks_for_the_runs_of_both():
    def measure(comparison):
        return Effect(comparison, runs=((("a", 2, comparison[2]),),))

    apart = Difference(measure, ("one", "other"))
    verdict = Gain(apart)(1, {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3}, {3: 0.8, 0: 0.5, 2: 0.71})
    np.testing.assert_allclose(verdict.mean, np.mean([0.5, 0.49, 0.5]))
    assert verdict.seeds == 3 and "with one against" in verdict.text
    assert verdict.runs == ((("a", 2, 1.2),), (("a", 2, 0.71),))
    late = Difference(lambda c: measure(c)._replace(censored=len(c) > 3), ("one", "other"))
    verdict = Gain(late)(1, {0: 1.0, 1: 1.1, 2: 1.2, 3: 1.3}, {0: 1.0, 1: 1.1, 2: 1.0})
    assert (verdict.word, verdict.note) == ("undecided", "not all seeds arrive")


def test_every_claim_names_known_runs_and_has_a_verdict_without_them():
    for claim in verdicts.claims():
        assert set(claim.runs) <= set(RUNS)
        assert claim.scaled or claim.runs, claim.text
        word = "not testable here" if claim.judge is None else "reproduced"  # plans need no run
        assert history(claim, {})[-1].word == ("not run" if claim.runs else word)
    texts = [(claim.text, claim.setting) for claim in verdicts.claims()]
    assert len(set(texts)) == len(texts)


def test_a_recorded_run_is_the_run_at_six_digits(tmp_path):
    rows = [r | {"train/loss": r["train/loss"] / 7} for r in order_records({"rr": 1.0})]
    results = finished(tmp_path / "results", rows)
    target = verdicts.record(results, "hmda", "python -m x\n", tmp_path / "runs")
    ((name, kept),) = verdict_page.load(tmp_path / "runs").items()
    assert name == "hmda" and kept.arms == {"rr": "D-RR"} and len(kept.records) == len(rows)
    for row, record in zip(rows, kept.records, strict=True):
        assert record["train/loss"] == float(f"{row['train/loss']:.6g}")
    assert (target / "command.txt").read_text() == "python -m x\n"
    before = (target / "metrics.jsonl.gz").read_bytes()
    verdicts.record(results, "hmda", "python -m x", tmp_path / "runs")
    assert (target / "metrics.jsonl.gz").read_bytes() == before
    assert archive.pack(kept.records) == before  # rounding twice changes nothing


def test_plans_survive_the_archive():
    kept = archive.load("qsr_cifar10_vit")
    again = archive.restore(kept.records, json.loads(json.dumps(archive.describe(kept))))
    assert again.plans == kept.plans and again.plans["qsr"].rounds == 292


def test_only_known_finished_runs_are_recorded(tmp_path):
    results = finished(tmp_path / "results", [])
    with pytest.raises(ValueError, match="'hmdb'.*Add a row to RUNS"):
        verdicts.record(results, "hmdb", "python", tmp_path)
    with pytest.raises(ValueError, match="--command is ' '"):
        verdicts.record(results, "hmda", " ", tmp_path)
    (tmp_path / "results" / "table.md").unlink()
    with pytest.raises(ValueError, match="has no table.md: only runs that have ended"):
        verdicts.record(results, "hmda", "python", tmp_path)


def rows_of(text, start):
    return [line for line in text.splitlines() if line.startswith(f"| {start}")]


def test_a_claim_gets_its_verdict_as_soon_as_its_run_is_recorded(tmp_path):
    title = RUNS["lenet_w4"].title
    before, _ = verdicts.generated(tmp_path)
    lines = before.split("\n\n")[1].splitlines()[2:]
    assert len(lines) == sum(int(n) for n in re.findall(r"(\d+) [a-z]", before.split("\n")[0]))
    assert all(line.split("|")[5].split(";")[0].strip() in VERDICTS for line in lines)
    assert all("| not run " in line for line in rows_of(before, title))
    rows = order_records({"rr": 1.0, "cd_grab": 0.9, "unzip": 1.0}, rates=(0.01, 0.02))
    results = finished(tmp_path / "results", rows)
    verdicts.record(results, "lenet_w4", "python -m experiments.cd_grab", tmp_path)
    after, results = verdicts.generated(tmp_path)
    assert "undecided" in results and "not run" in results
    # What is equal at several rates is one row.
    losses = rows_of(after, f"{title}: train loss, lr 0.01 and own lr")
    assert len(losses) == 1 and "| reproduced " in losses[0] and "(#lenet_w4)" in losses[0]
    assert "### lenet_w4\n" in after and "    python -m experiments.cd_grab\n" in after
    assert "abacus" in after and "### lenet_w4" not in before


@pytest.mark.parametrize("stale", [0, 1])
def test_a_stale_page_is_noticed(tmp_path, stale):
    pages = [tmp_path / "README.md", tmp_path / "results.md"]
    for path, body in zip(pages, verdicts.generated(tmp_path), strict=True):
        old = f"before\n{verdicts.BEGIN}\nold\n{verdicts.END}\nafter\n"
        text = verdicts.replace_section(old, body)
        assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
        assert verdicts.replace_section(text, body) == text
        path.write_text(text)
    verdicts.check(pages, tmp_path)
    text = pages[stale].read_text()
    pages[stale].write_text(text.replace(" reproduced", " smaller", 1))
    match = f"{pages[stale].name} is not that of the recorded runs.*python -m experiments.verdicts"
    with pytest.raises(ValueError, match=match):
        verdicts.check(pages, tmp_path)
    for text in ("", verdicts.BEGIN, f"{verdicts.END}{verdicts.BEGIN}"):
        with pytest.raises(ValueError, match="needs the lines"):
            verdicts.replace_section(text, "body")


def test_the_pages_say_what_the_rule_does_and_link_to_what_is_there():
    readme, results = (path.read_text() for path in verdicts.PAGES)
    assert all(f"| **{word}** " in readme for word in VERDICTS)
    assert all(kind.words in readme and kind.words in results for kind in MATTERS.values())
    assert verdict_page.PICTURE in results and verdict_page.ALL in results
    for path in verdicts.PAGES:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text()):
            assert (path.parent / link).exists(), link
    for anchor in re.findall(r"\]\(#([^)]+)\)", readme):
        assert f"\n### {anchor}\n" in readme
    shown = re.findall(r"orders_\w+\.png", readme)
    assert sorted(shown) == sorted(p.name for p in verdicts.PICTURES.glob("orders_*.png"))


def test_pictures_are_drawn_of_runs_of_orders_only(tmp_path):
    rows = order_records({"rr": 1.0, "cd_grab": 0.9}, epochs=8)
    others = [row | {"study": "qsr"} for row in rows]
    verdict_page.draw_orders({"m4": compared(rows), "qsr_cifar10_vit": compared(others)}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["orders_m4.png"]
