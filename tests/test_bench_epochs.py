"""The benchmark of epochs counts what it ran, pairs the turns, and leaves out what is not there."""

import json

import pytest
from absl import app, flags
from scipy.stats import binom

from experiments import bench_epochs, training
from tests.test_training import RECIPE, small_task


def parsed(*given):
    values = flags.FlagValues()
    bench_epochs.define_flags(values)
    values(["bench", *given])
    return values


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

    def there(data_dir, model):
        loaded.append((data_dir, model))
        return small_task()

    monkeypatch.setitem(bench_epochs.TASKS, "hmda", there)
    monkeypatch.setitem(bench_epochs.TASKS, "cifar10_small", there)
    return loaded


def test_orders_take_turns_and_every_timed_epoch_has_a_record(monkeypatch):
    """Each call trains one whole epoch more; the first of every order warms up."""
    build, seen = training.build, []

    def watched(task, method, recipe):
        program = build(task, method, recipe)

        def epoch(*args):
            state, orders, *rest = program.epoch(*args)
            assert sorted(orders.current[0].tolist()) == list(range(10))
            seen.append((method.label, int(state.step)))
            return state, orders, *rest

        return program._replace(epoch=epoch)

    monkeypatch.setattr(training, "build", watched)
    found = bench_epochs.measure(small_task(40), RECIPE, orders=["rr", "cd_grab"], repeats=2)
    assert seen == [(label, step) for step in (5, 10, 15) for label in ("D-RR", "CD-GraB")]
    expected = [(order, turn) for order in ("rr", "cd_grab") for turn in (0, 1)]
    assert [(r["order"], r["turn"]) for r in found] == expected
    for record in found:
        assert (record["workers"], record["units_per_step"], record["unit_size"]) == (4, 2, 1)
        assert (record["steps"], record["parameters"]) == (5, 14)  # 10 units, two per step
        assert record["seconds"] > 0


def test_ratios_are_of_the_same_turn():
    """Turns that are slow for all orders move no ratio: the medians' ratio would be 2 / 1."""
    found = fake("hmda", {"rr": [1, 4, 1], "so": [2, 2, 1], "cd_grab": [1.5, 6, 2]})
    base, fixed, balanced = bench_epochs.summarise(found[::-1])[::-1]
    assert (base["times_rr"], base["interval"], base["s_per_epoch"]) == ("1.000", "-", "1")
    assert (balanced["times_rr"], balanced["interval"]) == ("1.500", "1.500 to 2.000")
    assert (balanced["times_so"], fixed["times_so"]) == ("2.000", "1.000")
    assert (balanced["published"], fixed["published"]) == ("1.9 (68/36 s)", "-")
    assert balanced["W x B x unit"] == "4 x 1 x 4" and balanced["steps"] == 5
    without = bench_epochs.summarise(fake("small", {"rr": [1], "cd_grab": [3]}))[1]
    assert (without["times_rr"], without["times_so"], without["published"]) == ("3.000", "-", "-")


@pytest.mark.parametrize("count", [6, 7, 9, 21, 40])
def test_interval_is_the_shortest_that_holds_the_median_with_95_percent(count):
    middle, low, high = bench_epochs.median_interval(range(count, 0, -1))
    assert middle == (count + 1) / 2 and low + high == count + 1
    assert 1 - 2 * binom.cdf(low - 1, count, 0.5) >= 0.95
    assert 1 - 2 * binom.cdf(low, count, 0.5) < 0.95


def test_few_turns_give_their_range():
    assert bench_epochs.median_interval([3.0]) == (3, 3, 3)
    assert bench_epochs.median_interval([5, 1, 2, 4, 3]) == (3, 1, 5)


