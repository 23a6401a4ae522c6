"""The pace of echoing: the recurrence against a queue simulated tick by tick, and its commands."""

import inspect
import json
import math
import sys

import jax
import numpy as np
import pytest
from absl import app, flags
from hypothesis import given, settings
from hypothesis import strategies as st

import ordering
from experiments import bench_echo, echo_forecast, forecast
from experiments.tasks import TASKS
from tests import reference

# By R, as found by another simulation of loads that take R steps: coins with p = 1/R at queue
# depth 1, 4 and 16, and with p = 0.9/R at depth 8.
TABLE = {
    2: (1.127, 1.052, 1.017, 1.003),
    4: (1.173, 1.072, 1.023, 1.009),
    8: (1.196, 1.085, 1.029, 1.014),
}
TICK = 0.125  # seconds


@st.composite
def runs(draw):
    steps = draw(st.integers(1, 40))
    loads = draw(st.lists(st.integers(1, 20), min_size=steps, max_size=steps))
    return steps, loads, draw(st.integers(1, 6)), draw(st.integers(1, 4))


def forecast_of(policy, loads, step, depth):
    seconds = TICK * np.array(loads)
    return ordering.echo.echo_forecast(
        policy, load_seconds=seconds, step_seconds=TICK * step, depth=depth
    )


@settings(max_examples=60)
@given(runs(), st.data())
def test_plans_keep_the_pace_of_the_queue(run, data):
    steps, loads, step, depth = run
    fresh = [True, *data.draw(st.lists(st.booleans(), min_size=steps - 1, max_size=steps - 1))]
    found = forecast_of(ordering.echo.EchoPlan(fresh), loads, step, depth)
    decisions, waited = reference.loads_ahead(
        lambda t, *_: fresh[t], steps, loads[: sum(fresh)], step, depth
    )
    assert decisions == fresh and found.loads == sum(fresh)
    assert found.stall_seconds == pytest.approx(TICK * waited, abs=1e-9)
    assert found.total_seconds == pytest.approx(TICK * (steps * step + waited))
    assert found.seconds_per_step * steps == pytest.approx(found.total_seconds)
    assert found.slowdown == pytest.approx(1 + waited / (steps * step))


@settings(max_examples=60)
@given(runs(), st.integers(1, 6), st.sampled_from([None, 0.3, 0.9]))
def test_measured_decides_as_at_the_queue(run, cap, floor):
    steps, loads, step, depth = run
    policy = ordering.echo.measured(total_steps=steps, max_factor=cap, floor=floor)
    found = forecast_of(policy, loads, step, depth)

    def decide(t, count, uses, ready):
        return policy.decide(t, loads=count, uses=uses, ready=lambda: ready)

    decisions, waited = reference.loads_ahead(decide, steps, loads, step, depth)
    assert found.plan.fresh.tolist() == decisions
    assert found.stall_seconds == pytest.approx(TICK * waited, abs=1e-9)
    # Cap and floor hold, and the plan replays at the same pace.
    assert found.plan.uses.max() <= cap and (np.cumsum(decisions) >= policy.at_least).all()
    assert forecast_of(found.plan, loads, step, depth) == found


@pytest.mark.parametrize("factor", TABLE)
def test_coins_lose_what_the_reference_table_says(factor):
    """Over 200,000 steps the standard deviation over 12 keys is at most 0.0036; both sides vary."""
    pace = {"load_seconds": 0.002 * factor, "step_seconds": 0.002}
    plans = [
        ordering.echo.bernoulli(share / factor, total_steps=200_000, key=jax.random.key(0))
        for share in (1, 0.9)
    ]
    found = [ordering.echo.echo_forecast(plans[0], depth=d, **pace).slowdown for d in (1, 4, 16)]
    found.append(ordering.echo.echo_forecast(plans[1], depth=8, **pace).slowdown)
    np.testing.assert_allclose(found, TABLE[factor], rtol=0, atol=0.01)


@pytest.mark.parametrize("factor", [1, 2, 4, 8, 10 / 3, 1.7])
def test_spread_loads_never_stall(factor):
    """At p = 1/R exactly: error diffusion, and loads when ready."""
    steps = 50_000
    pace = {"load_seconds": 0.003 * factor, "step_seconds": 0.003, "depth": 1}
    spread = ordering.echo.echo_forecast(
        ordering.echo.error_diffusion(1 / factor, total_steps=steps), **pace
    )
    assert spread.slowdown == 1 and spread.stall_seconds == 0
    assert spread.free_factor == pytest.approx(factor)
    policy = ordering.echo.measured(total_steps=steps, max_factor=math.ceil(4 * factor))
    ready = ordering.echo.echo_forecast(policy, **pace)
    assert ready.slowdown == 1
    assert abs(ready.loads - spread.loads) <= 1  # as often as the input allows
    every = ordering.echo.echo_forecast(ordering.echo.fixed(1, total_steps=steps), **pace)
    assert every.slowdown == pytest.approx(factor, rel=2e-5 * factor)


def test_measured_bears_jitter():
    loads = np.random.default_rng(0).exponential(0.008, 5000)
    policy = ordering.echo.measured(total_steps=5000, max_factor=200)
    pace = {"load_seconds": loads, "step_seconds": 0.002, "depth": 1}
    assert ordering.echo.echo_forecast(policy, **pace).stall_seconds == 0
    spread = ordering.echo.error_diffusion(0.25, total_steps=5000)
    assert ordering.echo.echo_forecast(spread, **pace).slowdown > 1.1


