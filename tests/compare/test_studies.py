"""Every study from flags to its page, also interrupted; and one run of `train`."""

import json
import os
import signal

import numpy as np
import pytest

from experiments import cd_grab, combined, echoing, qsr
from experiments.compare import search
from experiments.report import records, tables
from experiments.trainer import step
from local_opt import SyncPlan
from tests.commands import LENGTH, SHORT, SMALL, study_run, train_run

STUDIES = {  # the study, its flags, its pictures
    "cd_grab": (
        cd_grab,
        ["--epochs=4", "--bound_every=2", "--arms=rr,cd_grab+sketch16"],
        ["comparison.png"],
    ),
    "qsr": (qsr, [*LENGTH, "--width=8", "--arms=parallel,qsr+int8"], ["comparison.png"]),
    "echoing": (
        echoing,
        [
            "--width=8",
            "--arms=none,diffusion",
            "--speeds=2",
            "--total_steps=40",
            "--horizon=20",
            "--evaluate_every=5",
            "--target=0.5",
            "--step_seconds=0.001",
            "--seeds=1",
        ],
        ["comparison_R2.png"],
    ),
    "combined": (
        combined,
        [*LENGTH, "--echo_factor=2", "--learning_rates=0.1"],
        ["comparison.png", "effects.png"],
    ),
}


def written(folder):
    """The records of a folder, without times."""
    lines = records.read(os.path.join(folder, "metrics.jsonl"))
    return sorted(
        json.dumps({k: v for k, v in r.items() if k != "seconds"}, sort_keys=True) for r in lines
    )


def panels_of(picture):
    """Rows of panels in a PNG, from its height."""
    height = int.from_bytes(picture.read_bytes()[20:24], "big")
    return round((height / 110 - 0.9) / 3.7)


# One study whose runs share programs; the others, one with slow input, in the slow tests.
OFTEN = ("qsr",)
RESUMED = [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in STUDIES]


@pytest.mark.parametrize("name", RESUMED)
def test_a_stopped_study_resumes_with_the_same_results(name, tmp_path, monkeypatch, capsys):
    module, arguments, pictures = STUDIES[name]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    study_run(module, [*SMALL, *arguments], whole, draw=True)
    text = capsys.readouterr().out
    assert (whole / "table.md").read_text().strip() in text
    for picture in pictures:
        assert (whole / picture).stat().st_size > 10_000
    recorded = records.read(str(whole / "metrics.jsonl"))
    table = (whole / "table.md").read_text()
    # Where half of the test set chooses, the train loss is that of as many examples as it has.
    parts = {r.get("train_examples") for r in recorded if r["step"] and not r["diverged"]}
    assert parts == {None}, "96 examples train, and 200 test"
    # Digits' optimum is known, and the studies that look at the train loss choose by what is above.
    assert ("above the optimum |" in table) == (name in ("cd_grab", "combined"))
    scalars = {panel.scalar for panel in module.STUDY.panels} | {*tables.LABELS}
    more = {k for r in recorded for k in r if k in step.SCALARS} - scalars  # each has a panel
    assert panels_of(whole / pictures[0]) == len(module.STUDY.panels) + len(more)
    for r in recorded:
        plan = whole / f"plan_{r['arm']}.json"
        if r["ended"] and plan.exists():
            assert r["rounds"] == SyncPlan.read(str(plan)).rounds
            assert (r["allreduces"] > r["rounds"]) == r["order"].startswith("cd_grab")
    page = (whole / "report.html").read_text()
    assert page.count("data:image/png;base64,") == len(pictures)
    assert not list((whole / "checkpoints").glob("*"))

    if name != "echoing":
        return
    seen, real = [], search.search

    def stopped(*args, on_record, **options):
        def record_and_stop(record):
            on_record(record)
            seen.append(record)
            if len(seen) == 6:
                os.kill(os.getpid(), signal.SIGTERM)

        return real(*args, on_record=record_and_stop, **options)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as exit_code:
        patch.setattr(search, "search", stopped)
        study_run(module, [*SMALL, *arguments], cut)
    assert exit_code.value.code == 128 + signal.SIGTERM
    assert not (cut / "table.md").exists()
    assert not seen[-1]["ended"] and list((cut / "checkpoints").glob("*")), "saved in a run"
    study_run(module, [*SMALL, *arguments], cut)
    assert written(cut) == written(whole)


def test_a_table_says_of_which_examples_its_train_loss_is(tmp_path):
    given = [*SMALL, *LENGTH, "--width=8", "--arms=parallel", "--num_test=64", "--seeds=1"]
    study_run(qsr, given, tmp_path)
    recorded = records.read(str(tmp_path / "metrics.jsonl"))
    assert all(r["train_examples"] == 64 for r in recorded), "of 96"
    assert "| train loss (first 64) |" in (tmp_path / "table.md").read_text()


def test_one_run_writes_its_plans_and_its_model(tmp_path):
    import orbax.checkpoint as ocp

    decisions = ["--order=cd_grab", "--sketch=16", "--echo=diffusion", "--p=cosine"]
    arguments = [*SHORT, *decisions, "--echo_factor=2"]
    train_run(arguments, tmp_path)
    recorded = records.read(str(tmp_path / "metrics.jsonl"))
    assert [r["step"] for r in recorded] == [6, 12, 18, 24]
    last = recorded[-1]
    assert last["ended"] and (last["order"], last["sync"], last["echo"]) == (
        "cd_grab+sketch16",
        "qsr",
        "diffusion+cosine",
    )
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["task"], settings["seed"], settings["learning_rate"]) == (
        "digits_cosine",
        0,
        0.2,
    )
    assert (tmp_path / "sync_plan.json").exists() and (tmp_path / "echo_plan.json").exists()
    with ocp.StandardCheckpointer() as checkpointer:
        model = checkpointer.restore(os.path.abspath(tmp_path / "model"))
    assert all(np.isfinite(leaf).all() for leaf in model.values())
    before = written(tmp_path)
    train_run(arguments, tmp_path)  # nothing is left to do
    assert written(tmp_path) == before
