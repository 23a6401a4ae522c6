"""Looks at recorded runs: what is kept of them, the verdict at each, and what a seed costs."""

import json
import math

import pytest

from experiments.results import archive, records, verdict_page, verdict_picture
from experiments.results.effects import at_end
from experiments.results.rule import Claim, Gain, history
from experiments.results.statistics import Criterion, compare
from tests.recorded_runs import finished

ARMS = {"rr": "D-RR", "cd_grab": "CD-GraB"}
GAINS = [0.0, 3.0, 1.5, *9 * [2.0, 1.0]]  # points of accuracy, of each seed


def rows_of(gains, **fields):
    """An epoch of both orders; the accuracy of a seed differs by its gain."""
    return [
        {"study": "cd_grab", "arm": arm, "speed": None, "learning_rate": 0.1, "seed": seed,
         "phase": "run", "epoch": 1, "step": 10, "seconds": 60.0 + 40.0 * (arm == "rr"),
         "train/loss": 1.0, "test/accuracy": 0.5 + gain / 100 * (arm == "cd_grab"), **fields}
        for arm in ARMS
        for seed, gain in enumerate(gains)
    ]  # fmt: skip


def compared(gains, counts=()):
    looked = tuple({"seeds": n, "date": f"2026-01-{n:02d}"} for n in counts)
    return compare(rows_of(gains), ARMS, Criterion())._replace(looks=looked)


CLAIM = Claim("higher", "2 points", ("hmda",), Gain(at_end("test/accuracy"), 2.0))


def test_a_run_that_is_recorded_again_with_more_seeds_has_another_look(tmp_path):
    target = tmp_path / "runs" / "hmda"
    for count in (3, 3, 5):
        results = finished(tmp_path / f"{len([*tmp_path.iterdir()])}", rows_of([1.0] * count))
        archive.record(results, target, f"python -m x \\\n    --seeds={count}\npython -m y\n")
    found = archive.load("hmda", tmp_path / "runs").looks
    assert [look["seeds"] for look in found] == [3, 5]  # the same look, taken again, is one
    assert [look["commands"] for look in found] == [
        [f"python -m x --seeds={count}", "python -m y"] for count in (3, 5)
    ]
    assert archive.command_of("hmda", tmp_path / "runs") == "python -m x --seeds=5"
    assert all(look["versions"]["device"] == "abacus" for look in found)
    assert all(set(look) == {"seeds", "date", "commit", "versions", "commands"} for look in found)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    fewer = finished(tmp_path / "fewer", rows_of([1.0] * 4))
    with pytest.raises(ValueError, match="recorded with 5 seeds, and these are 4: pass --seeds=5"):
        archive.record(fewer, target, "python -m x")
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}


