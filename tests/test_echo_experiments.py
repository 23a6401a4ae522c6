"""The comparison of echoing: its clock, its arms, its loop, its choices, its report."""

import functools
import threading

import jax
import numpy as np
import pytest
from absl import flags

import local_opt
import models
import ordering
from experiments import echo_report, echo_training, echoing, records
from experiments.clock import Clock
from experiments.echo_arms import ARMS, Setting
from experiments.echo_policies import SCHEDULES
from experiments.tasks import Task

SETUP = echo_training.Setup(
    workers=2,
    batch_size=4,
    optimizer="momentum",
    weight_decay=0.0,
    total_steps=12,
    evaluate_every=4,
    metric="accuracy",
    target=2.0,  # never
    proximal=0.1,
)


@pytest.fixture(scope="module")
def task():
    return make_task()


def make_task():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 5)).astype(np.float32)
    y = (x @ rng.normal(size=(5, 3))).argmax(axis=1).astype(np.int32)
    model = models.softmax_regression(num_features=5, num_classes=3, l2=0.0)
    cut = {"train": slice(0, 40), "test": slice(40, 80)}
    parts = {name: {"x": x[part], "y": y[part]} for name, part in cut.items()}
    return Task("toy", model, parts["train"], parts["test"], None)


def setting(speed=3.0, total_steps=12):
    return Setting(speed, total_steps, 9, jax.random.key(0))


def test_the_clock_stands_still_and_so_does_who_sleeps_by_it():
    clock, woken = Clock(), threading.Event()
    with clock.stopped():
        before = clock.now()
        sleeper = threading.Thread(
            target=lambda: (clock.sleep_until(before + 1e-3), woken.set()), daemon=True
        )
        sleeper.start()
        assert not woken.wait(0.05)
        assert clock.now() == before
    assert woken.wait(60)
    assert clock.now() >= before + 1e-3


def test_a_load_takes_its_delay_by_the_clock():
    clock = Clock()
    begun = clock.now()
    assert list(echo_training.throttled(iter([1, 2, 3]), 0.01, clock)) == [1, 2, 3]
    assert clock.now() - begun >= 0.03


@pytest.mark.parametrize("name", ARMS)
def test_every_arm_makes_its_plans(name):
    arm, s = ARMS[name], setting(total_steps=3000)
    policy = arm.policy(s)
    if not policy.online:
        policy.check_run(3000)
        expected = 1.0 if arm.policy is ARMS["none"].policy else 1 / 3
        assert policy.fresh[20:].mean() == pytest.approx(expected, abs=0.04)
    if arm.sync is not None:
        arm.sync(s).check_run(3000)


@pytest.mark.parametrize("shape", SCHEDULES)
def test_p_ends_at_its_least_value(shape):
    p = SCHEDULES[shape](0.25, 30)
    if callable(p):
        assert p(0) == 1
        assert p(30) == p(1000) == pytest.approx(0.25)
    else:
        assert p == 0.25


def test_no_echo_is_compared_where_none_is_free():
    assert [setting(speed).factor for speed in (0.5, 1, 2, 8)] == [2, 2, 2, 8]


@functools.cache
def built(rounds):
    """Compiled once per kind of round; neither length nor target is compiled in."""
    arm = next(arm for arm in ARMS.values() if arm.rounds is rounds)
    return echo_training.build(make_task(), arm, SETUP)


def run(task, name, **changes):
    setup = SETUP._replace(**changes)
    program = built(ARMS[name].rounds)
    s = setting(total_steps=setup.total_steps)
    return list(
        echo_training.train(task, setup, program, ARMS[name], s, rate=0.1, seed=0, delay=0.0)
    )


@pytest.mark.parametrize(
    ("name", "loads", "rounds"),
    [("none", 12, 12), ("fixed", 4, 4), ("local", 12, 4), ("diffusion_every", 4, 12)],
)
def test_loads_and_rounds_are_counted(task, name, loads, rounds):
    last = run(task, name)[-1]
    assert (last["step"], last["loads"], last["rounds"]) == (12, loads, rounds)
    assert last["ended"] and last["reached"] == {"valid": None, "test": None}
    assert last["plan"] == ARMS[name].policy(setting()).digest()


def test_no_echo_is_data_parallel_training(task):
    """Local steps that meet in every step, with SGD and momentum, are the same training."""
    setup = SETUP._replace(total_steps=6, evaluate_every=6)
    arm = ARMS["fixed"]._replace(policy=ARMS["none"].policy)
    found = []
    for one in (arm, ARMS["none"]):
        seen = []
        program = built(one.rounds)._replace(
            evaluate=lambda params, seen=seen: (
                seen.append(local_opt.consolidate(params)) or {"valid": 0.0, "test": 0.0}
            )
        )
        s = setting(total_steps=6)
        list(echo_training.train(task, setup, program, one, s, rate=0.1, seed=0, delay=0.0))
        found.append(seen[0])
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_run_ends_at_the_target(task):
    last = run(task, "fixed", target=0.0)[-1]
    assert last["step"] == 4
    assert last["reached"]["test"]["step"] == last["reached"]["valid"]["step"] == 4


