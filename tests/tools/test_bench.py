"""Benchmarks count what they ran, pair the turns, and leave out what is not there."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest
from absl import app, flags
from scipy.stats import binom

import models
from experiments import bench, step_costs, timing
from experiments.study.tables import ORDERS
from experiments.tasks import TASKS
from experiments.training import loop

ROOT = pathlib.Path(__file__).parents[2]
SMALL = ["--task=digits", "--num_train=40", "--workers=4", "--units_per_step=2", "--unit_size=1"]


def parsed(*given):
    values = flags.FlagValues()
    bench.define_flags(values)
    values(["bench", *given])
    return values


def rows_of(path, *given):
    bench.main(["bench"], parsed(*given, f"--jsonl={path}"))
    return [json.loads(line) for line in path.read_text().splitlines()]


def beside(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_orders_take_turns_and_every_timed_epoch_is_a_whole_one(monkeypatch, tmp_path, capsys):
    """Each call trains one whole epoch more; the first of every order warms up."""
    whole, seen = loop.run, []

    def watched(program, plans, *args, **options):
        at, state = whole(program, plans, *args, **options)
        assert sorted(np.asarray(state.orders.current)[0].tolist()) == list(range(10))
        seen.append((at.step, at.loads))
        return at, state

    monkeypatch.setattr(loop, "run", watched)
    given = ["--part=epochs", *SMALL, "--arms=rr,cd_grab", "--repeats=2"]
    rows = rows_of(tmp_path / "rows.jsonl", *given)
    assert seen == 6 * [(5, 5)]
    assert [r["order"] for r in rows] == [ORDERS[name].label for name in ("rr", "cd_grab")]
    assert all(r["steps"] == 5 and r["W x B x unit"] == "4 x 2 x 1" for r in rows)
    assert "| epochs | digits |" in capsys.readouterr().out


def test_ratios_are_of_the_same_turn():
    """Turns that are slow for all orders move no ratio: the medians' ratio would be 2 / 1."""
    task = TASKS["digits"](None)
    seconds = {"rr": [1, 4, 1], "so": [2, 2, 1], "cd_grab": [1.5, 6, 2]}
    found = bench.epochs_rows("hmda", bench.EPOCHS["hmda"], task, task.recipe, 5, seconds)
    base, fixed, balanced = found
    assert (base["times_rr"], base["published"], base["s_per_epoch"]) == (1, "-", 1)
    assert (balanced["times_rr"], balanced["interval"]) == (1.5, "1.500 to 2.000")
    assert (balanced["times_so"], fixed["times_so"], balanced["published"]) == (2, 1, "1.9")


@pytest.mark.parametrize("count", [6, 7, 9, 21, 40])
def test_interval_is_the_shortest_that_holds_the_median_with_95_percent(count):
    middle, low, high = timing.median_interval(range(count, 0, -1))
    assert middle == (count + 1) / 2 and low + high == count + 1
    assert 1 - 2 * binom.cdf(low - 1, count, 0.5) >= 0.95
    assert 1 - 2 * binom.cdf(low, count, 0.5) < 0.95
    assert timing.median_interval([5, 1, 2, 4, 3]) == (3, 1, 5), "of few, all of them"


def test_a_step_of_balancing_and_of_the_loop_have_a_row_per_arm(monkeypatch, tmp_path):
    task = TASKS["digits"](None, num_train=44)
    recipe = task.recipe._replace(
        workers=4, units_per_step=2, unit_size=1, epochs=1, total_steps=None
    )
    monkeypatch.setattr(step_costs, "ARMS", ("so", "cd_grab"))
    monkeypatch.setattr(step_costs, "step_tasks", lambda: [("example", task, recipe)])
    path = tmp_path / "rows.jsonl"
    rows = rows_of(path, "--rows=step", "--repeats=1")
    assert [r["order"] for r in rows] == [ORDERS[name].label for name in step_costs.ARMS]
    assert rows[0]["times_plain"] == 1
    assert all(r["us_per_step"] > 0 and r["megabytes"] > 0 for r in rows)
    sends = [ORDERS[n].coordinated for n in step_costs.ARMS]
    assert [r["allreduces_per_step"] > 0 for r in rows] == sends
    rows = rows_of(path, "--part=loops", "--rows=rr parallel,cd_grab qsr", "--repeats=1")
    assert [(r["order"], r["rule"]) for r in rows] == [("D-RR", "parallel"), ("CD-GraB", "QSR")]


