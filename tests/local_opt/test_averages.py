"""Averaged weights under local steps: the mean of the workers' averages is that of their mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import local_opt

W, STEPS, DECAY = 4, 12, 0.9
MESH = jax.make_mesh((W,), ("worker",), (AxisType.Auto,), devices=jax.devices()[:W])
PLAN = local_opt.constant(3, total_steps=STEPS)
WAYS = {
    "plain": {},
    "outer": {"outer": optax.sgd(0.7, momentum=0.5, nesterov=True)},
    "int8": {"wire": local_opt.WIRES["int8"]},
}


@pytest.mark.parametrize("workers", [W, MESH], ids=["vmap", "mesh"])
@pytest.mark.parametrize("way", WAYS)
def test_the_mean_of_averages_is_the_average_of_means(way, workers):
    optimizer = local_opt.local_steps(optax.adam(0.1), PLAN, axis_name="worker", **WAYS[way])

    def step(x, state, ema, target):
        updates, state = optimizer.update(2 * (x - target[0]), state, x)
        x = optax.apply_updates(x, updates)
        return x, state, optax.incremental_update(x, ema, 1 - DECAY)

    run = jax.jit(local_opt.lift(
        step, workers, inputs="owned owned owned split", outputs="owned owned owned"
    ))  # fmt: skip
    start = jnp.zeros(3)
    x, state, ema = local_opt.owned((start, optimizer.init(start), start), workers)
    target, expected = jnp.arange(3.0 * W).reshape(W, 3), np.zeros(3)
    for _ in range(STEPS):
        x, state, ema = run(x, state, ema, target)
        expected = DECAY * expected + (1 - DECAY) * np.asarray(x, np.float64).mean(0)
        np.testing.assert_allclose(local_opt.consolidate(ema), expected, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match="apart"):
        local_opt.check_synced(ema)  # though the parameters have just met
    local_opt.check_synced(x)