def test_a_loss_that_is_not_finite_stops_the_run(task):
    broken = task._replace(train={**task.train, "x": task.train["x"] * np.nan})
    with pytest.raises(FloatingPointError, match="worker 0 is not finite in step 0"):
        run(broken, "fixed")


def test_the_delays_of_a_folder_are_those_of_its_first_run(task, tmp_path):
    def measure():
        return echo_training.step_seconds(task, SETUP, built(ARMS["none"].rounds), ARMS["none"])

    path = str(tmp_path / "step.json")
    first = echoing.measured_step(path, measure)
    assert first > 0
    assert echoing.measured_step(path, lambda: 1 / 0) == first


def ending(rate, seed, step, **fields):
    at = None if step is None else {"step": step, "loads": step, "rounds": 1, "seconds": 1.0}
    return {
        "arm": "fixed", "speed": 2.0, "rate": rate, "base_rate": rate, "seed": seed,
        "timed": False, "tuning": True, "ended": True, "diverged": None,
        "reached": {"valid": at, "test": at}, **fields,
    }  # fmt: skip


def test_who_arrives_with_most_seeds_and_fewest_steps_is_chosen():
    first = [ending(0.1, 0, 30), ending(0.2, 0, 10), ending(0.4, 0, 20), ending(0.8, 0, None)]
    assert echo_report.finalists(first, "fixed", 2.0) == [0.2, 0.4]
    assert echo_report.best_rate(first, "fixed", 2.0) == 0.2
    others = [ending(0.2, 1, None), ending(0.4, 1, 50)]
    assert echo_report.best_rate(first + others, "fixed", 2.0) == 0.4
    assert echo_report.best_rate(first, "fixed", 4.0) is None
    diverged = [ending(0.1, 0, None, diverged="nan"), ending(0.2, 0, 10)]
    assert echo_report.finalists(diverged, "fixed", 2.0) == [0.2]


def test_a_comparison_is_written_and_goes_on_where_it_was_stopped(task, tmp_path, monkeypatch):
    monkeypatch.setitem(
        echoing.RECIPES, "digits", echoing.RECIPES["digits"]._replace(load=lambda data_dir: task)
    )
    values = flags.FlagValues()
    echoing.define_flags(values)
    command = [
        "echoing", "--arms=none,diffusion,measured", "--speeds=2", "--rates=0.1,1.0", "--seeds=2",
        "--target=0.5", "--total_steps=8", "--evaluate_every=4", "--workers=2", "--batch_size=4",
        "--step_seconds=0.001", f"--output_dir={tmp_path}",
    ]  # fmt: skip
    values(command)
    echoing.main([], values)
    written = records.read(str(tmp_path / "metrics.jsonl"))
    ended = [echoing.key_of(r) for r in written if r["ended"]]
    assert len(ended) == len(set(ended))
    assert {r["arm"] for r in written if r["timed"]} == {"none", "diffusion", "measured"}
    replayed = [r for r in written if r["arm"] == "measured" and r["ended"]]
    for r in replayed:  # the decisions of a measured run are on record
        fresh = np.zeros(r["step"], bool)
        fresh[r["load_steps"]] = True
        assert ordering.echo.EchoPlan(fresh).digest() == r["plan"]
    text = (tmp_path / "table.md").read_text()
    assert "error diffusion" in text and "R = 2\n" in text
    assert text.startswith("| times faster than no echo | R = 2")
    for picture in ("time_to_target.png", "curves_R2.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
    trained = []
    monkeypatch.setattr(echoing, "_train", lambda *a: trained.append(a))
    echoing.main([], values)
    assert not trained


def test_flags_make_a_recipe():
    values = flags.FlagValues()
    echoing.define_flags(values)
    values(["echoing", "--recipe=mnist", "--rates=0.1,0.5", "--speeds=4", "--arms=none,fixed"])
    recipe = echoing.recipe_from_flags(values)
    assert recipe == echoing.RECIPES["mnist"]._replace(
        rates=(0.1, 0.5), speeds=(4.0,), arms=["none", "fixed"]
    )
    for flag, value, message in (
        ("speeds", "0", "--speeds has 0.0"),
        ("rates", "nan", "--rates has nan"),
        ("arms", "echo", "--arms has .'echo'"),
    ):
        values[flag].parse(value)
        with pytest.raises(ValueError, match=message):
            echoing.recipe_from_flags(values)
        values[flag].parse({"speeds": "4", "rates": "0.1", "arms": "none"}[flag])
