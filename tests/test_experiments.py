"""The entrypoints run to the end, resume, and write what they say."""

import json

import numpy as np
import pytest
from absl import flags

from experiments import bench_balance, cd_grab, compare, herding, plots, qsr, records, task_flags
from experiments.tasks import TASKS
from tests.test_training import RECIPE, small_task

TINY = RECIPE._replace(epochs=2, learning_rates=(0.05, 0.2))
ORDERS = ["rr", "cd_grab"]


def test_comparison_from_runs_to_table_and_picture(tmp_path):
    task = small_task()
    found = cd_grab.compare_orders(task, TINY, orders=ORDERS, seeds=2)
    assert len(found) == 2 * 2 * 2 * 3
    text = cd_grab.report(found, str(tmp_path), "small")
    assert "CD-GraB" in text and "D-RR" in text
    assert (tmp_path / "comparison.png").stat().st_size > 20_000
    assert not list(tmp_path.glob("*.tmp*"))


def test_an_interrupted_comparison_goes_on():
    """Whole runs are kept, a run that was cut off is repeated, and the numbers are the same."""
    task, seen = small_task(), []
    whole = cd_grab.compare_orders(task, TINY, orders=ORDERS, seeds=2)
    cut = whole[:7]  # two runs and one record
    again = cd_grab.compare_orders(
        task, TINY, orders=ORDERS, seeds=2, done=cut, on_record=seen.append
    )
    assert len(seen) == len(whole) - 6
    for a, b in zip(whole, again, strict=True):
        assert {k: v for k, v in a.items() if k != "seconds"} == {
            k: v for k, v in b.items() if k != "seconds"
        }


def test_folder_keeps_runs_apart(tmp_path):
    folder = str(tmp_path / "run")
    assert records.open_folder(folder, {"task": "a"}) == []
    records.write_lines(folder + "/metrics.jsonl", [{"epoch": 1}])
    with open(folder + "/metrics.jsonl", "a") as file:
        file.write('{"epoch": 2')  # cut off while it was written
    assert records.open_folder(folder, {"task": "a"}) == [{"epoch": 1}]
    with pytest.raises(ValueError, match="other settings .task."):
        records.open_folder(folder, {"task": "b"})
    assert records.open_folder(folder, {"task": "b"}, overwrite=True) == []
    assert json.loads((tmp_path / "run" / "versions.json").read_text())["jax"]


def fake(order, rate, seed, losses):
    return [
        {"order": order, "learning_rate": rate, "seed": seed, "epoch": e, "seconds": 0.5 * e,
         "suboptimality": loss, "train_loss": loss, "test_accuracy": 0.5}
        for e, loss in enumerate(losses)
    ]  # fmt: skip


def test_table_counts_epochs_to_the_baselines_best():
    runs = [
        *fake("rr", 0.1, 0, [8, 4, 3, 2]), *fake("rr", 0.1, 1, [8, 4, 3, 2]),
        *fake("rr", 0.2, 0, [8, 9, 9, 9]), *fake("rr", 0.2, 1, [8, 9, 9, 9]),
        *fake("cd_grab", 0.1, 0, [8, 3, 2.5, 1]), *fake("cd_grab", 0.1, 1, [8, 3, 2.5, 1]),
        *fake("cd_grab", 0.2, 0, [8, 1.5, 3, 3]), *fake("cd_grab", 0.2, 1, [8, 1.5, 3, 3]),
        *fake("unzip", 0.1, 0, [8, 7, 6, 5]), *fake("unzip", 0.1, 1, [8, 4, 3, 2]),
    ]  # fmt: skip
    rr, balanced, unzip = compare.summarise(runs)
    assert rr.best_rate == 0.1 and rr.fastest_epochs.tolist() == [3, 3]
    assert balanced.best_rate == 0.1 and balanced.same_rate_epochs.tolist() == [3, 3]
    assert balanced.fastest_rate == 0.2 and balanced.fastest_epochs.tolist() == [1, 1]
    assert balanced.fastest_seconds.tolist() == [0.5, 0.5]
    assert unzip.fastest_epochs.tolist() == [np.inf, 3]
    assert "1 of 2" in compare.table([rr, balanced, unzip])
    with pytest.raises(ValueError, match="baseline 'rr'"):
        compare.summarise(fake("cd_grab", 0.1, 0, [1, 1]))


def test_interval_is_student_t():
    mean, half = compare.interval([1.0, 2.0, 3.0])
    assert mean == 2.0
    np.testing.assert_allclose(half, 4.302652729911275 / np.sqrt(3), rtol=1e-9)


def test_herding_picture(tmp_path):
    found = [
        {"order": order, "workers": w, "seed": s, "seconds": 0.0, "round": k, "bound": 5.0 + s + k}
        for order in ("rr", "cd_grab") for w in (2, 4) for s in (0, 1) for k in range(3)
    ]  # fmt: skip
    plots.herding(found, str(tmp_path / "herding.png"), "title", "inf")
    assert (tmp_path / "herding.png").stat().st_size > 10_000
    assert herding.table(found, 2).count("\n") == 3


def test_host_loop_of_the_benchmark_gives_the_kernels_signs():
    gradients = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
    _, signs = bench_balance.kernel(2)(gradients, np.zeros(5, np.float32))
    following = bench_balance.host_loop(gradients, np.zeros(5, np.float32), np.dot, list(range(8)))
    fronts = [2 * k if s > 0 else 2 * k + 1 for k, s in enumerate(signs)]
    assert following[:4] == fronts


def test_digits_is_embedded():
    task = TASKS["digits"]()
    assert task.train["x"].shape == (1536, 64) and task.test["y"].shape == (261,)
    with pytest.raises(ValueError, match="model is 'lenet'"):
        TASKS["digits"](model="lenet")


def test_flags_become_the_recipe():
    values = flags.FlagValues()
    cd_grab.define_flags(values)
    values(["cd_grab", "--epochs=7", "--learning_rates=0.5,1", "--workers=3"])
    task = TASKS["digits"]()
    recipe = task_flags.recipe_from_flags(task, values)
    assert recipe == task.recipe._replace(epochs=7, learning_rates=(0.5, 1.0), workers=3)


def test_defaults_need_no_data():
    """Whatever tasks the table holds, a command without flags runs on embedded data."""
    for experiment, name in ((cd_grab, "task"), (qsr, "recipe")):
        values = flags.FlagValues()
        experiment.define_flags(values)
        values(["experiment"])
        assert values[name].value == "digits"
