"""Claims and their verdicts, recorded runs, and README at full size.

The last: `pytest -m slow -n 0 tests/report/test_claims.py`, five minutes.
"""

import gzip
import json
import math
import pathlib
import re
import types

import numpy as np
import pytest
from scipy import stats

from docs import numbers
from experiments import cd_grab, claims, echoing, herding, qsr
from experiments.claims import Claim, Effect, effect_of, ratio, verdict
from experiments.compare import commands, recipes, search
from experiments.compare.runs import Trainer
from experiments.report import archive, statistics
from experiments.report.statistics import LOSS, Criterion, compare, data_of, frame, paired

# Records of runs that were never trained.
LABELS = {
    "rr": "D-RR",
    "cd_grab": "CD-GraB",
    "unzip": "unzip control",
    "id_pair": "independent pair",
    "parallel": "parallel",
    "constant": "constant H",
    "qsr": "QSR",
    "none": "no echo",
    "local": "local steps, no echo",
    "diffusion": "error diffusion",
}
LOWEST = Criterion(when="lowest")


def order_records(losses, *, rates=(0.1,), seeds=3, epochs=6, accuracy=0.5):
    """Losses fall from 2 to the order's own; seeds differ much, orders within a seed as given."""
    return [
        {
            "study": "cd_grab",
            "arm": order,
            "speed": None,
            "learning_rate": rate,
            "seed": seed,
            "phase": "run",
            "epoch": epoch,
            "step": epoch,
            "seconds": 2.0 * epoch,
            "ended": epoch == epochs,
            "train/loss": (1 + seed)
            * (2 + (loss * rate / 0.1 - 2) * epoch / epochs)
            * (1 + 1e-3 * ((seed * 7 + epoch + len(order)) % 3)),
            "test/accuracy": accuracy + (1 - loss) / 10,
        }
        for order, loss in losses.items()
        for rate in rates
        for seed in range(seeds)
        for epoch in range(epochs + 1)
    ]


def compared(records, criterion=LOWEST):
    arms = {name: LABELS[name] for name in dict.fromkeys(r["arm"] for r in records)}
    return compare(data_of(records), arms, criterion)


