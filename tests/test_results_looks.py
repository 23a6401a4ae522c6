"""Looks at recorded runs: what is kept of them, the verdict at each, and what a seed costs."""

import json
import math

import numpy as np
import pytest

from experiments import verdicts
from experiments.results import archive, records
from experiments.results.statistics import Criterion, compare
from experiments.verdict_parts import looks, page, picture
from experiments.verdict_parts.claim import Claim, decide, history, seconds_per_seed
from experiments.verdict_parts.effects import at_end
from experiments.verdict_parts.rule import MATTERS, VERDICTS, Gain
from tests.test_results_verdicts import finished

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
        results = finished(
            tmp_path / f"results{len(list(tmp_path.iterdir()))}", rows_of([1.0] * count)
        )
        archive.record(results, target, f"python -m x \\\n    --seeds={count}\n")
    found = archive.looks("hmda", tmp_path / "runs")
    assert [look["seeds"] for look in found] == [3, 5]  # the same look, taken again, is one
    assert [look["commands"] for look in found] == [
        ["python -m x --seeds=3"],
        ["python -m x --seeds=5"],
    ]
    assert all(look["versions"] == {"jax": "0.0.1", "device": "abacus"} for look in found)
    assert all(set(look) == {"seeds", "date", "commit", "versions", "commands"} for look in found)
    assert archive.load("hmda", tmp_path / "runs").looks == tuple(found)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    fewer = finished(tmp_path / "fewer", rows_of([1.0] * 4))
    with pytest.raises(ValueError, match="recorded with 5 seeds, and these are 4: pass --seeds=5"):
        archive.record(fewer, target, "python -m x")
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}


def test_a_run_without_noted_looks_has_one_with_all_seeds(tmp_path):
    archive.record(finished(tmp_path / "a", rows_of([1.0] * 4)), tmp_path / "hmda", "python -m x")
    (tmp_path / "hmda" / "looks.jsonl").unlink()
    (look,) = archive.looks("hmda", tmp_path)
    assert (look["seeds"], look["commit"], look["commands"]) == (4, None, ["python -m x"])


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


def test_every_recorded_run_has_noted_looks():
    for path in archive.FOLDER.iterdir():
        assert (path / archive.LOOKS).exists(), path
        assert all(look["date"] and look["commands"] for look in archive.looks(path.name))


def test_the_verdict_is_that_of_the_latest_look_at_its_level():
    known = {"hmda": compared(GAINS, [3, 12, 21])}
    found = history(CLAIM, known)
    assert [verdict.seeds for verdict in found] == [3, 12, 21]
    assert [verdict.word for verdict in found] == ["undecided", "reproduced", "reproduced"]
    assert found[-1] == decide(CLAIM, known)
    assert found[1] == CLAIM.judge(2, compared(GAINS[:12]))
    assert found[0] == decide(CLAIM, {"hmda": compared(GAINS[:3])})
    once = decide(CLAIM, {"hmda": compared(GAINS)})  # at the first look's level
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
    looked = [[{"seeds": n, "date": date} for n, date in run] for run in runs]
    assert looks.states(looked) == seeds


def test_a_seed_costs_the_last_seconds_of_both_arms_in_all_phases():
    rows = rows_of([1.0] * 3) + rows_of([1.0] * 3, phase="tune", seconds=7.0)
    earlier = [r | {"step": 1, "seconds": 1.0} for r in rows]
    known = {"hmda": compare(earlier + rows, ARMS, Criterion())}
    assert seconds_per_seed(CLAIM, known) == 60 + 100 + 7 + 7
    assert seconds_per_seed(CLAIM, {}) is None
    assert seconds_per_seed(Claim("planned", "-"), known) is None
    no_times = {"hmda": compare(rows_of([1.0] * 3, seconds=math.nan), ARMS, Criterion())}
    assert seconds_per_seed(CLAIM, no_times) is None


def test_the_page_says_what_is_undecided_its_cost_and_its_history(tmp_path):
    claims = [CLAIM, CLAIM._replace(text="ours", paper="-", judge=Gain(at_end("test/accuracy")))]
    found = page.rows({"hmda": compared([-2.0, 3.0, 0.5, -1.0, 2.0], [3, 5])}, claims)
    assert [row.verdict.word for row in found] == 2 * ["undecided"]
    assert [page.paper(row) for row in found] == ["2 points", "ours: 0.5 points"]
    first, verdict = found[0], found[0].verdict
    assert first.hours == (verdict.needed - 5) * 160 / 3600
    text = page.results(found)
    assert "All 2 claims: 2 undecided." in text
    assert "more seeds changed" not in text  # the same at both looks
    later = first._replace(history=[*first.history, verdict._replace(word="smaller")])
    changed = "- higher: 3 seeds undecided, 5 seeds undecided, 5 seeds smaller."
    assert changed in page.results([later])
    assert page.seeds(first).startswith(f"5; needs {verdict.needed}, ")
    lines = [line.split("|")[1].strip() for line in text.splitlines() if "| 5 " in line]
    assert lines == ["higher", "ours"]  # the cheaper one first
    assert page.looks(first) in page.table(found, {})
    assert picture.shown(found) == [first] and first.group == "Orders"
    picture.draw(found, str(tmp_path / "results.png"))
    assert [path.name for path in tmp_path.iterdir()] == ["results.png"]


def test_intervals_of_any_kind_are_drawn(tmp_path):
    def row(low, high, mean, word, note=""):
        verdict = decide(CLAIM, {"hmda": compared(GAINS[:3])})
        verdict = verdict._replace(low=low, high=high, mean=mean, word=word, note=note)
        return page.Row("claim", CLAIM, [verdict], None, "Orders")

    inf = math.inf
    drawn = [
        row(-inf, inf, 0.0, "undecided"), row(-inf, -inf, -inf, "opposite"),
        row(9.0, inf, inf, "smaller"), row(1.0, 3.0, 2.0, "reproduced", "unzip as well"),
        row(-1.0, 0.5, 0.0, "none of that size"),
    ]  # fmt: skip
    picture.draw(drawn, str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").stat().st_size > 0
    picture.draw([], str(tmp_path / "none.png"))


def test_commits_and_commands_are_noted():
    assert archive.commands_of("python -m a \\\n    --x=1\npython -m b\n") == [
        "python -m a --x=1",
        "python -m b",
    ]
    noted = records.commit()
    assert noted is None or set(noted) <= set("0123456789abcdef+")


def test_the_pages_say_what_the_rule_does():
    readme, results = (path.read_text() for path in verdicts.PAGES)
    assert all(f"| **{word}** " in readme for word in VERDICTS)
    assert all(kind.words in readme and kind.words in results for kind in MATTERS.values())


def test_the_picture_of_the_page_is_there():
    assert (verdicts.PICTURES / page.PICTURE).exists()
    assert np.all([claim in verdicts.PAGES[1].read_text() for claim in ("results.png", page.TABLE)])