def test_the_kernel_signs_as_the_loops_of_others(monkeypatch, tmp_path):
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(8, 5)).astype(np.float32)
    total, signs = step_costs.kernel(gradients, np.zeros(5, np.float32))
    loops = beside("host_loops")
    following = loops.host_loop(gradients, np.zeros(5, np.float32), np.dot, list(range(8)))
    assert following[:4] == [2 * k if s > 0 else 2 * k + 1 for k, s in enumerate(signs)]
    monkeypatch.setattr(step_costs, "KERNEL_SIZES", {20: 8})
    rows = rows_of(tmp_path / "rows.jsonl", "--rows=kernel", "--repeats=1")
    assert [r["way"] for r in rows] == ["read once", "syncopate", "sketches"]


def test_local_steps_stand_against_the_plain_step(monkeypatch):
    small = {"mlp": (lambda: models.mlp(num_features=6, hidden=(4,), num_classes=10), (6,), 8, 2)}
    monkeypatch.setattr(step_costs, "MODELS", small)
    rows = list(step_costs.local_rows(6))
    assert len(rows) == 2 * 5 and rows[0]["interval"] == "1.000 to 1.000"
    assert all(r["us_per_step"] > 0 for r in rows)


def test_echo_runs_every_policy(tmp_path):
    given = ["--part=echo", "--steps=8", "--repeats=1", "--ratios=2", "--step_ms=0.3"]
    rows = rows_of(tmp_path / "rows.jsonl", *given)
    assert [r["depth"] for r in rows] == [depth for _, depth, _ in timing.ECHO_ROWS]
    assert [r["table"] for r in rows] == [1.0, "-", 1.127, 1.052, 1.017, 1.003, "-"]
    assert rows[0]["loads_per_step"] == 0.5 and rows[0]["simulated"] == 1


@pytest.mark.parametrize(
    "given, message",
    [
        (["--part=epochs"], "pass --data_root=DIR"),
        (["--part=epochs", "--data_root=.", "--rows=hmda,bert"], "--rows has .'bert'"),
        (["--part=epochs", "--data_root=.", "--arms=rr,sorted"], "--arms has .'sorted'"),
        (["--part=epochs", "--data_root=.", "--arms=cd_grab"], "it must hold rr"),
        (["--part=epochs", "--data_root=nowhere"], "no row has its data in --data_root=nowhere"),
        (["--part=echo", "--ratios=0.5"], "--ratios has"),
        (["--part=echo", "--rows=step"], "all are measured, leave it out"),
        (["--part=local_steps", "--rows=kernel"], "choose of step, sync"),
    ],
)
def test_command_says_what_is_wrong(given, message):
    with pytest.raises(app.UsageError, match=message):
        bench.main(["bench"], parsed(*given))


def test_loaders_are_timed_over_every_step_of_an_epoch(monkeypatch):
    samplers = beside("samplers")
    source = np.zeros((samplers.WORKERS * 256, 2), np.float32)
    monkeypatch.setattr(samplers, "UNITS", 256)
    orders = np.tile(np.arange(256), (samplers.WORKERS, 1))
    assert samplers.indices_per_second(samplers.ROWS["read_epochs"].read(source, orders, 0)) > 0
    with pytest.raises(RuntimeError, match="3 batches came, of 4"):
        samplers.indices_per_second(range(3))