@pytest.mark.parametrize("counts", [[], [3], [3, 3, 4], [4, 3], [5]])
def test_looks_that_are_not_those_of_the_records_are_refused(tmp_path, counts):
    archive.record(finished(tmp_path / "a", rows_of([1.0] * 4)), tmp_path / "hmda", "python -m x")
    lines = "".join(json.dumps({"seeds": count}) + "\n" for count in counts)
    (tmp_path / "hmda" / "looks.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=r"looks.jsonl has looks with \[.*and the records 4"):
        archive.load("hmda", tmp_path)


def test_a_crash_between_a_look_and_its_seeds_leaves_the_look_before(tmp_path, monkeypatch):
    target = tmp_path / "hmda"
    archive.record(finished(tmp_path / "a", rows_of([1.0] * 4)), target, "python -m x")
    more = [r | {"seed": r["seed"] + 4} for r in rows_of([1.0] * 4)]
    with monkeypatch.context() as patch, pytest.raises(OSError):
        replace = archive.os.replace

        def crash(source, place):
            if str(place).endswith(".gz"):
                raise OSError("the disk is gone")
            replace(source, place)

        patch.setattr(archive.os, "replace", crash)
        archive.extend(target, more, ["python -m x"])
    assert [look["seeds"] for look in archive.load("hmda", tmp_path).looks] == [4]
    archive.extend(target, more, ["python -m x"])
    assert [look["seeds"] for look in archive.load("hmda", tmp_path).looks] == [4, 8]


def test_the_verdict_is_that_of_the_latest_look_at_its_level():
    found = history(CLAIM, {"hmda": compared(GAINS, [3, 12, 21])})
    assert [verdict.seeds for verdict in found] == [3, 12, 21]
    assert [verdict.word for verdict in found] == ["undecided", "reproduced", "reproduced"]
    assert found[1] == CLAIM.judge(2, compared(GAINS[:12]))
    assert [found[0]] == history(CLAIM, {"hmda": compared(GAINS[:3])})
    (once,) = history(CLAIM, {"hmda": compared(GAINS)})  # at the first look's level
    assert once.low > found[-1].low and math.isclose(once.mean, found[-1].mean)


def test_a_look_without_new_data_of_a_claim_is_none():
    rows = rows_of(GAINS[:6]) + [r | {"learning_rate": 0.2} for r in rows_of(GAINS[:3])]
    rows = [r for r in rows if r["seed"] < 3 or r["learning_rate"] == 0.1]
    looked = ({"seeds": 2, "date": "a"}, {"seeds": 3, "date": "b"}, {"seeds": 6, "date": "c"})
    known = {"hmda": compare(rows, ARMS, Criterion())._replace(looks=looked)}
    same, more = (
        CLAIM._replace(judge=Gain(at_end("test/accuracy", rate=rate), 2.0)) for rate in (0.2, 0.1)
    )
    assert history(same, known) == [same.judge(1, known["hmda"])]
    # Two seeds decide nothing, and cost no level.
    assert [verdict.seeds for verdict in history(more, known)] == [3, 6]
    assert history(more, known)[1] == more.judge(2, known["hmda"])


@pytest.mark.parametrize(
    ("runs", "seeds"),
    [
        ([[(3, "a"), (9, "b")]], [(3,), (9,)]),
        ([[(3, "a")], [(5, "a"), (9, "b")]], [(3, 5), (3, 9)]),
        ([[(3, "a"), (4, "c")], [(5, "b"), (9, "c")]], [(3, 5), (4, 9)]),
        ([[(3, "a"), (4, "a")], [(5, "a")]], [(3, 5), (4, 5)]),
        ([], [()]),
    ],
)
def test_a_look_at_any_run_of_a_claim_is_one_at_the_claim(runs, seeds):
    looked = [
        compared(GAINS)._replace(looks=[{"seeds": n, "date": date} for n, date in run])
        for run in runs
    ]
    assert archive.seeds_at_looks(looked) == seeds


def test_a_seed_costs_the_last_seconds_of_both_arms_in_all_phases():
    rows = rows_of([1.0] * 3) + rows_of([1.0] * 3, phase="tune", seconds=7.0)
    earlier = [r | {"step": 1, "seconds": 1.0} for r in rows]
    known, asked = compare(earlier + rows, ARMS, Criterion()), {(arm, None, 0.1) for arm in ARMS}
    assert archive.seconds_per_seed(known, asked) == 60 + 100 + 7 + 7
    assert archive.seconds_per_seed(known, set()) is None
    no_times = compare(rows_of([1.0] * 3, seconds=math.nan), ARMS, Criterion())
    assert archive.seconds_per_seed(no_times, asked) is None


def test_the_page_says_what_is_undecided_its_cost_and_its_history(tmp_path):
    claims = [CLAIM, CLAIM._replace(text="ours", paper="-", judge=Gain(at_end("test/accuracy")))]
    found = verdict_page.rows({"hmda": compared([-2.0, 3.0, 0.5, -1.0, 2.0], [3, 5])}, claims)
    assert [row.verdict.word for row in found] == 2 * ["undecided"]
    assert [verdict_page.paper(row) for row in found] == ["2 points", "ours: 0.5 points"]
    first, verdict = found[0], found[0].verdict
    assert first.hours == (verdict.needed - 5) * 160 / 3600
    text = verdict_page.page_of_results(found)
    assert "All 2 claims: 2 undecided." in text
    assert "more seeds changed" not in text  # the same at both looks
    later = first._replace(history=[*first.history, verdict._replace(word="smaller")])
    changed = "- higher: 3 seeds undecided, 5 seeds undecided, 5 seeds smaller."
    assert changed in verdict_page.page_of_results([later])
    lines = [line.split("|")[1].strip() for line in text.splitlines() if "| 5 " in line]
    assert lines == ["higher", "ours"]  # the cheaper one first
    table = verdict_page.page_of_claims(found, {}, tmp_path)
    assert verdict_page.looks(first) in table and f"| 5; needs {verdict.needed}, " in table
    assert verdict_picture.shown(found) == [first] and first.group == "Orders"


def test_intervals_of_any_kind_are_drawn(tmp_path):
    def row(low, high, mean, word, note=""):
        verdict = history(CLAIM, {"hmda": compared(GAINS[:3])})[-1]
        verdict = verdict._replace(low=low, high=high, mean=mean, word=word, note=note)
        return verdict_page.Row("claim", CLAIM, [verdict], None, "Orders")

    inf = math.inf
    drawn = [
        row(-inf, inf, 0.0, "undecided"), row(-inf, -inf, -inf, "opposite"),
        row(9.0, inf, inf, "smaller"), row(1.0, 3.0, 2.0, "reproduced", "unzip as well"),
        row(-1.0, 0.5, 0.0, "none of that size"),
    ]  # fmt: skip
    for name, some in (("a.png", drawn), ("none.png", [])):
        verdict_picture.draw(some, str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 0


def test_a_commit_is_noted():
    noted = records.commit()
    assert noted is None or set(noted) <= set("0123456789abcdef+")
