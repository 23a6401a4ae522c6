"""The cost of plans before they run, and communication times out of measured totals."""

import inspect
import json
import math
import pathlib
import sys

import numpy as np
import optax
import pytest
from absl import app, flags

import local_opt
import ordering.input
from experiments import forecast, timing
from experiments.results import archive, plots
from experiments.study.cost import POLICIES
from experiments.study.tables import SYNC_RULES
from experiments.tasks import TASKS

ROOT = pathlib.Path(__file__).parents[2]
COST = {"num_params": 10**9, "num_workers": 4, "step_seconds": 0.5, "gigabits_per_second": 32}


def test_ring_sends_twice_the_parameters_less_one_share():
    assert local_opt.sync_bytes(1000, num_workers=1) == 0
    assert local_opt.sync_bytes(1000, num_workers=2) == 4000
    assert local_opt.sync_bytes(1000, num_workers=4, bytes_per_param=2) == 3000
    assert local_opt.sync_bytes(1000, num_workers=10**6) == pytest.approx(8000, rel=1e-5)


def test_forecast_by_hand():
    """4 workers, 4 GB: 6 GB sent per sync, 48 Gb, 1.5 s at 32 Gb/s; 3 syncs in 10 steps."""
    found = local_opt.forecast(local_opt.constant(4, total_steps=10), **COST, latency_seconds=0.25)
    assert found == (3, 0.3, 18e9, 5.0, 3 * 1.75, 0.0, 5.0 + 3 * 1.75, 6e9 / 0.5)
    alone = COST | {"num_workers": 1}
    found = local_opt.forecast(local_opt.every_step(10), **alone, latency_seconds=0.25)
    assert found == (10, 1.0, 0.0, 5.0, 0.0, 0.0, 5.0, 0.0)


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_params", 0), ("num_params", 1.5), ("num_workers", 0), ("num_workers", True),
        ("step_seconds", 0), ("step_seconds", math.nan), ("gigabits_per_second", -1),
        ("bytes_per_param", 0), ("latency_seconds", -1), ("latency_seconds", math.inf),
    ],
)  # fmt: skip
def test_forecast_names_the_bad_value(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        local_opt.forecast(local_opt.every_step(3), **COST | {name: value})


def test_two_runs_give_the_papers_estimator():
    """Appendix F: M = H / (H - 1) (T_para - T_H)."""
    h, parallel, local = 8, 26.7, 20.2
    found = local_opt.communication_time([1, 1 / h], [parallel, local])
    assert found.communication == pytest.approx(h / (h - 1) * (parallel - local), rel=1e-12)
    assert found.compute == pytest.approx(parallel - found.communication, rel=1e-12)
    assert found.residual == pytest.approx(0, abs=1e-12)
    assert math.isnan(found.compute_half_width) and math.isnan(found.communication_half_width)


def test_least_squares_recovers_known_parts():
    volumes = np.array([1, 0.5, 0.25, 0.1])
    found = local_opt.communication_time(volumes, 19.5 + 7.25 * volumes)
    assert found[:2] == pytest.approx((19.5, 7.25))
    assert found.communication_half_width == pytest.approx(0, abs=1e-9)
    slower = local_opt.communication_time([1, 0.5], [10, 11])
    assert slower.communication == pytest.approx(-2), "a negative time is told"


def test_intervals_hold_the_truth_as_often_as_they_say():
    from scipy.stats import linregress, t

    generator = np.random.default_rng(0)
    volumes, held = np.array([1, 0.5, 0.25, 0.25, 0.1]), np.zeros(2)
    for _ in range(1000):
        times = 19.5 + 7.25 * volumes + generator.normal(0, 0.3, 5)
        found = local_opt.communication_time(volumes, times)
        held[0] += abs(found.compute - 19.5) < found.compute_half_width
        held[1] += abs(found.communication - 7.25) < found.communication_half_width
    assert (np.abs(held / 1000 - 0.95) < 0.025).all()
    line = linregress(volumes, times)
    assert found.communication == pytest.approx(line.slope)
    assert found.communication_half_width == pytest.approx(t.ppf(0.975, 3) * line.stderr)
    assert found.compute_half_width == pytest.approx(t.ppf(0.975, 3) * line.intercept_stderr)


@pytest.mark.parametrize(
    "volumes, times, message",
    [
        ([1], [3], "at least two runs"), ([1, 0.5], [3], "equal length"),
        ([0.5, 0.5], [3, 4], "all volumes are 0.5"), ([1, 0], [3, 4], "in .0, 1."),
        ([1, 4], [3, 4], "in .0, 1."), ([1, math.nan], [3, 4], "in .0, 1."),
        ([1, 0.5], [3, 0], "positive and finite"), ([1, 0.5], [math.nan, 3], "positive and finite"),
        ([1, 0.5], [math.inf, 3], "positive and finite"),
    ],
)  # fmt: skip
def test_communication_time_says_what_is_wrong(volumes, times, message):
    with pytest.raises(ValueError, match=message):
        local_opt.communication_time(volumes, times)


CUSTOM = ["--task=custom", "--total_steps=100", "--num_params=10", "--learning_rates=0.4",
          "--growth=0.25", "--h_base=2", "--step_seconds=0.1"]  # fmt: skip


def parsed(*given):
    values = flags.FlagValues()
    forecast.define_flags(values)
    values(["forecast", *given])
    return values


def test_published_recipes_from_flags_to_table_and_picture(tmp_path, capsys):
    folder = tmp_path / "forecast"
    forecast.main(["forecast"], parsed(f"--output_dir={folder}"))
    text = (folder / "table.md").read_text()
    assert text in capsys.readouterr().out
    rows = [[c.strip() for c in line.split("|")[1:4]] for line in text.split("\n") if "|" in line]
    assert ["QSR", "9711", "10.375%"] in rows and ["QSR", "24792", "39.731%"] in rows
    assert ["constant H", "23400", "25.000%"] in rows
    assert "19.45 h of computation and 7.25 h" in text and "8.67 h" in text
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(found) == 2 * len(forecast.SHOWN)
    by_rule = {r["rule"]: r for r in found if r["task"] == "imagenet_vit_b"}
    assert by_rule["inverse"]["rounds"] == by_rule["cubic"]["rounds"] == 9711
    every, ring = by_rule["parallel"], local_opt.sync_bytes(86_567_656, num_workers=16)
    assert every["sent_bytes"] == pytest.approx(93600 * ring)
    assert every["compute_hours"] == pytest.approx(forecast.published_split().compute)
    assert every["total_hours"]["25"] - every["compute_hours"] == pytest.approx(
        93600 * ring * 8 / 25e9 / 3600
    )
    assert (folder / "periods.png").stat().st_size > 20_000
    assert not list(folder.glob("*.tmp*"))
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["runs"]["imagenet_vit_b"]["workers"] == 16
    docs = (ROOT / "docs" / "local_steps.md").read_text()
    assert all(part in docs for part in text.strip().split("\n\n")), "docs/local_steps.md"


def test_a_run_of_ones_own_needs_its_values():
    with pytest.raises(app.UsageError, match="--growth.*--step_seconds"):
        forecast.runs_from_flags(parsed("--task=custom", "--total_steps=100"))
    (run,) = forecast.runs_from_flags(parsed(*CUSTOM)).values()
    assert run.recipe.total_steps == 100 and run.recipe.warmup_steps == 0
    made = forecast.config_of(run.recipe)
    assert made.growth == pytest.approx(0.1)  # alpha
    plans = {rule: SYNC_RULES[rule].plan(made) for rule in forecast.SHOWN}
    assert plans["swap"].periods.max() == 20 and plans["post_local"].rounds == 75
    assert abs(plans["inverse"].rounds - plans["qsr"].rounds) <= 1


def test_flags_replace_a_settings_values():
    """Any setting can be planned; only a published one knows its seconds per step."""
    with pytest.raises(app.UsageError, match="pass .'--step_seconds'"):
        forecast.runs_from_flags(parsed("--task=digits"))
    values = parsed("--task=digits", "--step_seconds=0.2", "--h_base=4", "--epochs=7")
    (run,) = forecast.runs_from_flags(values).values()
    assert run.seconds_are == "given by --step_seconds" and run.num_params == 650
    task = TASKS["digits"]()
    assert run.recipe._replace(total_steps=None) == task.recipe._replace(h_base=4, epochs=7)
    per_epoch = -(-1536 // (task.recipe.workers * task.recipe.unit_size))
    assert run.recipe.total_steps == 7 * -(-per_epoch // task.recipe.units_per_step)


def test_corners_redraw_the_plan():
    plan = local_opt.qsr(
        optax.cosine_decay_schedule(0.1, 200), total_steps=200, alpha=0.1, h_base=2
    )
    steps, lengths = archive.corners(plan)
    every = np.arange(200)
    drawn = lengths[np.searchsorted(steps, every, side="right") - 1]
    assert (drawn == plan.period_at(every)).all() and steps[-1] == 200
    assert len(steps) < plan.rounds


def test_a_panel_shows_plans_of_one_run(tmp_path):
    plans = {f"H = {h}": local_opt.constant(h, total_steps=100) for h in range(1, 13)}
    path = tmp_path / "periods.png"
    plots.periods({"constants": (np.full(100, 0.1), plans)}, str(path), "title")
    assert path.stat().st_size > 10_000
    plans["longer"] = local_opt.every_step(200)
    with pytest.raises(ValueError, match="100, 200"):
        plots.periods({"constants": (np.full(100, 0.1), plans)}, str(path), "title")


def test_echoing_from_speeds_to_table_and_picture(tmp_path, capsys):
    folder = tmp_path / "echo"
    given = ["--load_seconds=0.008", "--step_seconds=0.002", "--depths=4,1", "--total_steps=400"]
    forecast.main(["forecast"], parsed(*given, f"--output_dir={folder}"))
    text = (folder / "table.md").read_text()
    assert text in capsys.readouterr().out and "R = 4" in text
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(r["policy"], r["depth"]) for r in found] == [
        (name, depth) for name in POLICIES for depth in (1, 4)
    ]
    by_name = {r["policy"]: r for r in found if r["depth"] == 1}
    assert by_name["error diffusion, p = 1/R"]["slowdown"] == 1
    assert by_name["fixed, e = ceil(R)"]["loads"] == 100
    assert by_name["no echo"]["seconds_per_step"] == pytest.approx(0.008, rel=0.01)
    assert not list(folder.glob("*.tmp*")) and not (folder / "periods.png").exists()


def test_echoing_measures_digits_without_tensorflow(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.chdir(tmp_path)
    given = [
        "--measure=digits",
        "--units_per_step=1",
        "--unit_size=32",
        "--depths=1",
        "--total_steps=100",
    ]
    forecast.main(["forecast"], parsed(*given))
    assert "digits, batch 32, measured here, NumPy gather" in capsys.readouterr().out
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name == "forecast_echo" and (folder / "table.md").exists()


def test_measuring_reads_through_batches(monkeypatch):
    """A stand-in with the same arguments: TensorFlow takes seconds to import."""
    arguments, read = inspect.signature(ordering.input.batches), []

    def batches(*args, **options):
        given = arguments.bind(*args, **options).arguments
        for part in given["indices"].reshape(-1, given["batch_size"]):
            read.append(len(part))
            yield {name: values[part] for name, values in given["source"].items()}

    monkeypatch.setattr(ordering.input, "batches", batches)
    task = TASKS["digits"]()
    recipe = task.recipe._replace(units_per_step=4, unit_size=16)
    speed = timing.measure(task, recipe, rounds=2, per_round=20)
    assert speed.load > 0 and speed.step > 0
    assert speed.label == "digits, batch 64, measured here, tf.data"
    assert read == 60 * [64]  # a round to warm up, and two that count
    with pytest.raises(ValueError, match="unit_size is 2000: digits has 1536"):
        timing.measure(task, recipe._replace(units_per_step=125))


@pytest.mark.parametrize(
    "given, message",
    [
        (["--load_seconds=1"], "--load_seconds is given alone"),
        (["--load_seconds=0", "--step_seconds=1"], "--load_seconds is 0"),
        (["--load_seconds=1", "--step_seconds=-1"], "--step_seconds is -1"),
        (["--load_seconds=nan", "--step_seconds=1"], "--load_seconds is nan"),
        (["--measure=digits", "--step_seconds=1"], "--measure is given with"),
        (["--load_seconds=1", "--step_seconds=1", "--depths=1,0"], "--depths has .'0'"),
        (["--arms=qsr,often"], "--arms has .'often'"),
    ],
)
def test_command_says_what_is_wrong(given, message):
    with pytest.raises(app.UsageError, match=message):
        forecast.main(["forecast"], parsed(*given))
