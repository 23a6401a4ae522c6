"""The cost of plans before a run, and communication times from measured totals."""

import math
import pathlib

import numpy as np
import pytest

import local_opt
import ordering.data
from experiments import forecast, timing
from experiments.compare import flags, recipes
from experiments.compare.arms import arm_of
from experiments.data import TASKS
from experiments.trainer.config import plans_of
from tests.commands import parsed, rows_of
from tests.problems import COMPRESSORS
from tests.sources import Examples

ROOT = pathlib.Path(__file__).parents[2]


def test_published_recipes_from_flags_to_table_and_picture(tmp_path, capsys):
    folder = tmp_path / "forecast"
    forecast.main(parsed(forecast, f"--output_dir={folder}"))
    text = (folder / "table.md").read_text()
    assert text in capsys.readouterr().out
    rows = [[c.strip() for c in line.split("|")[1:4]] for line in text.split("\n") if "|" in line]
    assert ["QSR", "9711", "10.375%"] in rows and ["QSR", "24792", "39.731%"] in rows
    assert ["constant H", "23400", "25.000%"] in rows
    assert (folder / "periods.png").stat().st_size > 20_000
    docs = (ROOT / "docs" / "results" / "local_steps.md").read_text()
    assert text.split("\n\n")[1] in docs, "docs/results/local_steps.md"


def test_flags_replace_a_settings_values():
    """Any setting can be planned; only published ones have seconds per step."""
    with pytest.raises(ValueError, match="no published times: pass --step_seconds"):
        forecast.forecast_of("digits", parsed(forecast))
    values = parsed(
        forecast, "--step_seconds=0.2", "--h_base=4", "--epochs=7", "--arms=parallel,qsr"
    )
    _, text, (rates, plans) = forecast.forecast_of("digits", values)
    assert "650 parameters" in text and "(given by --step_seconds)" in text
    recipe = TASKS["digits"]().recipe
    per_epoch = -(-1536 // (recipe.workers * recipe.unit_size))
    steps = 7 * -(-per_epoch // recipe.units_per_step)
    assert len(rates) == plans["parallel"].rounds == steps
    assert plans["QSR"].periods.min() == 4


def by_rule(text):
    return {row["rule"]: row for row in rows_of(text)}


def rounds_by_hand(rates, warmup, h_base, growth):
    """QSR's rounds, one after another."""
    t, rounds = 0, 0
    while t < len(rates):
        grown = h_base if t < warmup else math.floor((growth / rates[t]) ** 2)
        t, rounds = t + max(h_base, grown), rounds + 1
    return rounds


def test_a_forecast_plans_as_the_study_with_the_same_flags_does():
    """An epoch of ViT-B has 312 loads: falls every 100 of 300 epochs, and ends every half."""
    given = ["--task=imagenet_vit_b", "--schedule=step", "--decay_every=100"]
    text = forecast.forecast_of("imagenet_vit_b", parsed(forecast, *given, "--arms=qsr"))[1]
    rates = np.minimum(1, np.arange(93_600) / 10_000) * 0.1 ** (np.arange(93_600) // 31_200)
    rounds = rounds_by_hand(rates, 10_000, 4, 2.1875)
    assert by_rule(text)["QSR"]["rounds"] == str(rounds) == "7867"
    for more in (["--schedule=cycles"], ["--schedule=cosine", "--warmup_steps=77"]):
        more = ["--task=digits_mlp", "--step_seconds=1", "--total_steps=103", *more]
        rules = ["qsr", "inverse", "constant+half", "every_load", "swap"]
        values = parsed(forecast, *more, f"--arms={','.join(rules)}")
        plans = forecast.forecast_of("digits_mlp", values)[2][1]
        task, recipe = recipes.load("digits_mlp", abstract=True)
        recipe = recipe._replace(**flags.recipe_fields(values))
        for rule in rules:
            planned = plans_of(task, recipe, arm_of(rule), rate=0.2, seed=3)
            assert plans[arm_of(rule).label] == planned.sync, rule


def test_a_forecast_counts_what_compressors_send():
    """Bytes and seconds are those of the syncs; volume is their share of a sync in every step."""
    size, workers, rules = 86_567_656, 16, ["qsr", "qsr+int8", "constant", "constant+int4"]
    values = parsed(forecast, f"--arms={','.join(rules)}")
    rows = by_rule(forecast.forecast_of("imagenet_vit_b", values)[1])
    whole = 2 * (workers - 1) / workers * size * 4
    sent = {
        "QSR": 9711 * whole,
        "QSR, int8": 9711
        * local_opt.costs.sync_bytes(size, num_workers=16, compress=COMPRESSORS["int8"]),
        "constant H": 23_400 * whole,
        "constant H, int4": 23_400
        * local_opt.costs.sync_bytes(size, num_workers=16, compress=COMPRESSORS["int4"]),
    }
    assert set(rows) == set(sent)
    hours = float(rows["QSR"]["compute h"])
    for label, expected in sent.items():
        row = rows[label]
        assert row["GB sent"] == f"{expected / 1e9:,.0f}"
        assert row["volume"] == f"{expected / (93_600 * whole):.3%}"
        slow = hours + 8 * expected / 10e9 / 3600
        assert float(row["h at 10 Gb/s"]) == pytest.approx(slow, abs=0.011)
    alone = parsed(forecast, "--workers=1", "--step_seconds=1", "--arms=constant,constant+int8")
    rows = by_rule(forecast.forecast_of("digits", alone)[1])
    assert {(r["GB sent"], r["volume"]) for r in rows.values()} == {("0", "25.000%")}


def test_loads_are_timed_on_the_path_that_reads_them(monkeypatch):
    """By tf.data, or else batch by batch."""
    pytest.importorskip("tensorflow")
    task, read, tf_dataset = TASKS["digits"](), [], ordering.data.tf_dataset

    def noted(source, indices):
        read.append(len(indices))
        return tf_dataset(source, indices)

    def absent(*args, **options):
        raise ImportError

    recipe = task.recipe._replace(units_per_step=4, unit_size=16)
    for reader, source in ((noted, "tf.data"), (absent, "one by one")):
        monkeypatch.setattr(ordering.data, "tf_dataset", reader)
        speed = timing.measure(task, recipe, rounds=2, per_round=20)
        assert speed.load > 0 and speed.step > 0
        assert speed.label == f"digits, batch 64, measured here, {source}"
    assert read == [60 * 64]  # a round to warm up, and two that count
    read_data = task._replace(train=Examples(task.train))  # a source, which no arrays hold
    monkeypatch.undo()
    result = timing.measure(read_data, recipe, rounds=2, per_round=3)
    assert result.load > 0 and result.label.startswith("digits, batch 64, measured here, ")
