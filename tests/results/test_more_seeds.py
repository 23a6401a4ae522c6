"""More seeds for what is undecided: which runs, in which order, and what a look leaves behind."""

import itertools
import json

import numpy as np
import pytest
from absl import flags as absl_flags

from experiments import cd_grab, more_seeds
from experiments.results import archive, claims, records, verdict_page
from experiments.results.effects import at_end
from experiments.results.rule import Claim, Gain, history
from experiments.study import recipes, study
from experiments.tasks import TASKS
from tests.recorded_runs import apart_by_seed

COMMAND = (
    "python -m experiments.cd_grab --task=digits --data_dir=DIR --workers=4 --units_per_step=16 "
    "--num_train=256 --epochs=2 --arms=rr,cd_grab --learning_rates=0.1,0.2 --bound_every=0"
)


@pytest.fixture
def known_runs(monkeypatch):
    rows = {"tiny": claims.Run("Digits", "tiny"), "other": claims.Run("Others", "-")}
    monkeypatch.setattr(claims, "RUNS", rows)
    monkeypatch.setattr(verdict_page, "RUNS", rows)
    return rows


def claim(name, **options):
    return Claim("less", "-", (name,), Gain(at_end("train/loss", **options)))


def test_the_next_look_has_twice_the_seeds_of_the_arms_that_are_undecided(known_runs):
    claimed = [claim("tiny"), claim("tiny", order="unzip"), claim("other")]
    found = {
        "tiny": apart_by_seed({"rr": 1.0, "cd_grab": 1.0, "unzip": 0.01, "id_pair": 1.0}),
        "other": apart_by_seed({"rr": 1.0, "cd_grab": 1.0}),
    }
    assert [history(c, found)[-1].word for c in claimed] == ["undecided", "reproduced", "undecided"]
    jobs = more_seeds.jobs(found, claimed)
    assert {job.name: job.seeds for job in jobs} == {"tiny": 6, "other": 6}
    tiny = next(job for job in jobs if job.name == "tiny")
    assert {(run.arm, run.seed) for run in tiny.runs} == {
        (arm, seed) for arm in ("rr", "cd_grab") for seed in (3, 4, 5)
    }
    asked = {("rr", None, 0.1), ("cd_grab", None, 0.1)}
    seconds = archive.seconds_per_seed(found["tiny"], asked)
    np.testing.assert_allclose(tiny.hours, 3 * seconds / 3600)
    assert jobs == sorted(jobs, key=lambda job: job.hours)
    assert not more_seeds.jobs(found, claimed[1:2])


@pytest.fixture
def tiny(tmp_path, monkeypatch, known_runs):
    """A recorded run of the real study, three seeds; (folder of runs, how to go on)."""
    task, recipe = recipes.load("digits", num_train=256)
    monkeypatch.setitem(TASKS, "digits", lambda *a, **k: task._replace(recipe=recipe))
    flags = absl_flags.FlagValues()
    study.define_flags(cd_grab.STUDY, flags)
    out = tmp_path / "out"
    flags(["cd_grab", *COMMAND.split()[3:], "--seeds=3", f"--output_dir={out}"])
    study.run(cd_grab.STUDY, flags)
    archive.record(str(out), tmp_path / "runs" / "tiny", COMMAND)

    def undecidable(comparison):
        effect = at_end("train/loss")(comparison)
        values = dict(zip(effect.values, itertools.cycle([-1.0, 1.0]), strict=False))
        return effect._replace(values=values)

    def go_on(*, looks, **more):
        """So many looks, before the hour is over."""
        clock = iter([0] * (1 + looks))
        monkeypatch.setattr(more_seeds.time, "monotonic", lambda: next(clock, 9e9))
        return more_seeds.decide(
            [Claim("less", "-", ("tiny",), Gain(undecidable))], hours=1.0, data=str(tmp_path),
            results=str(tmp_path / "work"), folder=tmp_path / "runs", **more,
        )  # fmt: skip

    return tmp_path / "runs", go_on


def test_a_look_adds_seeds_and_a_stopped_one_goes_on_and_leaves_the_record_alone(
    tiny, monkeypatch, capsys
):
    folder, go_on = tiny
    before, packed = archive.load("tiny", folder), folder / "tiny" / "metrics.jsonl.gz"
    old = packed.read_bytes()
    carry_out, calls = more_seeds.search.carry_out, []

    def stopped(chosen, trained, asked, **options):
        calls.append(len(options["done"]))
        if len(calls) == 1:
            found, _ = carry_out(chosen, trained, asked[:2], **options)
            return found, 15
        return carry_out(chosen, trained, asked, **options)

    monkeypatch.setattr(more_seeds.search, "carry_out", stopped)
    assert go_on(looks=1) == 15
    assert packed.read_bytes() == old
    kept = (folder.parent / "work" / "tiny" / "metrics.jsonl").read_text().splitlines()
    assert go_on(looks=1) == 0
    assert calls == [0, len(kept)] and len({r["seed"] for r in map(json.loads, kept)}) == 2
    assert "h are left" in capsys.readouterr().out
    assert not (folder.parent / "work" / "tiny").exists()
    after = archive.load("tiny", folder)
    assert [look["seeds"] for look in after.looks] == [3, 6]
    assert after.looks[1]["commands"] == [COMMAND] and "jax" in after.looks[1]["versions"]
    assert list(after.records)[: len(before.records)] == list(before.records)
    new = {records.run_of(r) for r in after.records} - {records.run_of(r) for r in before.records}
    asked = {run[0]: run[2] for run in at_end("train/loss")(before).runs[0]}
    assert new == {(arm, None, asked[arm], s, "run") for arm in asked for s in (3, 4, 5)}


def test_what_never_ran_is_run_last_and_recorded(tiny, known_runs):
    folder, go_on = tiny
    command = COMMAND.removeprefix(more_seeds.MODULE) + " --seeds=3"
    known_runs["new"] = claims.Run("New", "-", command=command)
    assert [job[:2] for job in more_seeds.jobs(verdict_page.load(folder), [claim("tiny")])][-1] == (
        "new", 0,
    )  # fmt: skip
    assert go_on(looks=1, names=["new"]) == 0
    (look,) = archive.load("new", folder).looks
    assert look["seeds"] == 3 and look["commands"] == [more_seeds.MODULE + command]


def test_a_recorded_run_trained_again_is_that_of_the_record_and_other_data_are_refused(tiny):
    folder, go_on = tiny
    text = more_seeds.train_again(["tiny"], data="", arms=["rr", "cd_grab"], folder=folder)
    lines = [line.split("|") for line in text.splitlines()[2:]]
    assert [line[2].strip() for line in lines] == ["D-RR", "CD-GraB"]
    assert all(line[5].strip() == "equal" and float(line[9]) < 2e-6 for line in lines)
    with pytest.raises(ValueError, match="'nothing' is not recorded"):
        more_seeds.train_again(["nothing"], data="", folder=folder)
    path = folder / "tiny" / "settings.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"data": "others"}))
    with pytest.raises(ValueError, match="recorded with other data"):
        go_on(looks=1)


def test_every_recorded_run_can_be_continued():
    for name in verdict_page.load():
        command = archive.command_of(name)
        assert command.split()[2].removeprefix("experiments.") in verdict_page.STUDIES
        assert (claims.RUNS[name].data == "") == (f"--data_dir={more_seeds.DIR}" not in command)