def finished(folder, rows, command="python -m x"):
    """An output folder as `cd_grab` leaves it."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "command.txt").write_text(f"{command}\n")
    (folder / "settings.json").write_text('{"data_dir": "/my/data"}')
    described = {"criterion": LOWEST._asdict(), "plans": {}}
    described["arms"] = {k: LABELS[k] for k in dict.fromkeys(r["arm"] for r in rows)}
    (folder / "comparison.json").write_text(json.dumps(described))
    versions = {"commit": None, "jax": "0.0.1", "device": "abacus"}
    (folder / "versions.json").write_text(json.dumps(versions))
    return str(folder)


@pytest.mark.parametrize(
    "size,mean,half,late,word",
    [
        (1.0, 0.5, 0.4, (0, 0), "reproduced"),  # half of the published size, and 0 excluded
        (1.0, 0.49, 0.4, (0, 0), "smaller"),
        (1.0, 3.0, 2.9, (0, 0), "reproduced"),
        (1.0, 0.9, 1.0, (0, 0), "undecided"),  # as large as published, and 0 is not excluded
        (1.0, 0.1, 0.3, (0, 0), "none of that size"),
        (1.0, 0.1, 0.5, (0, 0), "undecided"),
        (1.0, -0.5, 0.4, (0, 0), "opposite"),
        (0.0, 1e-6, 1e-7, (0, 0), "same direction"),  # a sign is no size
        (0.0, 0.1, 0.3, (0, 0), "undecided"),
        (0.0, -0.5, 0.4, (0, 0), "opposite"),
        (1.0, 0.5, 0.4, (0, 2), "reproduced"),  # the base would take longer still
        (1.0, 0.4, 0.3, (0, 2), "undecided"),  # and this may be half of it
        (1.0, -0.5, 0.4, (0, 2), "undecided"),
        (1.0, 0.1, 0.3, (0, 2), "undecided"),
        (1.0, 0.5, 0.4, (2, 0), "undecided"),  # the arm would
        (1.0, -0.5, 0.4, (2, 0), "opposite"),
        (1.0, 0.1, 0.3, (2, 0), "none of that size"),
        (1.0, 0.5, 0.4, (1, 1), "undecided"),
    ],
)
def test_the_interval_of_an_effect_decides(size, mean, half, late, word):
    for seeds in (3, 8):
        values = np.linspace(-1, 1, seeds)
        _, high = stats.t.interval(0.95, seeds - 1, 0.0, stats.sem(values))
        assert verdict(size, Effect(mean + half * values / high, late=late)) == word
    assert verdict(size, Effect([mean, mean], late=late)) == "not run: 2 of 3 seeds"


def judged(claim, records, criterion=LOWEST):
    effect = effect_of(claim, {claim.run: compared(records, criterion)})
    return "; ".join(filter(None, (verdict(claim.size, effect), effect.note))), effect


@pytest.mark.parametrize(
    "losses,expected",
    [
        ({"rr": 1.0, "cd_grab": 0.9, "unzip": 1.0}, "reproduced"),
        ({"rr": 1.0, "cd_grab": 0.97, "unzip": 1.0}, "smaller"),
        ({"rr": 1.0, "cd_grab": 0.9, "id_pair": 0.9}, "reproduced; independent pair as well"),
        ({"rr": 1.0, "cd_grab": 1.0}, "none of that size"),
        ({"rr": 1.0, "cd_grab": 1.1}, "opposite"),
        ({"rr": 1.0}, "not run: 0 of 3 seeds"),
    ],
)
def test_verdicts_follow_records_of_orders(losses, expected):
    claim = Claim("hmda", "", LOSS, "x", ratio(0.9, 1.0))
    assert judged(claim, order_records(losses))[0] == expected


def test_a_claimed_shrinking_gain_is_the_difference_of_two_runs():
    recorded = {
        "hmda": compared(order_records({"rr": 1.0, "cd_grab": 0.8})),
        "hmda_cosine": compared(order_records({"rr": 1.0, "cd_grab": 0.95})),
    }
    claim = Claim("hmda", "", LOSS, "the gap shrinks", more_than="hmda_cosine")
    effect = effect_of(claim, recorded)
    np.testing.assert_allclose(effect.values, math.log(0.95 / 0.8), rtol=0.01)
    assert verdict(0.0, effect) == "same direction"
    swapped = claim._replace(run="hmda_cosine", more_than="hmda")
    assert verdict(0.0, effect_of(swapped, recorded)) == "opposite"


def test_an_arm_s_own_learning_rate_has_the_lowest_last_loss():
    records = order_records({"rr": 1.0, "cd_grab": 0.9}, rates=(0.1, 0.2, 0.15))
    for r in records:
        r["test/accuracy"] += 0.1 * (r["learning_rate"] == 0.2)
    tuned, same = (
        judged(Claim("hmda", "", "test/accuracy", rate=rate), records)[1] for rate in (None, 0.15)
    )
    assert tuned.text.endswith("lr 0.1 (edge)") and same.text.endswith("lr 0.15")
    np.testing.assert_allclose(tuned.values, np.full(3, 1.0))  # points, paired by seed


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
    "rr,cd_grab,word,text",
    [
        (4 * [6], 4 * [3], "reproduced", "3 against 6 epochs: 2.00 times less; lr 0.1"),
        (
            [6] + 7 * [0],
            8 * [3],
            "reproduced",
            "3 against 6 epochs: 2.00 times less; lr 0.1; 8 of 8 seeds arrive, of D-RR 1",
        ),
        (
            4 * [3],
            [6, 6, 6, 0],
            "opposite",
            "6 against 3 epochs: 0.50 times less; lr 0.1; 3 of 4 seeds arrive, of D-RR 4",
        ),
        (
            [6, 0, 0, 0],
            [3, 3, 3, 0],
            "undecided",
            "3.57 against 6 epochs: 1.68 (0.97 to 2.92) times less; lr 0.1; "
            "3 of 4 seeds arrive, of D-RR 1",
        ),
    ],
)
def test_seeds_that_never_arrive_count_as_at_the_end_and_bound_the_effect(rr, cd_grab, word, text):
    result, effect = judged(Claim("hmda", "", "epoch", "x", math.log(2)), arriving(rr, cd_grab))
    assert (result, effect.text, len(effect.values)) == (word, text, len(rr))


def test_an_order_that_diverges_at_every_rate_has_no_effect():
    records = order_records({"rr": 1.0, "cd_grab": 1.2})
    records[-1] |= {"diverged": "loss is nan"}
    for what, rate in (("epoch", None), (LOSS, None), (LOSS, 0.1)):
        result, _ = judged(Claim("hmda", "", what, rate=rate), records)
        assert result == "not run: 0 of 3 seeds; CD-GraB diverges"


@pytest.mark.parametrize("what", [LOSS, "epoch"])
def test_averaged_weights_have_their_own_rates_target_and_seeds(what):
    rows = order_records({"rr": 1.0, "cd_grab": 1.1}, rates=(0.1, 0.2), seeds=5)
    means = order_records({"rr": 0.5, "cd_grab": 0.4}, rates=(0.2, 0.1), seeds=5)
    for r, mean in zip(rows, means, strict=True):
        mean |= {"learning_rate": r["learning_rate"]}
        r |= {"train/loss/averaged": mean["train/loss"]} if r["seed"] else {}
    claim = Claim("hmda", "", what)
    plain, averaged = (judged(claim._replace(averaged=on), rows)[1] for on in (False, True))
    same = judged(claim, [mean for mean in means if mean["seed"]])[1]
    assert len(plain.values) == 5 and "lr 0.1" in plain.text
    assert averaged.values.equals(same.values) and {*averaged.values.index} == {1, 2, 3, 4}
    assert "lr 0.2" in averaged.text
    assert judged(claim._replace(averaged=True), means)[1].values == ()  # nothing was averaged


@pytest.mark.parametrize(
    "steps,expected",
    [
        ({"none": 100, "local": 100, "diffusion": 110}, "reproduced"),
        ({"none": 100, "local": 100, "diffusion": 160}, "smaller"),
        ({"none": 100, "local": 60, "diffusion": 110}, "reproduced; local steps, no echo as well"),
        ({"none": 100, "local": None, "diffusion": 110}, "reproduced"),
        ({"none": 100, "diffusion": 300}, "opposite"),
        ({"none": 100, "diffusion": None}, "undecided"),
    ],
)
def test_verdicts_follow_records_of_echoing(steps, expected):
    """Arms that arrive after these steps, tuned and timed at one rate; None for never."""
    records = [
        {
            "arm": arm,
            "speed": 2.0,
            "learning_rate": 0.1,
            "seed": seed,
            "phase": phase,
            "step": (number := (count or 90) + seed + len(arm) % 2),
            "loads": number / (1 + (arm == "diffusion")),
            "seconds": 1.0,
            "valid/accuracy": float(bool(count)),
            "test/accuracy": float(bool(count)),
        }
        for arm, count in steps.items()
        for seed in range(3)
        for phase in ("tune", "report")
    ]
    claim = Claim("hmda", "", "loads", "x", ratio(1, 2), "diffusion", "none", speed=2)
    criterion = Criterion("valid/accuracy", False, "target", 0.5)
    assert judged(claim, records, criterion)[0] == expected


def test_more_seeds_or_longer_runs_decide_what_is_undecided():
    claim, values = Claim("hmda", "", LOSS, "x", 1.0), np.array([-1.0, 0.0, 1.0, 2.0])
    deviation = np.std(values, ddof=1)
    words = claims.undecided(claim, Effect(values))
    assert words == f"about {math.ceil((1.96 * deviation / 0.5) ** 2)} seeds would decide"
    assert (
        claims.undecided(claim._replace(size=99.0), Effect(values)) == "about 5 seeds would decide"
    )
    late = Effect(values, late=(0, 1), seconds=900.0)
    assert claims.undecided(claim, late) == "longer runs would decide"
    row = claims.remaining(claim, late)
    assert (row["would decide"], row["hours"]) == ("runs twice as long", "2.0")
    row = claims.remaining(claim._replace(size=99.0), Effect(values, seconds=5400.0))
    assert (row["seeds"], row["would decide"], row["hours"]) == (4, "5 seeds", "1.5")
    assert row["spread"] == "129 %"


ROOT = pathlib.Path(claims.__file__).parents[1]
PAGE = ROOT / "docs" / "results" / "papers.md"


@pytest.fixture(scope="module")
def printed():
    return claims.page()


def test_the_page_is_what_the_command_prints(printed):
    whole = PAGE.read_text(encoding="utf-8")
    head, same, rest = whole.partition(f"\n\n{printed}\n\n## Runs")
    assert same and rest
    assert len(head.splitlines()) < 40 and "| **undecided** " in head


def test_every_claim_is_in_the_page_counted_and_with_its_run(printed, tmp_path):
    every = claims.PUBLISHED + claims.OURS
    assert len({claim[:2] + claim[5:] for claim in every}) == len(every)
    page, empty = printed, claims.page(tmp_path)
    assert empty.count("| not run: 0 of 3 seeds |") == len(every)
    assert "0 claims were tested" in empty and "| reproduced |" in empty  # plans need no run
    for head, of_kind in (("Published", claims.PUBLISHED), ("Ours", claims.OURS)):
        assert f"## {head}\n\n{len(of_kind)} claims, {len(of_kind)} tested: " in page
        assert all(bool(claim.paper) == (head == "Published") for claim in of_kind)
    links = dict(re.findall(r'<a id="(\w+)"></a>\[\w+\]\((\S+)\)', PAGE.read_text()))
    assert {claim.run for claim in every} <= set(links) == set(claims.RUNS)
    assert all((PAGE.parent / link).read_text().startswith("python -m ") for link in links.values())


def test_a_recorded_run_keeps_six_digits_and_never_loses_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "FOLDER", tmp_path / "runs")
    target = tmp_path / "runs" / "hmda"

    def record(count):
        rows = order_records({"rr": 1.0, "cd_grab": 0.9 / 7}, seeds=count)
        made = f"python -m x --data_dir=/my/data --seeds={count} --output_dir={tmp_path}"
        folder = finished(tmp_path / str(len([*tmp_path.iterdir()])) / "hmda", rows, made)
        monkeypatch.chdir(folder)
        claims.main(types.SimpleNamespace(record="."))
        return rows

    for count in (3, 3, 5):
        rows = record(count)
    kept = archive.load("hmda", tmp_path / "runs")
    assert kept.arms == {"rr": "D-RR", "cd_grab": "CD-GraB"}
    recorded = archive.rows_of(target)
    for row, record_ in zip(rows, recorded, strict=True):
        assert record_["train/loss"] == float(f"{row['train/loss']:.6g}")
    assert archive.pack(recorded) == (target / "metrics.jsonl.gz").read_bytes()
    made = [f"python -m x --data_dir=DIR --seeds={count}" for count in (3, 5)]
    assert archive.commands(target) == made
    assert json.loads((target / "settings.json").read_text()) == {"data_dir": "DIR"}
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(ValueError, match="recorded with 5 seeds, and these are 4: pass --seeds=5"):
        record(4)
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}
    assert "; lr 0.1" in claims.page(tmp_path / "runs")


def test_only_finished_runs_are_recorded(tmp_path):
    results = finished(tmp_path / "hmda", [])
    (tmp_path / "hmda" / "command.txt").unlink()
    with pytest.raises(ValueError, match="has no command.txt: only runs that have ended"):
        archive.record(results, tmp_path / "runs")


def test_plans_survive_the_archive():
    kept = archive.load("qsr_cifar10_vit")
    rows = archive.rows_of(archive.FOLDER / "qsr_cifar10_vit")
    again = archive.restore(rows, json.loads(json.dumps(archive.describe(kept))))
    assert again.plans == kept.plans and again.plans["qsr"].rounds == 292


BROKEN = (b"x", gzip.compress(b"", mtime=0)[:-9], gzip.compress(b"[" * 10**5, mtime=0))


@pytest.mark.parametrize("content", BROKEN, ids=["text", "cut", "nested"])
def test_a_broken_archive_is_named(tmp_path, content):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "metrics.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"digits/metrics.jsonl.gz' is broken"):
        archive.load("digits", tmp_path)


def trained(chosen, name, arms, *, speeds=(), **fields):
    """The comparison of a study's arms over five seeds, from its command."""
    task, recipe = recipes.load(name)
    recipe, arms = recipe._replace(**fields), {arm: chosen.arms[arm] for arm in arms}
    criterion = chosen.criterion._replace(target=recipe.target)
    chosen = chosen._replace(arms=arms, speeds=speeds, criterion=criterion)
    trains = Trainer(chosen, task, recipe, step_seconds=1e-4)
    result, _ = search.search(chosen, trains, seeds=5)
    labels = {name: arm.label for name, arm in arms.items()}
    plans = {} if speeds else commands.sync_plans(arms, task, recipe)
    return statistics.compare(statistics.data_of(result), labels, criterion, plans)


