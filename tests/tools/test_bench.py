"""Benchmarks count what they ran, pair the turns, and skip missing packages."""

import numpy as np
import pytest

import models
from benchmarks import (
    bench,
    host_loops,
    local_problem,
    local_steps,
    local_syncopate,
    order_epochs,
    single_examples,
    timing,
    torch_tasks,
)
from experiments import timing as training
from experiments.compare.arms import row_of
from experiments.data import TASKS
from experiments.distributed.devices import worker_mesh
from tests import reference
from tests.commands import parsed

SMALL = {"workers": 4, "units_per_step": 2, "unit_size": 1}


def test_timed_epochs_are_whole_and_ratios_are_within_a_turn(monkeypatch):
    """Turns that are slow for all orders change no ratio. The ratio of medians would be 2 / 1."""
    whole, in_turns, seen = training.train, timing.in_turns, []
    seconds = {"rr": [1, 4, 1], "so": [2, 2, 1], "cd_grab": [1.5, 6, 2]}

    def watched(*args):
        outcome = whole(*args)
        assert sorted(np.asarray(outcome.state.orders.current)[0].tolist()) == list(range(10))
        seen.append((outcome.at.step, outcome.at.loads))
        return outcome

    def timed(calls, repeats):
        in_turns({name: calls[name] for name in seconds}, repeats)
        return seconds

    def few(data_dir, model="softmax", *, abstract=False):
        return TASKS["digits"](num_train=40)

    monkeypatch.setattr(training, "train", watched)
    monkeypatch.setattr(timing, "in_turns", timed)
    monkeypatch.setitem(TASKS, "few", few)
    monkeypatch.setattr(bench, "EPOCHS", {"few": ("few", "", {}, None, SMALL)})
    rows = list(bench.epoch_rows("few", 1, "."))
    assert seen == 6 * [(5, 5)]  # each call trains one epoch more; the first of an order warms up
    assert [r["order"] for r in rows] == [row_of("order", name).label for name in seconds]
    base, fixed, balanced = rows
    assert (base["times_rr"], base["s_per_epoch"], base["steps"]) == (1, 1, 5)
    assert (balanced["times_rr"], balanced["times_so"], fixed["times_so"]) == (1.5, 2, 1)


@pytest.mark.slow
def test_a_step_of_balancing_and_of_the_loop_have_a_row_per_arm(monkeypatch, capsys):
    task = TASKS["digits"](None, num_train=44)
    monkeypatch.setattr(bench, "ARMS", ("so", "cd_grab"))
    monkeypatch.setattr(timing, "step_task", lambda name: task)
    monkeypatch.setattr(bench, "UNITS", {"digits": {"example": (4, 2, 1, 1)}})
    rows = list(bench.step_rows("digits", 1))
    assert [r["order"] for r in rows] == [row_of("order", name).label for name in bench.ARMS]
    assert rows[0]["times_plain"] == 1
    assert all(r["us_per_step"] > 0 and r["megabytes"] > 0 for r in rows)
    assert [r["allreduces_per_step"] > 0 for r in rows] == [False, True]
    monkeypatch.setattr(timing, "in_turns", lambda calls, repeats: {n: [1.0] * 6 for n in calls})
    monkeypatch.setattr(bench, "SCALED", bench.SCALED[:1])
    rows = list(bench.scaled_rows("digits", 1))
    assert [(r["order"], r["times_first"]) for r in rows] == [
        (row_of("order", name).label, 1) for name in bench.SCALED
    ]
    monkeypatch.setattr(bench, "LOOPS", [("cd_grab", "qsr")])
    bench.main(parsed(bench, "--part=loops", "--repeats=1"))
    assert "| CD-GraB | QSR |" in capsys.readouterr().out


