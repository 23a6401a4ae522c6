"""More seeds for what is undecided: which runs, in which order, and what a look leaves behind."""

import json

import numpy as np
import pytest

from experiments import cd_grab, verdicts
from experiments.results import archive, records
from experiments.studies import recipes, study
from experiments.tasks import TASKS
from experiments.verdict_parts import again, looks, runs, undecided
from experiments.verdict_parts.claim import Claim, decide
from experiments.verdict_parts.effects import Difference, at_end, cheaper
from experiments.verdict_parts.rule import Effect, Gain
from tests.test_results_verdicts import compared, finished, order_records

COMMAND = (
    "python -m experiments.cd_grab --task=digits --data_dir=DIR --workers=4 --units_per_step=16 "
    "--num_train=256 --epochs=2 --arms=rr,cd_grab --learning_rates=0.1,0.2 --bound_every=0"
)
RUNS = {
    "tiny": runs.Run("Digits", "tiny"), "other": runs.Run("Others", "-"),
}  # fmt: skip


def claim(name, **options):
    measure = at_end("train/loss", **options)
    return Claim("less", "-", (name,), Gain(measure))


def known(losses, seeds=3, **options):
    """Of runs whose losses differ by the seed more than by the order."""
    rows = order_records(losses, seeds=seeds, **options)
    for row in rows:
        sign = 1 if row["arm"] == "rr" else -1
        row |= {"train/loss": row["train/loss"] * np.exp(sign * 0.2 * (row["seed"] % 2))}
    return compared([r | {"ended": r["epoch"] == 6, "learning_rate": 0.1} for r in rows])


@pytest.fixture
def table(monkeypatch):
    def use(*rows):
        monkeypatch.setattr(undecided, "CLAIMS", rows)
        monkeypatch.setattr(runs, "RUNS", RUNS)

    return use


def test_the_next_look_has_twice_the_seeds_of_the_arms_that_are_undecided(table):
    table(claim("tiny"), claim("tiny", order="unzip"), claim("other"))
    found = {
        "tiny": known({"rr": 1.0, "cd_grab": 1.0, "unzip": 0.01, "id_pair": 1.0}),
        "other": known({"rr": 1.0, "cd_grab": 1.0}, epochs=6),
    }
    assert [decide(c, found).word for c in undecided.CLAIMS] == [
        "undecided", "reproduced", "undecided",
    ]  # fmt: skip
    jobs = undecided.jobs(found, most_hours=1.0)
    assert {job.name: job.seeds for job in jobs} == {"tiny": 6, "other": 6}
    tiny = next(job for job in jobs if job.name == "tiny")
    assert {(run.arm, run.seed) for run in tiny.runs} == {
        (arm, seed) for arm in ("rr", "cd_grab") for seed in (3, 4, 5)
    }
    seconds = looks.seconds_per_seed(found["tiny"], {("rr", None, 0.1), ("cd_grab", None, 0.1)})
    np.testing.assert_allclose(tiny.hours, 3 * seconds / 3600)
    assert jobs == sorted(jobs, key=lambda job: job.hours)
    assert not undecided.jobs(found, most_hours=1e-9)


def test_a_difference_is_paired_by_seed_and_asks_for_the_runs_of_both():
    def measure(comparison):
        seeds = tuple(range(len(comparison)))
        return Effect(np.array(comparison), runs=(("a", 2, comparison[0]),), seeds=seeds)

    judge = Gain(Difference(measure, ("one", "other")))
    verdict = judge(1, [1.0, 1.1, 1.2, 1.3], [0.5, 0.61, 0.7])
    np.testing.assert_allclose(verdict.mean, np.mean([0.5, 0.49, 0.5]))
    assert verdict.seeds == 3 and "with one against" in verdict.text
    assert judge.asked(1, [0.25]) == (("a", 2, 0.25),)

    def late(comparison):
        return measure(comparison)._replace(seeds=(1, 2, 3), censored=comparison[0] > 9)

    apart = Difference(lambda c: late(c) if len(c) == 3 else measure(c), ("one", "other"))
    np.testing.assert_allclose(apart([0, 1, 2, 4], [0.5, 0.7, 0.9]).values, [0.5, 1.3, 3.1])
    verdict = Gain(apart)(1, [1.0, 1.1, 1.2, 1.3], [10.0, 10.0, 10.0])
    assert (verdict.word, verdict.note) == ("undecided", "not all seeds arrive")


@pytest.fixture
def tiny(tmp_path, monkeypatch, table):
    """A recorded run of the real study, three seeds; (folder of runs, how to go on)."""
    task, recipe = recipes.load("digits", num_train=256)
    monkeypatch.setitem(TASKS, "digits", lambda *a, **k: task._replace(recipe=recipe))
    flags = verdicts.flags.FlagValues()
    study.define_flags(cd_grab.STUDY, flags)
    given = COMMAND.split()[3:]
    out = tmp_path / "out"
    flags(["cd_grab", *given, "--seeds=3", f"--output_dir={out}"])
    study.run(cd_grab.STUDY, flags)
    archive.record(str(out), tmp_path / "runs" / "tiny", COMMAND)
    undecidable = Gain(lambda comparison: at_end("train/loss")(comparison)._replace(
        values=np.array([-1.0, 1.0] * 3)[: len(at_end("train/loss")(comparison).values)]
    ))  # fmt: skip
    table(Claim("less", "-", ("tiny",), undecidable))
    options = {"data": str(tmp_path), "results": str(tmp_path / "work")}
    return tmp_path / "runs", lambda **more: undecided.run(
        **options, folder=tmp_path / "runs", **more
    )


