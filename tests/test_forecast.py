"""The cost of plans before they run, and communication times out of measured totals."""

import json
import math

import numpy as np
import optax
import pytest
from absl import app, flags

import local_opt
from experiments import forecast, plan_plots, published

COST = {"num_params": 10**9, "num_workers": 4, "step_seconds": 0.5, "gigabits_per_second": 32}


def test_ring_sends_twice_the_parameters_less_one_share():
    assert local_opt.ring_bytes(1000, num_workers=1) == 0
    assert local_opt.ring_bytes(1000, num_workers=2) == 4000
    assert local_opt.ring_bytes(1000, num_workers=4, bytes_per_param=2) == 3000
    assert local_opt.ring_bytes(1000, num_workers=10**6) == pytest.approx(8000, rel=1e-5)


def test_forecast_by_hand():
    """4 workers, 4 GB: 6 GB sent per sync, 48 Gb, 1.5 s at 32 Gb/s; 3 syncs in 10 steps."""
    found = local_opt.forecast(local_opt.constant(4, total_steps=10), **COST, latency_seconds=0.25)
    assert found == (3, 0.3, 18e9, 5.0, 3 * 1.75, 5.0 + 3 * 1.75)
    alone = COST | {"num_workers": 1}
    found = local_opt.forecast(local_opt.every_step(10), **alone, latency_seconds=0.25)
    assert found == (10, 1.0, 0.0, 5.0, 0.0, 5.0)


def test_faster_links_shorten_communication_alone():
    plan = local_opt.constant(4, total_steps=100)
    slow, fast = (local_opt.forecast(plan, **COST | {"gigabits_per_second": g}) for g in (25, 100))
    assert slow.compute_seconds == fast.compute_seconds
    assert slow.communication_seconds == pytest.approx(4 * fast.communication_seconds)


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


@pytest.mark.parametrize("h", [2, 4, 8, 30])
def test_two_runs_give_the_papers_estimator(h):
    """Appendix F: M = H / (H - 1) (T_para - T_H)."""
    parallel, local = 26.7, 20.2
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


def test_a_negative_communication_time_is_told():
    assert local_opt.communication_time([1, 0.5], [10, 11]).communication == pytest.approx(-2)


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


def flag_values(*given):
    values = flags.FlagValues()
    forecast.define_flags(values)
    values(["forecast", *given])
    return values


def test_published_recipes_from_flags_to_table_and_picture(tmp_path, capsys):
    folder = tmp_path / "forecast"
    forecast.main(["forecast"], flag_values(f"--output_dir={folder}"))
    text = (folder / "table.md").read_text()
    assert text in capsys.readouterr().out
    rows = [[c.strip() for c in line.split("|")[1:4]] for line in text.split("\n") if "|" in line]
    assert ["QSR", "9711", "10.375%"] in rows and ["QSR", "24792", "39.731%"] in rows
    assert ["constant H", "23400", "25.000%"] in rows
    assert "19.45 h of computation and 7.25 h" in text and "8.67 h" in text
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(found) == 2 * len(forecast.SHOWN)
    by_rule = {r["rule"]: r for r in found if r["recipe"] == "vit_b"}
    assert by_rule["inverse"]["rounds"] == by_rule["cubic"]["rounds"] == 9711
    every, ring = by_rule["parallel"], local_opt.ring_bytes(86_567_656, num_workers=16)
    assert every["sent_bytes"] == pytest.approx(93600 * ring)
    assert every["compute_hours"] == pytest.approx(forecast.published_split().compute)
    assert every["total_hours"]["25"] - every["compute_hours"] == pytest.approx(
        93600 * ring * 8 / 25e9 / 3600
    )
    assert (folder / "periods.png").stat().st_size > 20_000
    assert not list(folder.glob("*.tmp*"))
    assert json.loads((folder / "settings.json").read_text())["workers"] == 16


def test_custom_recipe_needs_its_values():
    with pytest.raises(app.UsageError, match="--alpha.*--step_seconds"):
        forecast.recipes_from_flags(flag_values("--recipe=custom", "--total_steps=100"))
    given = ["--total_steps=100", "--num_params=10", "--peak_lr=0.4", "--alpha=0.1", "--h_base=2",
             "--step_seconds=0.1"]  # fmt: skip
    recipe = forecast.recipes_from_flags(flag_values("--recipe=custom", *given))["custom"]
    assert recipe.total_steps == 100 and recipe.warmup_steps == 0 and recipe.h_max is None
    plans = published.plans_of(recipe, forecast.SHOWN, 0.5)
    assert plans["swap"].periods.max() == 50 and plans["post_local"].rounds == 75
    assert abs(plans["inverse"].rounds - plans["qsr"].rounds) <= 1


def test_flags_replace_a_recipes_values():
    values = flag_values("--recipe=resnet152", "--step_seconds=0.2", "--h_max=64")
    (recipe,) = forecast.recipes_from_flags(values).values()
    assert recipe == published.RESNET152._replace(
        step_seconds=0.2, h_max=64, seconds_are="given by --step_seconds"
    )
    assert published.plans_of(recipe, forecast.SHOWN, 0.5)["qsr"].periods.max() == 64


def test_corners_redraw_the_plan():
    plan = local_opt.qsr(
        optax.cosine_decay_schedule(0.1, 200), total_steps=200, alpha=0.1, h_base=2
    )
    steps, lengths = plan_plots.corners(plan)
    every = np.arange(200)
    drawn = lengths[np.searchsorted(steps, every, side="right") - 1]
    assert (drawn == plan.period_at(every)).all() and steps[-1] == 200
    assert len(steps) < plan.rounds


def test_a_panel_shows_plans_of_one_run(tmp_path):
    plans = {f"H = {h}": local_opt.constant(h, total_steps=100) for h in range(1, 13)}
    plan_plots.periods(plans, str(tmp_path / "periods.png"), "constants", lr=0.1)
    assert (tmp_path / "periods.png").stat().st_size > 10_000
    plans["longer"] = local_opt.every_step(200)
    with pytest.raises(ValueError, match="100, 200"):
        plan_plots.periods(plans, str(tmp_path / "periods.png"), "constants")
