"""Recorded runs, further seeds, and the pages made from them."""

import gzip
import importlib
import json
import re

import numpy as np
import pytest

from experiments import verdicts
from experiments.results import archive, plots, report, verdict_page
from experiments.results.claims import RUNS
from experiments.results.effects import Measure
from experiments.results.rule import MATTERS, VERDICTS, Claim, Interval
from experiments.study import study
from tests import studies
from tests.recorded_runs import compared, finished, order_records


def test_a_recorded_run_keeps_six_digits_and_more_seeds_add_a_look(tmp_path):
    for count in (3, 3, 5):
        rows = order_records({"rr": 1.0, "cd_grab": 0.9 / 7}, seeds=count)
        results = tmp_path / str(len([*tmp_path.iterdir()])) / "hmda"
        made = f"python -m x --data_dir=/my/data --seeds={count} --output_dir={results}"
        target = verdicts.record(finished(results, rows, made), tmp_path / "runs")
    ((name, kept),) = verdict_page.load(tmp_path / "runs").items()
    assert name == "hmda" and kept.arms == {"rr": "D-RR", "cd_grab": "CD-GraB"}
    for row, record in zip(rows, kept.records, strict=True):
        assert record["train/loss"] == float(f"{row['train/loss']:.6g}")
    assert archive.pack(kept.records) == (target / "metrics.jsonl.gz").read_bytes()
    assert [look["seeds"] for look in kept.looks] == [3, 5]  # the same look, taken again, is one
    made = [f"python -m x --data_dir=DIR --seeds={count}" for count in (3, 5)]
    assert [look["commands"] for look in kept.looks] == [[line] for line in made]
    assert archive.commands(target) == made and kept.looks[1]["versions"]["device"] == "abacus"
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    fewer = finished(tmp_path / "fewer" / "hmda", order_records({"rr": 1.0}, seeds=4))
    with pytest.raises(ValueError, match="recorded with 5 seeds, and these are 4: pass --seeds=5"):
        verdicts.record(fewer, tmp_path / "runs")
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}


def test_plans_survive_the_archive():
    kept = archive.load("qsr_cifar10_vit")
    again = archive.restore(kept.records, json.loads(json.dumps(archive.describe(kept))))
    assert again.plans == kept.plans and again.plans["qsr"].rounds == 292


def test_only_known_finished_runs_are_recorded(tmp_path):
    with pytest.raises(ValueError, match="hmdb.*add a row to RUNS"):
        verdicts.record(finished(tmp_path / "hmdb", []), tmp_path)
    results = finished(tmp_path / "hmda", [])
    (tmp_path / "hmda" / "command.txt").unlink()
    with pytest.raises(ValueError, match="has no command.txt: only runs that have ended"):
        verdicts.record(results, tmp_path)


def rows_of(text, start):
    return [line for line in text.splitlines() if line.startswith(f"| {start}")]


def test_recording_a_run_gives_a_verdict_and_makes_the_page_stale(
    tmp_path,
):
    paths = [tmp_path / "README.md", tmp_path / "results.md"]
    for path in paths:
        path.write_text(f"before\n{verdicts.BEGIN}\nold\n{verdicts.END}\nafter\n")

    def pages():
        recorded = verdict_page.load(tmp_path / "runs")
        rows = verdict_page.rows(recorded, verdicts.claims())
        return verdicts.pages(rows, recorded, paths, tmp_path / "runs")

    title = RUNS["lenet_w64"].title
    before = pages()[paths[0]]
    assert all("| not run " in line for line in rows_of(before, title))
    rows = order_records({"rr": 1.0, "cd_grab": 0.9, "unzip": 1.0}, rates=(0.01, 0.02))
    verdicts.record(finished(tmp_path / "lenet_w64", rows), tmp_path / "runs")
    after, results = pages().values()
    assert "undecided" in results and "not run" in results
    losses = rows_of(after, f"{title}: train loss, lr 0.01")
    assert len(losses) == 1 and "| reproduced " in losses[0] and "(#lenet_w64)" in losses[0]
    assert "### lenet_w64\n" in after and "    python -m x\n" in after and "abacus" in after
    assert after.startswith("before\n") and after.endswith("after\n") and "old" not in after
    for path, text in pages().items():
        path.write_text(text)
    verdicts.check(pages())
    paths[1].write_text(results.replace(" reproduced", " smaller", 1))
    with pytest.raises(ValueError, match="^out of date .*: results.md. Run .*experiments.verdicts"):
        verdicts.check(pages())
    for text in ("", verdicts.BEGIN, f"{verdicts.END}{verdicts.BEGIN}"):
        paths[0].write_text(text)
        with pytest.raises(ValueError, match="must hold"):
            pages()


def test_counts_keep_what_papers_say_and_what_is_ours_apart():
    """Every claim is in one line; a sign alone is no size; and it is said how many were tested."""
    one, verdict = ("hmda",), verdict_page.rows({}, verdicts.claims())[0].verdict
    seen = verdict._replace(word="reproduced", found=Interval(0.2, 0.1, 0.3))
    rows = [
        verdict_page.Row(Claim(f"{paper} {size}", paper, one, size=size), [found])
        for paper, size, found in (
            ("4 times", 1.4, seen), ("higher", 0.0, seen), ("-", 0.0, seen), ("-", 0.0, seen),
            ("~2", 0.7, seen._replace(word="opposite")), ("~2", 0.7, verdict),
        )
    ]  # fmt: skip
    *lines, _, text, _, _ = verdict_page.count(rows).splitlines()
    assert lines == [
        "- 3 published with a size: 1 reproduced, 1 opposite, 1 not run.",
        "- 1 published as a sign, or as a gain that goes: 1 reproduced.",
        "- 2 ours, of a sign, which no paper states: 2 reproduced.",
    ]
    assert text.startswith("5 claims were tested, each at an error rate of its own, 5 % over all")
    page = (verdicts.DOCS / "index.md").read_text()
    found = verdict_page.rows(verdict_page.load(), verdicts.claims())
    assert verdict_page.count(found) in page
    assert sum(int(n) for n in re.findall(r"^- (\d+) (?:published|ours)", page, re.M)) == len(found)