def test_a_look_adds_seeds_to_the_record_and_is_written_down(tiny, monkeypatch, capsys):
    folder, go_on = tiny
    before = archive.load("tiny", folder)
    spent = iter([0, 0, 0, 9e9])
    monkeypatch.setattr(undecided.time, "monotonic", lambda: next(spent, 9e9))
    assert go_on(hours=1.0) == 0
    after = archive.load("tiny", folder)
    assert [look["seeds"] for look in after.looks] == [3, 6]
    assert after.looks[1]["commands"] == [COMMAND] and "jax" in after.looks[1]["versions"]
    assert list(after.records)[: len(before.records)] == list(before.records)
    new = {records.run_of(r) for r in after.records} - {records.run_of(r) for r in before.records}
    asked = {run[0]: run[2] for run in at_end("train/loss")(before).runs}
    assert new == {(arm, None, asked[arm], s, "run") for arm in asked for s in (3, 4, 5)}
    assert "h are left" in capsys.readouterr().out
    assert not (folder.parent / "work" / "tiny").exists()


def test_a_look_that_is_stopped_goes_on_and_leaves_the_record_alone(tiny, monkeypatch):
    folder, go_on = tiny
    before = (folder / "tiny" / "metrics.jsonl.gz").read_bytes()
    carry_out, calls = undecided.search.carry_out, []

    def stopped(chosen, trained, asked, **options):
        calls.append(len(options["done"]))
        if len(calls) == 1:
            found, _ = carry_out(chosen, trained, asked[:2], **options)
            return found, 15
        return carry_out(chosen, trained, asked, **options)

    monkeypatch.setattr(undecided.search, "carry_out", stopped)
    assert go_on(hours=1.0) == 15
    assert (folder / "tiny" / "metrics.jsonl.gz").read_bytes() == before
    kept = (folder.parent / "work" / "tiny" / "metrics.jsonl").read_text().splitlines()
    spent = iter([0, 0, 0])
    monkeypatch.setattr(undecided.time, "monotonic", lambda: next(spent, 9e9))
    assert go_on(hours=1.0) == 0
    assert calls == [0, len(kept)] and len({r["seed"] for r in map(json.loads, kept)}) == 2
    assert archive.load("tiny", folder).looks[-1]["seeds"] == 6


def test_what_never_ran_is_run_last_and_recorded(tiny, monkeypatch):
    folder, go_on = tiny
    row = runs.Run("New", "-", command=COMMAND.removeprefix(undecided.MODULE) + " --seeds=3")
    monkeypatch.setitem(RUNS, "new", row)
    spent = iter([0, 0])
    monkeypatch.setattr(undecided.time, "monotonic", lambda: next(spent, 9e9))
    jobs = undecided.jobs(runs.load(folder), most_hours=1.0)
    assert [(job.name, job.seeds) for job in jobs] == [("tiny", 6), ("new", 0)]
    assert go_on(hours=1.0, names=["new"]) == 0
    assert archive.load("new", folder).looks[0]["seeds"] == 3
    assert undecided.MODULE + row.command in archive.looks("new", folder)[0]["commands"]


def test_other_data_than_those_of_the_record_are_refused(tiny):
    folder, go_on = tiny
    path = folder / "tiny" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "others"}))
    with pytest.raises(ValueError, match="recorded with other data"):
        go_on(hours=1.0)


def test_seconds_of_runs_without_their_delay_are_not_compared():
    row = {"arm": "none", "speed": 2, "learning_rate": 0.1, "phase": "report", "order": "rr"}
    rows = [
        {**row, "arm": arm, "seed": seed, "step": 5, "loads": loads, "seconds": 1.0,
         "valid/accuracy": 1.0, "test/accuracy": 1.0, "ended": True, **delayed,
         "phase": phase}
        for arm, loads in (("none", 10), ("diffusion", 5))
        for seed in range(4)
        for delayed in ({"delayed": False} if seed else {},)
        for phase in ("tune", "report")
    ]  # fmt: skip
    criterion = looks.statistics.Criterion("valid/accuracy", False, "target", 0.5)
    both = compared(rows, criterion)
    assert len(cheaper("loads", speed=2)(both).values) == 4
    assert len(cheaper("seconds", speed=2)(both).values) == 1


def test_every_recorded_run_can_be_continued():
    for name in runs.load():
        text = (archive.FOLDER / name / archive.COMMAND).read_text()
        module = archive.commands_of(text)[0].split()[2]
        assert module in ("experiments.cd_grab", "experiments.qsr", "experiments.echoing")
        assert (runs.RUNS[name].data == "") == (f"--data_dir={undecided.DIR}" not in text)
    assert finished and COMMAND.count(undecided.DIR) == 1


def test_a_recorded_run_trained_again_is_that_of_the_record(tiny):
    folder, _ = tiny
    text = again.compare(["tiny"], data="", arms=["rr", "cd_grab"], folder=folder)
    lines = [line.split("|") for line in text.splitlines()[2:]]
    assert [line[2].strip() for line in lines] == ["D-RR", "CD-GraB"]
    assert all(line[5].strip() == "equal" and float(line[9]) < 2e-6 for line in lines)
    with pytest.raises(ValueError, match="'nothing' is not recorded"):
        again.compare(["nothing"], data="", folder=folder)
