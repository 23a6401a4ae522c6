"""What `test_extension` runs in a copy of the tree in which the additions are."""

import importlib
import json

from tests.bad_values import outcomes
from tests.commands import study_run

FUNCTIONS = {
    "backwards",
    "alternating",
    "thirds",
    "late",
    "cosine_classifier",
    "plain_momentum",
    "forgetting",
}


def test_bad_arguments_of_the_additions_are_refused_by_name():
    tried = set()
    for package in ("ordering", "input", "local_opt", "models"):
        calls = importlib.import_module(f"tests.bad_calls_{package}").CALLS
        new = {name: calls[name] for name in calls if name in FUNCTIONS}
        for run, valid, _ in new.values():
            run(**valid)
        wrong = [(text, result) for text, result in outcomes(new) if result.kind != "refused"]
        assert not wrong, wrong
        tried |= {*new}
    assert tried == FUNCTIONS, tried


def test_a_study_of_the_additions_runs(tmp_path):
    flags = ["--distance=3", "--total_steps=40", "--schedule=power", "--evaluations=2"]
    study = importlib.import_module("experiments.to_and_fro")
    study_run(study, [*flags, "--seeds=2"], tmp_path, draw=True)
    results = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = next(r for r in reversed(results) if r["arm"] == "all")
    assert (last["step"], last["rounds"], last["loads"], last["epoch"]) == (40, 3, 30, 3.0)
    words = {name: last[name].split("+")[0] for name in ("order", "sync", "echo")}
    assert words == {"order": "backwards", "sync": "thirds", "echo": "late"}
    assert 0 < last["test/brier"] < 0.5
    assert last["test/accuracy"] > 0.9 and 0 < last["losses/spread"] < 1
    assert len([r for r in results if r["ended"]]) == 4 * (2 + 2)
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert (settings["task"], settings["distance"]) == ("blobs", 3.0)
    assert "all that is new" in (tmp_path / "table.md").read_text()
    for name in ("comparison.png", "report.html"):
        assert (tmp_path / name).stat().st_size > 10_000