def test_the_pages_explain_the_rule_and_show_every_picture():
    readme, results = (path.read_text() for path in verdicts.PAGES)
    assert all(f"| **{word}** " in readme for word in VERDICTS)
    assert all(kind.words in readme and kind.words in results for kind in MATTERS.values())
    for anchor in re.findall(r"\]\(#([^)]+)\)", readme):
        assert f"\n### {anchor}\n" in readme
    shown = re.findall(r"orders_\w+\.png", readme)
    assert sorted(shown) == sorted(p.name for p in verdicts.DOCS.glob("orders_*.png"))


def test_pictures_are_drawn(tmp_path):
    rows = order_records({"rr": 1.0, "cd_grab": 0.9}, epochs=8)
    others = [row | {"study": "qsr"} for row in rows]
    verdicts.draw_orders({"gpt2": compared(rows), "qsr_cifar10_vit": compared(others)}, tmp_path)
    inf, found = np.inf, verdict_page.rows({"gpt2": compared(rows)}, verdicts.claims())
    of_gpt2 = next(row for row in found if row.claim.size and row.verdict.seeds)
    for bounds in ((0.0, -inf, inf), (-inf, -inf, -inf), (inf, 9.0, inf), (0.1, 0.0, 0.2)):
        shown = of_gpt2.verdict._replace(found=Interval(*bounds), size=1.0, word="smaller")
        verdict_page.picture([of_gpt2._replace(history=[shown])], str(tmp_path / "results.png"))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"orders_gpt2.png", "results.png"}


COMMAND = (
    "python -m experiments.cd_grab --task=digits --workers=4 --units_per_step=16 --num_train=128 "
    "--epochs=1 --arms=rr,unzip,cd_grab --learning_rates=0.1 --bound_every=0 --seeds=3"
)


def parsed(command):
    """(the study of a command, its flags)"""
    _, _, name, *arguments = command.split()
    module = importlib.import_module(name)
    return module.STUDY, studies.parsed(module, *arguments)


def test_a_printed_command_adds_seeds_and_recording_it_adds_a_look(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "comparison", lambda *panels: None)
    (results := tmp_path / "results" / "digits_w64").mkdir(parents=True)

    def run(command):
        monkeypatch.setattr(report, "command_line", lambda: command)
        study.run(*parsed(command))
        verdicts.record("results/digits_w64", tmp_path / "runs")
        return archive.load("digits_w64", tmp_path / "runs")

    first = run(f"{COMMAND} --output_dir=results/digits_w64")
    claim = Claim("less", "-", ("digits_w64",), Measure("train/loss"))
    (row,) = verdict_page.rows({"digits_w64": first}, [claim])
    undecided = row.verdict._replace(word="undecided", seeds=3, needed=5)
    printed = verdicts.commands([row._replace(history=[undecided])], tmp_path / "runs")
    assert printed.splitlines()[0] == "less: 3 seeds; needs 5"
    command = printed.splitlines()[1].strip()
    # The folder is lost: a run that was begun has its settings, and the records are put back.
    (results / "metrics.jsonl").write_bytes(
        gzip.decompress((tmp_path / "runs" / "digits_w64" / "metrics.jsonl.gz").read_bytes())
    )
    for name in ("command.txt", "metrics.sha256"):
        (results / name).unlink()
    second = run(command)
    kept, new = np.split(np.array(second.records), [len(first.records)])
    assert kept.tolist() == first.records and second.arms == first.arms
    assert {(r["arm"], r["seed"]) for r in new if r["ended"]} == {
        ("rr", 3), ("rr", 4), ("cd_grab", 3), ("cd_grab", 4)
    }  # fmt: skip
    assert [look["seeds"] for look in second.looks] == [3, 5]
    assert archive.commands(tmp_path / "runs" / "digits_w64") == [
        COMMAND, command.removesuffix(" --output_dir=results/digits_w64")
    ]  # fmt: skip


def test_every_printed_command_belongs_to_a_study():
    rows = verdict_page.rows(verdict_page.load(), verdicts.claims())
    lines = [line for line in verdicts.commands(rows).splitlines() if line.startswith("    ")]
    assert lines
    for line in lines:
        chosen, values = parsed(line)
        assert study.arms_of(chosen, values.arms)


BROKEN = (b"x", gzip.compress(b"", mtime=0)[:-9], gzip.compress(b"[" * 10**5, mtime=0))


@pytest.mark.parametrize("content", BROKEN, ids=["text", "cut", "nested"])
def test_a_broken_archive_is_named(tmp_path, content):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "metrics.jsonl.gz").write_bytes(content)
    with pytest.raises(ValueError, match=r"digits/metrics.jsonl.gz' is broken"):
        archive.load("digits", tmp_path)
