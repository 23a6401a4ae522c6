"""Methods by name are what they say, and warn where their runs are too short for them."""

import warnings

import numpy as np
import optax
import pytest

import local_opt
from local_opt import presets
from tests.problems import RATE, RUNS, SGD, assert_bitwise_equal, run_squares

LONG = local_opt.constant(1, total_steps=60)
MAKERS = {
    "diloco": (local_opt.diloco, local_opt.nesterov),
    "slowmo": (local_opt.slowmo, local_opt.slow_momentum),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_method_is_local_steps_with_its_outer_optimizer(name):
    make, outer = MAKERS[name]
    options = {"axis_name": "worker", "opt_state": "reset"}
    momentum = optax.sgd(RATE, momentum=0.9)
    named = make(momentum, LONG, **options)
    plain = local_opt.local_steps(momentum, LONG, outer=outer(), **options)
    assert_bitwise_equal(run_squares(named, RUNS["vmap"]), run_squares(plain, RUNS["vmap"]))


def left_after(rounds, share, rate=0.7, momentum=0.9):
    """The error after outer steps each of whose changes is a share of it, from 1; in NumPy."""
    error, velocity = np.ones_like(share), np.zeros_like(share)
    for _ in range(rounds):
        change = share * error
        velocity = momentum * velocity + change
        error = error - rate * (change + momentum * velocity)
    return np.abs(error)


@pytest.mark.parametrize("rounds", [17, 44, 100])
def test_what_momentum_leaves_is_what_the_warning_says(rounds):
    """Over all shares of the way to the optimum that a round may take; averaging leaves less."""
    share = np.linspace(0.01, 1, 100)
    worst = left_after(rounds, share).max()
    assert 0.5 * 0.9 ** (rounds / 2) < worst < 1.05 * 0.9 ** (rounds / 2)
    assert (left_after(rounds, share) > (1 - share) ** rounds).mean() > 0.8


def test_few_rounds_are_told():
    plan = local_opt.constant(30, total_steps=17 * 30)
    with pytest.warns(
        UserWarning, match="diloco has 17 rounds for an outer momentum of 0.9: .* 41% "
    ):
        local_opt.diloco(SGD, plan, axis_name="worker")
    with pytest.warns(UserWarning, match="slowmo has 2 rounds .* at least 7 rounds"):
        local_opt.slowmo(SGD, local_opt.constant(8, total_steps=16), axis_name="worker")
    assert presets.rounds_needed(0.9) == 44 and presets.rounds_needed(0.0) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local_opt.diloco(SGD, local_opt.constant(30, total_steps=44 * 30), axis_name="worker")
        local_opt.diloco(SGD, plan, axis_name="worker", momentum=0.0)


def test_what_is_refused():
    with pytest.raises(ValueError, match="momentum is 1"):
        local_opt.diloco(SGD, LONG, axis_name="worker", momentum=1)
    with pytest.raises(ValueError, match="plan is a int"):
        local_opt.diloco(SGD, 500, axis_name="worker")
