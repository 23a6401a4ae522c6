"""Optimizers and schedules by name equal those of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from experiments.data import Recipe, optimizers, schedules
from syncopate.schedules import evaluate_schedule

STEPS = 40


def cycles(t, left):
    """The factor of the rate: linear over 40 %, and a cosine in each of the last 4 epochs."""
    factor = min(1.0, (left - t) / (0.4 * left))
    if t < left - 4 * 5:
        return factor
    place = (t - (left - 4 * 5)) % 5 / 5
    return 0.05 + (max(factor, 0.05) - 0.05) * (1 + np.cos(np.pi * place)) / 2


# By the steps after the warmup, and their number; falls of a staircase are of the whole run.
AFTER = {
    "constant": lambda t, left: 1.0,
    "cosine": lambda t, left: 0.1 + 0.9 * (1 + np.cos(np.pi * t / left)) / 2,
    "linear": lambda t, left: 1 - 0.9 * t / left,
    "step": lambda t, left: 0.5 ** ((t + STEPS - left) // 5),
    "cycles": cycles,
}


@pytest.mark.parametrize("warmup", [0, 8, 30])
@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_a_schedule_comes_after_a_linear_warmup(name, warmup):
    recipe = Recipe(
        1,
        1,
        1,
        (0.2,),
        schedule=name,
        warmup_steps=warmup,
        floor=0.1,
        decay_every=1,
        decay_factor=0.5,
    )
    rates = evaluate_schedule(schedules.schedule(recipe, STEPS, loads_per_epoch=5), STEPS, "lr")
    rise, left = np.arange(warmup) / max(1, warmup), STEPS - warmup
    np.testing.assert_allclose(rates[:warmup], rise, rtol=1e-5)
    assert (rates >= 0).all() and (rates <= 1).all(), "a factor of the peak rate"
    if name in AFTER:
        wanted = [AFTER[name](t, left) for t in range(left)]
        np.testing.assert_allclose(rates[warmup:], wanted, rtol=1e-5)


def test_muon_takes_matrices_of_layers_and_its_weight_decay_falls_and_rises():
    recipe = Recipe(1, 1, 1, (0.2,), optimizer="muon_valley", momentum=0.9, weight_decay=0.5)
    w, g = np.eye(3, 2, dtype=np.float32), np.arange(6, dtype=np.float32).reshape(3, 2) - 2
    params = {"layer": {"kernel": w, "bias": np.ones(2, np.float32)}, "tokens": w}
    grads = {"layer": {"kernel": g, "bias": np.ones(2, np.float32)}, "tokens": g}
    ours, muon = optimizers.inner(recipe), contrib.scale_by_muon(beta=0.9)
    state, theirs = ours.init(params), muon.init(jnp.array(w))
    step = jax.jit(lambda state, t: ours.update(grads, state, params, rate=0.2, at=t / 15))
    for t in range(15):
        result, state = step(state, t)
        move, theirs = muon.update(jnp.array(g), theirs)
        decay = 0.5 * np.interp(t, [0, 2, 8, 15], [1, 1, 1 / 8, 0.93 / 0.8])
        kernel, bias = result["layer"]["kernel"], result["layer"]["bias"]
        np.testing.assert_allclose(kernel, -0.2 * (move + decay * w), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(bias, -0.02 * np.ones(2), rtol=1e-4)
        signs = np.sign(g) + decay * w  # Adam, of equal gradients
        np.testing.assert_allclose(result["tokens"], -0.02 * signs, rtol=1e-4, atol=1e-6)
    moments = optax.tree_utils.tree_get_all_with_path(state, "nu")
    assert sum(len(jax.tree.leaves(moment)) for _, moment in moments) == 3, "for scaled orders"


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
