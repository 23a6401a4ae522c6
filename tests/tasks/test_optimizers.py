"""Optimizers and schedules by name equal those of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from experiments.tasks import Recipe
from experiments.training import optimizers
from syncopate.schedules import evaluate_schedule

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


def test_cycles_of_a_cosine_end_a_linear_decay():
    """T = 40, and epochs of 5 steps: 40 % is 16 steps, and the last four epochs are 20."""
    rate, spe = schedule("cycles", decay_every=1), 5
    for t in range(STEPS):
        own = 1.0 if t <= STEPS - 16 else (STEPS - t) / 16
        if t >= STEPS - 4 * spe:
            place = (t - (STEPS - 4 * spe)) % spe / spe
            own = 0.05 + (max(own, 0.05) - 0.05) * (1 + np.cos(np.pi * place)) / 2
        assert float(rate(t)) == pytest.approx(own, rel=1e-5)


def test_muon_takes_matrices_of_layers_and_its_weight_decay_falls_and_rises():
    recipe = Recipe(1, 1, 1, (0.2,), optimizer="muon_valley", momentum=0.9, weight_decay=0.5)
    w, g = np.eye(3, 2, dtype=np.float32), np.arange(6, dtype=np.float32).reshape(3, 2) - 2
    params = {"layer": {"kernel": w, "bias": np.ones(2, np.float32)}, "tokens": w}
    grads = {"layer": {"kernel": g, "bias": np.ones(2, np.float32)}, "tokens": g}
    ours, muon = optimizers.inner(recipe), contrib.scale_by_muon(beta=0.9)
    state, theirs = ours.init(params), muon.init(jnp.array(w))
    step = jax.jit(lambda state, t: ours.update(grads, state, params, rate=0.2, at=t / 15))
    for t in range(15):
        found, state = step(state, t)
        move, theirs = muon.update(jnp.array(g), theirs)
        decay = 0.5 * np.interp(t, [0, 2, 8, 15], [1, 1, 1 / 8, 0.93 / 0.8])
        kernel, bias = found["layer"]["kernel"], found["layer"]["bias"]
        np.testing.assert_allclose(kernel, -0.2 * (move + decay * w), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(bias, -0.02 * np.ones(2), rtol=1e-4)
        signs = np.sign(g) + decay * w  # Adam, of equal gradients
        np.testing.assert_allclose(found["tokens"], -0.02 * signs, rtol=1e-4, atol=1e-6)
    moments = optax.tree_utils.tree_get_all_with_path(state, "nu")
    assert sum(len(jax.tree.leaves(moment)) for _, moment in moments) == 3, "for scaled orders"


@pytest.mark.parametrize("name", optimizers.SCHEDULES)
def test_a_warmup_is_linear_and_part_of_the_run(name):
    rate = schedule(name, warmup_steps=8)
    np.testing.assert_allclose([float(rate(t)) for t in range(9)], np.arange(9) / 8, rtol=1e-6)
    falls = [t for t in range(9, STEPS) if float(rate(t)) < 0.9 * float(rate(t - 1))]
    if name == "step":  # counted from the run's first step, not from the warmup's end
        assert falls == [15, 30]


@pytest.mark.parametrize("total,warmup,every", [
    (1000, 0, 300), (1000, 250, 100), (40, 39, 1),
])  # fmt: skip
def test_a_staircase_falls_to_the_end_of_the_run(total, warmup, every):
    """Falls are at all multiples of `every`, however long the warmup is."""
    recipe = Recipe(1, 1, 1, (0.2,), schedule="step", warmup_steps=warmup, decay_factor=0.5,
                    decay_every=every)  # fmt: skip
    rates = evaluate_schedule(optimizers.schedule(recipe, total, 1), total, "lr")
    steps = np.arange(total)
    rise = np.where(steps < warmup, steps / max(1, warmup), 0.5 ** (steps // every))
    np.testing.assert_allclose(rates, rise, rtol=1e-6)


def test_the_cosine_with_a_warmup_equals_optax():
    rate = schedule("cosine", warmup_steps=8, floor=1e-3)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 1.0, 8, STEPS, 1e-3)
    assert [float(rate(t)) for t in range(STEPS)] == [float(theirs(t)) for t in range(STEPS)]


@pytest.mark.parametrize(
    "name,decay,momentum,theirs",
    [
        ("momentum", 0.0, 0.0, optax.sgd(0.2)),
        ("momentum", 0.1, 0.9, optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.2, 0.9))),
        ("adamw", 0.1, 0.8, optax.adamw(0.2, b1=0.8, weight_decay=0.1)),
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