def test_the_kernel_and_the_host_loops_choose_the_same_signs():
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(8, 5)).astype(np.float32)
    total, signs = host_loops.kernel(gradients, np.zeros(5, np.float32))
    following = host_loops.host_loop(gradients, np.zeros(5, np.float32), np.dot, list(range(8)))
    assert following[:4] == [2 * k if s > 0 else 2 * k + 1 for k, s in enumerate(signs)]
    ways = [r["way"] for r in host_loops.rows(20, 8, 1)]
    assert ways[:4] == ["read once", "syncopate", "sketches", "host loop, NumPy"]


@pytest.mark.slow
def test_ways_to_single_examples_are_compared_before_they_are_timed(monkeypatch):
    model = models.mlp(num_features=64, hidden=(32,), num_classes=10)
    task = TASKS["digits"](None, num_train=16)._replace(model=model)
    monkeypatch.setattr(timing, "step_task", lambda name: task)
    rows = list(single_examples.rows_of("digits", 6))
    ours = [f"optax micro_grad, microbatches {size}" for size in ("none", 4, 1)]
    names = ["plain step", "ordering.sketched_grads", "vmap, then a sketch", *ours]
    assert [r["way"] for r in rows][:6] == names and rows[0]["times_plain"] == "1.00"

    ways = single_examples.ways_of

    def wrong(loss):
        result = ways(loss)
        return result | {names[1]: lambda *args: (result[names[0]](*args)[0], np.eye(16, 1024))}

    monkeypatch.setattr(single_examples, "ways_of", wrong)
    with pytest.raises(AssertionError, match="ordering.sketched_grads: inner products are off by"):
        list(single_examples.rows_of("digits", 6))


@pytest.mark.slow
def test_epochs_beside_other_packages_have_the_orders_of_the_papers():
    whole, orders = torch_tasks.whole_numbers((4, 6, 20), 2), [list(range(6))] * 4
    sort = order_epochs.ours(whole, "cd_grab")
    for _ in range(3):
        orders = reference.cd_grab_epoch(orders, whole.x)
        assert np.asarray(sort()[1]).tolist() == orders

    problem = torch_tasks.softmax(4, 6, 40)
    results = [order_epochs.ours(problem, name)()[0]["w"] for name in ("cd_grab", "pair_balance")]
    np.testing.assert_allclose(*results, rtol=1e-5)  # both visit the units in their first order
    alone = problem.alone()
    assert alone.y.shape == (1, 24) and alone.step == 8 and np.any(results[0] != 0)


@pytest.mark.slow
def test_local_steps_beside_others_are_those_that_numpy_simulates(tmp_path, monkeypatch):
    """With DiLoCo's outer step."""
    problem, widths = local_problem, (12, 7, 5, 10)
    job = local_steps.Job("ours", widths, 0, 1, 0, 0, 0, f"{tmp_path}/0")
    expected = np.stack(list(problem.simulated(widths, True)))

    def run(module, job, folder):
        job = job._replace(out=f"{folder}/0")  # as `local_steps.run`
        worker = local_syncopate.rounds(job, local_syncopate.OUTER, worker_mesh(2))
        return [problem.checked(job, worker, lambda: None)]

    monkeypatch.setattr(local_steps, "run", run)
    actual = local_steps.check("", job, str(tmp_path), expected)
    assert float(actual["off NumPy"]) < 1e-5 and float(actual["MB compiled"]) >= 0
    with pytest.raises(ValueError, match="ours: after sync 20 a parameter is"):
        local_steps.check("", job, str(tmp_path), expected + 1e-4 * (np.arange(20) == 19)[:, None])
    monkeypatch.setitem(problem.SIZES, "few", widths)
    table = local_steps.Table("one", True, 1, (("ours", "", "jax"), ("again, here", "", "jax")))
    *_, last = local_steps.parity([table], "few", str(tmp_path))
    assert last == {"sync": 20, "one: NumPy": actual["off NumPy"], "one: again": "0.0e+00"}
    with pytest.raises(ValueError, match="empty name"):  # and not ".npy" where the tests run
        problem.checked(job._replace(out=""), None, lambda: None)
