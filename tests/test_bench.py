"""Benchmarks count what they ran, pair the turns, and leave out what is not there."""

import json

import numpy as np
import pytest
from absl import app, flags
from scipy.stats import binom

from experiments import bench
from experiments.bench_parts import balance, echo, epochs, local_steps, samplers, timing
from experiments.studies.tables import ORDERS
from experiments.tasks import TASKS, Recipe
from experiments.training import loop
from syncopate import models
from tests import test_training

RECIPE = Recipe(workers=4, units_per_step=2, unit_size=1, learning_rates=(0.05,), epochs=3)


def small_task(num_train=44):
    return test_training.small_task(num_train)._replace(recipe=RECIPE)


def parsed(*given):
    values = flags.FlagValues()
    bench.define_flags(values)
    values(["bench", *given])
    return values


def run(*given):
    bench.main(["bench"], parsed(*given))


def fake(row, seconds):
    """Records of a row: order -> seconds of its turns."""
    return [
        {"row": row, "workers": 4, "units_per_step": 1, "unit_size": 4, "parameters": 10,
         "steps": 5, "order": order, "turn": turn, "seconds": value}
        for order, values in seconds.items() for turn, value in enumerate(values)
    ]  # fmt: skip


def few_loaders(monkeypatch):
    """Two rows have their data, in memory; the others have none. What was loaded is listed."""
    loaded = []

    def there(data_dir, model="linear", abstract=False):
        loaded.append((data_dir, model))
        return small_task()

    for name in ("hmda", "cifar10_small"):
        monkeypatch.setitem(TASKS, name, there)
    return loaded


def test_orders_take_turns_and_every_timed_epoch_has_a_record(monkeypatch):
    """Each call trains one whole epoch more; the first of every order warms up."""
    whole, seen = loop.run, []

    def watched(program, plans, *args, **options):
        at, state = whole(program, plans, *args, **options)
        assert sorted(np.asarray(state.orders.current)[0].tolist()) == list(range(10))
        seen.append((program.orders_of is not None, at.step, at.loads))
        return at, state

    monkeypatch.setattr(loop, "run", watched)
    orders = ["rr", "cd_grab"]
    found = epochs.measure(small_task(40), RECIPE, orders=orders, repeats=2)
    assert seen == 3 * [(True, 5, 5), (False, 5, 5)]
    assert [(r["order"], r["turn"]) for r in found] == [(o, t) for o in orders for t in (0, 1)]
    for record in found:
        assert [record[name] for name in epochs.SETTING] == [4, 2, 1]
        assert (record["steps"], record["parameters"]) == (5, 14)  # 10 units, two per step
        assert record["seconds"] > 0


def test_ratios_are_of_the_same_turn():
    """Turns that are slow for all orders move no ratio: the medians' ratio would be 2 / 1."""
    found = fake("hmda", {"rr": [1, 4, 1], "so": [2, 2, 1], "cd_grab": [1.5, 6, 2]})
    base, fixed, balanced = epochs.summarise(found[::-1])[::-1]
    assert (base["times_rr"], base["interval"], base["s_per_epoch"]) == ("1.000", "-", "1")
    assert (balanced["times_rr"], balanced["interval"]) == ("1.500", "1.500 to 2.000")
    assert (balanced["times_so"], fixed["times_so"]) == ("2.000", "1.000")
    assert (balanced["published"], fixed["published"]) == ("1.9 (68/36 s)", "-")
    assert balanced["W x B x unit"] == "4 x 1 x 4" and balanced["steps"] == 5
    without = epochs.summarise(fake("small", {"rr": [1], "cd_grab": [3]}))[1]
    assert (without["times_rr"], without["times_so"], without["published"]) == ("3.000", "-", "-")