def gain(comparison, what, arm="cd_grab", base="rr", *, rate="fastest", speed=None):
    """The 95 % interval of the paired logarithms of ratios, or of points."""
    ratio = what.startswith("to ")
    values = paired(frame(comparison, rate, speed), arm, base, what, ratio=ratio)
    assert len(values) == 5
    mean, half = statistics.interval(values)
    return mean - half, mean, mean + half


@pytest.mark.slow
def test_coordination_needs_a_third_of_the_epochs_on_digits():
    arms = ("rr", "unzip", "id_mean", "id_pair", "cd_grab")
    comparison = trained(cd_grab.STUDY, "digits", arms, bound_every=0)
    assert gain(comparison, "to epoch")[1] > math.log(3)
    for pair in (("id_pair", "rr"), ("cd_grab", "id_pair")):
        assert gain(comparison, "to epoch", *pair)[1] > 0
    goal = comparison.criterion._replace(scalar=statistics.ABOVE)  # as the study has it
    best = {
        chosen.arm: statistics.lowest(statistics.curves(chosen.runs, goal.scalar), goal)
        for chosen in comparison.at()
    }
    unzip, unzip_half = statistics.interval(best["unzip"])
    random, random_half = statistics.interval(best["rr"])
    assert unzip > random - unzip_half - random_half  # the control is no better than D-RR
    assert best["cd_grab"].mean() < 0.2 * min(best["id_mean"].mean(), best["id_pair"].mean())


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [5, 10, 20, 50, 100])
def test_the_coordinated_bound_is_flat_for_a_million_vectors(num_workers):
    vectors = herding.unit_vectors(num_workers, 10**6 // num_workers)

    def bound(name):
        return herding.bounds_over_rounds(vectors, name, rounds=15)[-1]

    assert bound("cd_grab") <= 3
    published = {5: 6.0, 10: 8.5, 20: 11.8, 50: 17.5, 100: 24.0}[num_workers]
    assert 0.75 * published < bound("id_pair") < 1.33 * published
    assert 100 < bound("rr") < 1000


@pytest.mark.slow
def test_a_ninth_of_the_syncs_costs_digits_no_accuracy_beyond_noise():
    comparison = trained(qsr.STUDY, "digits_mlp", ("parallel", "qsr", "cubic"))
    assert (comparison.plans["qsr"].rounds, comparison.plans["qsr"].total_steps) == (219, 2000)
    ends = frame(comparison)["test/accuracy"].groupby("arm")
    assert (ends.count() == 5).all() and (ends.min() > 0.96).all()
    low, _, high = gain(comparison, "test/accuracy", "qsr", "parallel", rate="best")
    assert low < 0.005 and high > -0.005


@pytest.mark.slow
def test_an_echoed_run_needs_a_third_of_the_loads_on_digits_and_more_steps():
    arms = ("none", "larger_lr", "diffusion")
    comparison = trained(echoing.STUDY, "digits_wide", arms, speeds=(8,))
    for base in ("none", "larger_lr"):  # not a larger learning rate in disguise
        assert gain(comparison, "to loads", "diffusion", base, rate="best", speed=8)[1] > math.log(
            3
        )
    sums = frame(comparison, speed=8).groupby("arm").sum()
    steps, rounds, loads = sums["to step"], sums["to rounds"], sums["to loads"]
    assert steps["diffusion"] > steps["none"] and rounds["diffusion"] <= loads["diffusion"]


@pytest.mark.parametrize("name", ["README.md", "docs/results/index.md"])
def test_other_pages_have_the_score(printed, name):
    text = " ".join((ROOT / name).read_text(encoding="utf-8").split())
    counts = re.search(r"\d+ claims, \d+ tested: (.*?)\.\n", printed)[1]
    of = {words: number for number, words in re.findall(r"(\d+) ([\w ]+)", counts)}
    words = {"same direction": "same way", "none of that size": "not of that size"}
    for kind, number in of.items():
        assert re.search(f"{number} (are |go the )?{words.get(kind, kind)}", text)


def test_pages_that_sum_up_have_the_numbers_of_the_records():
    """Or, where no run was recorded, those of a table of results beside its command."""
    phrases = numbers.phrases()
    tables = "".join(
        path.read_text(encoding="utf-8")
        for path in [*PAGE.parent.glob("*.md"), ROOT / "docs" / "peers.md"]
        if not path.name.startswith(("found_", "index", "negative"))
    )
    for page, texts in phrases.items():
        whole = numbers.plain((ROOT / page).read_text(encoding="utf-8"))
        assert [text for text in texts if text not in whole] == [], page
        for text in texts:
            whole = whole.replace(text, "")
        prose = re.split(" ## (?:What it gains|Is it for me)", whole, maxsplit=1)[
            -1
        ]  # not programs
        prose = re.sub(r"`[^`]*`|\]\(\S+\)", "", prose)
        listed = {*re.findall(r"\d+\.\d+", tables)}
        assert {*re.findall(r"(?<![\w.])\d+\.\d+(?!\.?\w)", prose)} <= listed, page
