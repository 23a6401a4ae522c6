"""Optimizers and schedules by name equal those of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.tasks import Recipe
from experiments.training import optimizers

STEPS = 40


def schedule(name, **fields):
    fields = {"floor": 0.1, "decay_every": 3, "decay_factor": 0.5} | fields
    recipe = Recipe(1, 1, 1, (0.2,), schedule=name, **fields)
    return optimizers.schedule(recipe, STEPS, loads_per_epoch=5)


@pytest.mark.parametrize(
    "name,expected",
    [
        ("constant", lambda t: 1.0),
        ("cosine", lambda t: 0.1 + 0.9 * (1 + np.cos(np.pi * t / STEPS)) / 2),
        ("linear", lambda t: 1 - 0.9 * t / STEPS),
        ("step", lambda t: 0.5 ** (t // 15)),
    ],
)
def test_schedules_without_a_warmup(name, expected):
    rate = schedule(name)
    for t in range(STEPS):
        assert float(rate(t)) == pytest.approx(expected(t), rel=1e-5)


@pytest.mark.parametrize("name", optimizers.SCHEDULES)
def test_a_warmup_is_linear_and_part_of_the_run(name):
    rate = schedule(name, warmup_steps=8)
    np.testing.assert_allclose([float(rate(t)) for t in range(9)], np.arange(9) / 8, rtol=1e-6)
    falls = [t for t in range(9, STEPS) if float(rate(t)) < 0.9 * float(rate(t - 1))]
    if name == "step":  # counted from the run's first step, not from the warmup's end
        assert falls == [15, 30]


def test_the_cosine_with_a_warmup_equals_optax():
    rate = schedule("cosine", warmup_steps=8, floor=1e-3)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 1.0, 8, STEPS, 1e-3)
    assert [float(rate(t)) for t in range(STEPS)] == [float(theirs(t)) for t in range(STEPS)]


@pytest.mark.parametrize(
    "name,decay,momentum,theirs",
    [
        ("momentum", 0.0, 0.9, optax.sgd(0.2, momentum=0.9)),
        ("momentum", 0.0, 0.0, optax.sgd(0.2)),
        ("momentum", 0.1, 0.9, optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.2, 0.9))),
        ("adamw", 0.1, 0.8, optax.adamw(0.2, b1=0.8, weight_decay=0.1)),
        ("adamw", 0.0, 0.9, optax.adam(0.2)),
    ],
)
def test_optimizers_equal_optax(name, decay, momentum, theirs):
    recipe = Recipe(1, 1, 1, (0.2,), optimizer=name, momentum=momentum, weight_decay=decay)
    ours, theirs = optimizers.inner(recipe), optax.with_extra_args_support(theirs)
    params = {"w": jnp.array([1.0, -2.0])}
    states = [optimizer.init(params) for optimizer in (ours, theirs)]
    for t in range(4):
        grads = {"w": jnp.array([0.3, 1.0]) * (t + 1)}
        (mine, states[0]), (expected, states[1]) = (
            optimizer.update(grads, state, params, rate=0.2)
            for optimizer, state in zip((ours, theirs), states, strict=True)
        )
        np.testing.assert_allclose(mine["w"], expected["w"], rtol=1e-5)
        params = jax.tree.map(lambda p, u: p + u, params, mine)