@pytest.mark.parametrize("count", [6, 7, 9, 21, 40])
def test_interval_is_the_shortest_that_holds_the_median_with_95_percent(count):
    middle, low, high = timing.median_interval(range(count, 0, -1))
    assert middle == (count + 1) / 2 and low + high == count + 1
    assert 1 - 2 * binom.cdf(low - 1, count, 0.5) >= 0.95
    assert 1 - 2 * binom.cdf(low, count, 0.5) < 0.95


def test_few_turns_give_their_range():
    assert timing.median_interval([3.0]) == (3, 3, 3)
    assert timing.median_interval([5, 1, 2, 4, 3]) == (3, 1, 5)


def test_rows_keep_their_workers_and_get_part_of_the_set(monkeypatch):
    loaded = few_loaders(monkeypatch)
    task, recipe = epochs.load("lenet_16", parsed("--data_root=root", "--num_train=20"))
    assert loaded == [("root/tfds", "lenet")]
    assert task.train["x"].shape == (20, 6) and task.test["x"].shape == (12, 6)
    assert (recipe.workers, recipe.unit_size) == (16, 4)
    _, recipe = epochs.load("lenet_16", parsed("--data_root=root", "--unit_size=2"))
    assert (recipe.workers, recipe.unit_size) == (16, 2)
    task, recipe = epochs.load("hmda", parsed("--data_root=root", "--workers=2"))
    assert len(task.train["y"]) == 44 and recipe == RECIPE._replace(workers=2)
    monkeypatch.setitem(epochs.ROWS, "hmda", epochs.ROWS["hmda"]._replace(num_train=8))
    for given, number in (([], 8), (["--num_train=0"], 44), (["--num_train=99"], 44)):
        task, _ = epochs.load("hmda", parsed("--data_root=root", *given))
        assert len(task.train["y"]) == number


def test_rows_without_data_are_left_out_and_measured_ones_kept(tmp_path, monkeypatch, capsys):
    loaded = few_loaders(monkeypatch)

    def measure(task, recipe, *, orders, repeats):
        records = fake("", {order: repeats * [1.0] for order in orders})
        return [{k: v for k, v in record.items() if k != "row"} for record in records]

    monkeypatch.setattr(epochs, "measure", measure)
    given = ["--part=epochs", f"--data_root={tmp_path}", f"--output_dir={tmp_path / 'out'}",
             "--repeats=2", "--arms=rr,cd_grab"]  # fmt: skip
    metrics = tmp_path / "out" / "metrics.jsonl"
    run(*given, "--rows=hmda,m4,gpt2")
    text = capsys.readouterr().out
    for row, file in (("m4", "Weekly-train.csv"), ("gpt2", "wiki.test.tokens")):
        assert f"{row} is left out: " in text and file in text
    assert (tmp_path / "out" / "table.md").read_text() in text
    first = metrics.read_text()
    found = [json.loads(line) for line in first.splitlines()]
    assert [(r["row"], r["order"], r["turn"]) for r in found] == [
        ("hmda", order, turn) for order in ("rr", "cd_grab") for turn in (0, 1)
    ]
    run(*given, "--rows=hmda,lenet_4")
    assert [model for _, model in loaded] == ["logistic", "lenet"]
    assert metrics.read_text().startswith(first) and metrics.read_text().count("\n") == 8
    metrics.write_text("\n".join(first.splitlines()[:3]) + "\n")  # cut off while it was written
    run(*given, "--rows=lenet_4")
    assert {json.loads(line)["row"] for line in metrics.read_text().splitlines()} == {"lenet_4"}


def test_a_task_of_ones_own(tmp_path, capsys):
    given = ["--part=epochs", "--task=digits", "--num_train=30", "--repeats=1", "--arms=rr",
             "--workers=2", "--unit_size=5", "--units_per_step=2",
             f"--output_dir={tmp_path}"]  # fmt: skip
    run(*given)
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["row"], r["workers"], r["steps"]) for r in found] == [("digits", 2, 2)]  # 3 units
    assert "| digits | 2 x 2 x 5 " in capsys.readouterr().out
    with pytest.raises(ValueError, match="lenet"):  # not left out: it was asked for
        run(*given, "--model=lenet", "--overwrite")


