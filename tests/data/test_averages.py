"""Averages of the weights equal the papers' sums over the weights of every step."""

import json
import math

import jax
import numpy as np
import optax
import pytest

from experiments import files
from experiments.data import optimizers
from experiments.data.averages import AVERAGES
from experiments.trainer import measure
from tests import reference
from tests.commands import SHORT, records, train_run
from tests.little_run import PER_STEP, STEPS, UNITS, built, plans_of, trained

LOADS = -(-UNITS // PER_STEP)
EPOCHS = (0.5, 3.0)  # of EMAs
NAMES = ("epoch", "ema_0.5", "ema_3", "swa")


def flat(tree):
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def expected(name, weights, t):
    if name == "epoch":
        return reference.epoch_mean(weights, t, LOADS)
    if name == "swa":
        return reference.late_mean(weights, t, LOADS, STEPS)
    epochs = float(name.removeprefix("ema_"))
    return reference.debiased_ema(weights, t, math.exp(-1 / (epochs * LOADS)))


@pytest.mark.parametrize("sync,echo", [("qsr", "diffusion+cosine"), ("accumulate", "none")])
def test_averages_are_those_of_the_weights_after_every_step(sync, echo):
    program = built("rr", sync, average=tuple(AVERAGES), ema_epochs=EPOCHS)
    plans = plans_of(sync, echo)
    averages, weights, results = measure.averaged_models(program), [], {}

    def observe(step, state):
        weights.append(flat(measure.model_of(program, state.params)))
        results[step] = jax.tree.map(np.asarray, averages(state, step, STEPS))
        return {}

    trained(program, plans, evaluate=observe, evaluate_at=range(STEPS))
    start, *weights = weights
    assert set(results) == set(range(STEPS + 1)) and set(results[0]) == set(NAMES)
    for name in NAMES:
        np.testing.assert_array_equal(flat(results[0][name]), start)
        for t in range(1, STEPS + 1):
            mean = expected(name, weights, t)
            np.testing.assert_allclose(flat(results[t][name]), mean, rtol=1e-5, atol=1e-7)
        # The last weights alone are something else.
        assert np.abs(flat(results[STEPS][name]) - weights[-1]).max() > 1e-6
    seldom = {}

    def keep(t, state):
        seldom[t] = averages(state, t, STEPS)
        return {}

    trained(program, plans, evaluate_at=[LOADS], evaluate=keep)
    for t, means in seldom.items():
        jax.tree.map(np.testing.assert_array_equal, means, results[t])


@pytest.mark.parametrize("total", [2 * STEPS + LOADS - 1, 2])
def test_late_averages_are_of_the_end_of_the_run_not_of_the_recipe(total):
    """Of slow input a run is longer than its recipe says; one program serves both."""
    program = built("rr", "parallel", average=("swa",))
    plans = plans_of("parallel", "none", total_steps=total, warmup_steps=0)
    averages, weights, results = measure.averaged_models(program), [], {}

    def observe(step, state):
        weights.append(flat(measure.model_of(program, state.params)))
        results[step] = flat(averages(state, step, total)["swa"])
        return {}

    trained(program, plans, evaluate=observe, evaluate_at=range(total))
    _, *weights = weights
    for t in (total // 2, total):
        past = [k for k in range(LOADS, total + 1, LOADS)][-4:]
        ends = [(i, weights[k - 1]) for i, k in enumerate(past, 1) if k <= t]
        ends = ends or [(1, weights[t - 1])]
        mean = sum(i * x for i, x in ends) / sum(i for i, _ in ends)
        np.testing.assert_allclose(results[t], mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "sync,steps",
    [
        ("constant", range(2 * STEPS)),
        ("accumulate", range(1, 2 * STEPS, 2)),  # H = 2: updates come after every second step
    ],
)
def test_optimizers_know_which_share_of_the_run_is_over(sync, steps, monkeypatch):
    def moved(grads, state, params=None, *, at, **extra):
        return jax.tree.map(lambda g: jax.numpy.full_like(g, at), grads), state

    row = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), moved)
    monkeypatch.setitem(optimizers.OPTIMIZERS, "momentum", lambda recipe: (row,))
    program = built.__wrapped__("rr", sync)
    plans = plans_of(sync, "none", total_steps=2 * STEPS, warmup_steps=0, schedule="constant")
    outcome, _ = trained(program, plans, evaluate_at=[])
    start = flat(measure.model_of(program, program.init(0).params))
    expected = start - 0.3 * sum(t / (2 * STEPS) for t in steps)
    last = flat(measure.model_of(program, outcome.state.params))
    np.testing.assert_allclose(last, expected, rtol=1e-4)


def test_the_average_with_the_lowest_training_loss_is_recorded():
    losses = {"a": 2.0, "b": 1.0, "c": math.nan}

    def run(params, parts):
        asked.append((params, *parts))
        return {f"{part}/loss": losses[params] for part in parts}

    asked = []
    result = measure.averaged(run, {name: name for name in losses}, ["valid", "test"])
    parts = ("train", "valid", "test")
    assert result == {"average": "b"} | {f"{part}/loss/averaged": 1.0 for part in parts}
    assert asked == [(name, "train") for name in losses] + [("b", "valid", "test")]
    assert measure.averaged(run, {"c": "c"}, [])["average"] == "c"


def test_records_hold_averages_and_stay_json(finished, tmp_path):
    train_run([*SHORT, "--average=epoch,ema"], tmp_path)
    scalars = ["train/loss", "train/above_optimum", "test/accuracy"]
    for r, plain in zip(records(tmp_path), records(finished), strict=True):
        assert {f"{s}/averaged" for s in scalars} <= set(r) and r["average"] in NAMES
        assert {k: r[k] for k in plain} == plain
    nan = measure.averaged(lambda x, parts: {"train/loss": x}, {"ema": math.nan}, [])
    assert json.loads(files.dumps(files.plain(nan)))["train/loss/averaged"] is None