def test_rows_keep_their_workers_and_get_part_of_the_set(monkeypatch):
    loaded = few_loaders(monkeypatch)
    values = parsed("--data_root=root", "--num_train=20")
    task, recipe = bench_epochs.load("lenet_16", values)
    assert loaded == [("root/tfds", "lenet")]
    assert task.train["x"].shape == (20, 6) and task.test["x"].shape == (12, 6)
    assert (recipe.workers, recipe.unit_size) == (16, 4)
    _, recipe = bench_epochs.load("lenet_16", parsed("--data_root=root", "--unit_size=2"))
    assert (recipe.workers, recipe.unit_size) == (16, 2)
    task, recipe = bench_epochs.load("hmda", parsed("--data_root=root", "--workers=2"))
    assert len(task.train["y"]) == 44 and recipe == RECIPE._replace(workers=2)
    monkeypatch.setitem(bench_epochs.ROWS, "hmda", bench_epochs.ROWS["hmda"]._replace(num_train=8))
    for given, number in (([], 8), (["--num_train=0"], 44), (["--num_train=99"], 44)):
        task, _ = bench_epochs.load("hmda", parsed("--data_root=root", *given))
        assert len(task.train["y"]) == number


def test_rows_without_data_are_left_out_and_measured_ones_kept(tmp_path, monkeypatch, capsys):
    loaded = few_loaders(monkeypatch)

    def measure(task, recipe, *, orders, repeats):
        records = fake("", {order: repeats * [1.0] for order in orders})
        return [{k: v for k, v in record.items() if k != "row"} for record in records]

    monkeypatch.setattr(bench_epochs, "measure", measure)
    given = [f"--data_root={tmp_path}", f"--output_dir={tmp_path / 'out'}", "--repeats=2",
             "--orders=rr,cd_grab"]  # fmt: skip
    metrics = tmp_path / "out" / "metrics.jsonl"
    bench_epochs.main(["bench"], parsed(*given, "--rows=hmda,m4,gpt2"))
    text = capsys.readouterr().out
    for row, file in (("m4", "Weekly-train.csv"), ("gpt2", "wiki.test.tokens")):
        assert f"{row} is left out: " in text and file in text
    assert (tmp_path / "out" / "table.md").read_text() in text
    first = metrics.read_text()
    found = [json.loads(line) for line in first.splitlines()]
    assert [(r["row"], r["order"], r["turn"]) for r in found] == [
        ("hmda", order, turn) for order in ("rr", "cd_grab") for turn in (0, 1)
    ]
    bench_epochs.main(["bench"], parsed(*given, "--rows=hmda,lenet_4"))
    assert [model for _, model in loaded] == ["logistic", "lenet"]
    assert metrics.read_text().startswith(first) and metrics.read_text().count("\n") == 8
    metrics.write_text("\n".join(first.splitlines()[:3]) + "\n")  # cut off while it was written
    bench_epochs.main(["bench"], parsed(*given, "--rows=lenet_4"))
    assert {json.loads(line)["row"] for line in metrics.read_text().splitlines()} == {"lenet_4"}


def test_a_task_of_ones_own(tmp_path, capsys):
    given = ["--task=digits", "--num_train=30", "--repeats=1", "--orders=rr", "--workers=2",
             "--unit_size=5", "--units_per_step=2", f"--output_dir={tmp_path}"]  # fmt: skip
    bench_epochs.main(["bench"], parsed(*given))
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["row"], r["workers"], r["steps"]) for r in found] == [
        ("digits", 2, 2)
    ]  # three units
    assert "| digits | 2 x 2 x 5 " in capsys.readouterr().out
    with pytest.raises(ValueError, match="model is 'lenet'"):  # not left out: it was asked for
        bench_epochs.main(["bench"], parsed(*given, "--model=lenet"))


@pytest.mark.parametrize(
    "given, message",
    [
        ([], "pass --data_root=DIR"),
        (["--data_root=.", "--rows=hmda,bert"], "--rows has .'bert'"),
        (["--data_root=.", "--orders=rr,sorted"], "--orders has .'sorted'"),
        (["--data_root=.", "--orders=cd_grab"], "it must hold rr"),
        (["--data_root=nowhere"], "no row has its data in --data_root=nowhere"),
    ],
)
def test_command_says_what_is_wrong(given, message, tmp_path):
    with pytest.raises(app.UsageError, match=message):
        bench_epochs.main(["bench"], parsed(*given, f"--output_dir={tmp_path}"))