def test_the_step_of_balancing_and_the_loop_have_a_row_per_arm(monkeypatch, tmp_path):
    monkeypatch.setattr(
        balance, "step_tasks",
        lambda: [("example, 2 per step", small_task(), RECIPE._replace(epochs=1))],
    )  # fmt: skip
    path = tmp_path / "rows.jsonl"
    run("--rows=step", "--repeats=1", f"--jsonl={path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["order"] for r in rows] == [ORDERS[name].label for name in balance.ARMS]
    assert rows[0]["times_plain"] == 1
    assert all(r["us_per_step"] > 0 and r["megabytes"] > 0 for r in rows)
    assert [r["allreduces_per_step"] > 0 for r in rows] == [
        ORDERS[n].coordinated for n in balance.ARMS
    ]
    run("--part=loops", "--rows=rr parallel,cd_grab qsr", "--repeats=1", f"--jsonl={path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["order"], r["rule"]) for r in rows] == [("D-RR", "parallel"), ("CD-GraB", "QSR")]


def test_the_host_loop_signs_as_the_kernel(monkeypatch):
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(8, 5)).astype(np.float32)
    total, signs = balance.kernel(2)(gradients, np.zeros(5, np.float32))
    following = balance.host_loop(gradients, np.zeros(5, np.float32), np.dot, list(range(8)))
    assert following[:4] == [2 * k if s > 0 else 2 * k + 1 for k, s in enumerate(signs)]
    monkeypatch.setattr(balance, "KERNEL_SIZES", {20: 8})
    rows = balance.ROWS["kernel"](1)
    assert [r["way"] for r in rows[:2]] == ["read once", "syncopate"]
    assert {"host loop, NumPy", "host loop, JAX"} <= {r["way"] for r in rows}


def test_local_steps_stand_against_the_plain_step(monkeypatch):
    small = {"mlp": (lambda: models.mlp(num_features=6, hidden=(4,), num_classes=10), (6,), 8, 2)}
    monkeypatch.setattr(local_steps, "MODELS", small)
    rows = local_steps.step_rows(6)
    assert len(rows) == 2 * 5 and rows[0]["interval"] == "1.000 to 1.000"
    assert all(r["us_per_step"] > 0 for r in rows)


def test_echo_runs_every_policy(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    run("--part=echo", "--steps=8", "--repeats=1", "--ratios=2", "--step_ms=0.3", f"--jsonl={path}")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["depth"] for r in rows] == [depth for _, depth, _ in echo.ROWS]
    assert [r["table"] for r in rows] == [1.0, "-", 1.127, 1.052, 1.017, 1.003, "-"]
    assert rows[0]["loads_per_step"] == 0.5 and rows[0]["simulated"] == 1
    assert capsys.readouterr().out.count("\n| echo | 2.0") == len(rows)


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
def test_command_says_what_is_wrong(given, message, tmp_path):
    with pytest.raises(app.UsageError, match=message):
        run(*given, f"--output_dir={tmp_path}")


def test_loaders_are_timed_over_every_step_of_an_epoch(monkeypatch, tmp_path):
    pytest.importorskip("grain", reason="Grain is not installed: pip install grain")
    monkeypatch.setattr(samplers, "UNITS", 256)
    in_this_process = {n: r._replace(processes=(0,)) for n, r in samplers.ROWS.items()}
    monkeypatch.setattr(samplers, "ROWS", in_this_process)
    run("--part=samplers", "--repeats=2", f"--jsonl={tmp_path / 'rows.jsonl'}")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["reader"] for row in rows] == list(samplers.ROWS)
    assert all(row["repeats"] == 2 and row["indices_per_s"] > 0 for row in rows)
    with pytest.raises(RuntimeError, match="3 batches came, of 4"):
        samplers.indices_per_second(range(3))