def test_measured_goes_on_after_its_decisions():
    pace = {"load_seconds": 3.0, "step_seconds": 1.0}
    whole = ordering.echo.echo_forecast(
        ordering.echo.measured(total_steps=30, max_factor=9), **pace
    ).plan
    policy = ordering.echo.measured(total_steps=30, max_factor=9, decided=whole.fresh[:11])
    assert ordering.echo.echo_forecast(policy, **pace).plan == whole


@pytest.mark.parametrize(
    "change, message",
    [
        ({"step_seconds": 0}, "step_seconds is 0"),
        ({"step_seconds": math.nan}, "step_seconds is nan"),
        ({"step_seconds": True}, "step_seconds is True"),
        ({"load_seconds": 0.0}, "load_seconds is 0.0"),
        ({"load_seconds": [1.0, -1.0, 1.0]}, "load_seconds is .1.0, -1.0"),
        ({"load_seconds": math.inf}, "load_seconds is inf"),
        ({"load_seconds": [1.0]}, "1 values and the run up to 3 loads"),
        ({"depth": 0}, "depth is 0"), ({"depth": 1.5}, "depth is 1.5"),
        ({"policy": 4}, "policy is a int"),
    ],
)  # fmt: skip
def test_forecast_names_the_bad_value(change, message):
    policy = ordering.echo.fixed(2, total_steps=6)
    values = {"policy": policy, "load_seconds": 1.0, "step_seconds": 1.0} | change
    with pytest.raises(ValueError, match=message):
        ordering.echo.echo_forecast(values.pop("policy"), **values)


def parsed(module, *given):
    values = flags.FlagValues()
    module.define_flags(values)
    values(["command", *given])
    return values


def test_command_from_speeds_to_table_and_picture(tmp_path, capsys):
    folder = tmp_path / "echo"
    given = ["--load_seconds=0.008", "--step_seconds=0.002", "--depths=4,1", "--total_steps=400"]
    forecast.main(["forecast"], parsed(forecast, *given, f"--output_dir={folder}"))
    text = (folder / "table.md").read_text()
    assert text in capsys.readouterr().out and "R = 4" in text
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(found) == 2 * len(echo_forecast.POLICIES)
    by_name = {(r["policy"], r["depth"]): r for r in found}
    assert by_name["fixed, e = ceil(R)", 1]["slowdown"] == 1
    assert by_name["error diffusion, p = 1/R", 4]["loads"] == 100
    assert by_name["measured, at most 4R uses", 1]["stall_seconds"] == 0
    assert by_name["no echo", 1]["seconds_per_load"] == pytest.approx(0.008, rel=0.01)
    assert (folder / "stalls.png").stat().st_size > 20_000
    assert not list(folder.glob("*.tmp*")) and not (folder / "periods.png").exists()


def test_command_measures_digits_without_tensorflow(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.chdir(tmp_path)
    given = ["--measure=digits", "--batch_size=32", "--depths=1", "--total_steps=100"]
    forecast.main(["forecast"], parsed(forecast, *given))
    assert "digits, batch 32, measured here, NumPy gather" in capsys.readouterr().out
    (folder,) = (tmp_path / "results").iterdir()
    assert folder.name == "forecast_echo" and (folder / "stalls.png").exists()


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
    speed = echo_forecast.measure(task, batch_size=64, rounds=2, per_round=20)
    assert speed.load_seconds > 0 and speed.step_seconds > 0
    assert speed.source == "digits, batch 64, measured here, tf.data"
    assert read == 60 * [64]  # a round to warm up, and two that count
    with pytest.raises(ValueError, match="batch_size is 2000: digits has 1536"):
        echo_forecast.measure(task, batch_size=2000)


@pytest.mark.parametrize(
    "given, message",
    [
        (["--load_seconds=1"], "--load_seconds is given alone"),
        (["--load_seconds=0", "--step_seconds=1"], "--load_seconds is 0"),
        (["--load_seconds=1", "--step_seconds=-1"], "--step_seconds is -1"),
        (["--load_seconds=nan", "--step_seconds=1"], "--load_seconds is nan"),
        (["--measure=digits", "--step_seconds=1"], "--measure is given with"),
        (["--load_seconds=1", "--step_seconds=1", "--depths=1,0"], "--depths has .'0'"),
    ],
)
def test_command_says_what_is_wrong(given, message):
    with pytest.raises(app.UsageError, match=message):
        forecast.main(["forecast"], parsed(forecast, *given))


def test_without_loads_the_command_forecasts_syncs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--recipe=custom", "--total_steps=100", "--num_params=10", "--peak_lr=0.4",
             "--alpha=0.1", "--h_base=2", "--step_seconds=0.1"]  # fmt: skip
    forecast.main(["forecast"], parsed(forecast, *given))
    names = {path.name for path in (tmp_path / "results" / "forecast").iterdir()}
    assert names == {
        "metrics.jsonl", "periods.png", "settings.json", "table.md", "versions.json"
    }  # fmt: skip


def test_bench_runs_every_policy(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    given = ["--steps=8", "--repeats=1", "--ratios=2", "--step_ms=0.3", f"--output={path}"]
    bench_echo.main(["bench"], parsed(bench_echo, *given))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["depth"] for r in rows] == [row.depth for row in bench_echo.ROWS]
    assert [r["table"] for r in rows] == [1.0, "-", 1.127, 1.052, 1.017, 1.003, "-"]
    assert rows[0]["loads_per_step"] == 0.5 and rows[0]["simulated"] == 1
    assert capsys.readouterr().out.count("\n| echo | 2.0") == len(rows)
    with pytest.raises(app.UsageError, match="--ratios has"):
        bench_echo.main(["bench"], parsed(bench_echo, "--ratios=0.5"))
