"""Training with echoed batches: the papers' loops."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import local_opt
import ordering
from experiments.cluster.devices import worker_mesh
from tests import reference
from tests.problems import assert_workers_bitwise_equal, on_mesh, vmap

W, D, B, T = 8, 3, 2, 60
RATE = 0.05
RNG = np.random.default_rng(0)
# Load l of worker w: B equations in D unknowns.
MATRICES = RNG.normal(size=(T, W, B, D)).astype(np.float32)
TARGETS = RNG.normal(size=(T, W, B)).astype(np.float32)
START = RNG.normal(size=D).astype(np.float32)


def gradient(w, load, x):
    return MATRICES[load, w].T @ (MATRICES[load, w] @ x - TARGETS[load, w]) / B


gradient.workers = W
ROUNDS = local_opt.local_rounds(optax.sgd(RATE), axis_name="worker")
P = optax.linear_schedule(1.0, 0.25, T)
P_SYNC = optax.cosine_decay_schedule(0.9, T, alpha=0.3)


def loss(x, batch):
    matrix, target = batch
    return 0.5 * jnp.mean((matrix @ x - target) ** 2)


def one_step(x, state, batch):
    updates, state = ROUNDS.update(jax.grad(loss)(x, batch), state, x)
    return optax.apply_updates(x, updates), state


@pytest.mark.parametrize("run", ["vmap", "shard_map"])
def test_algorithm_2_equals_the_reference(run):
    plan = ordering.echo.bernoulli(P, total_steps=T, key=jax.random.key(1))
    sync_plan = local_opt.bernoulli(P_SYNC, total_steps=T, key=jax.random.key(2))
    over = {"vmap": vmap, "shard_map": functools.partial(on_mesh, workers=W)}[run]
    init, step, sync = (jax.jit(over(f)) for f in (ROUNDS.init, one_step, ROUNDS.sync))
    x = np.stack([START] * W)
    state = init(x)
    history, loads, syncs = [], [], []
    sharding = None
    if run == "shard_map":
        sharding = NamedSharding(worker_mesh(W), PartitionSpec("worker"))
    with ordering.input.load_ahead(
        zip(MATRICES, TARGETS, strict=True), sharding=sharding
    ) as loader:
        for use in ordering.echo.echo_batches(loader, plan):
            if use.fresh:
                loads.append(use.step)
            x, state = step(x, state, use.batch)
            if sync_plan.syncs_after(use.step):
                x, state = sync(x, state)
                assert_workers_bitwise_equal(x)
                syncs.append(use.step)
            history.append(np.asarray(x))
    coins, sync_coins = (
        np.asarray(jax.random.uniform(jax.random.key(seed), (T,))) for seed in (1, 2)
    )
    expected, num_loads, num_syncs = reference.echoed_local_sgd(
        START,
        gradient,
        lambda t: 1.0 - 0.75 * t / T,
        coins,
        lambda t: 0.9 * (0.3 + 0.7 * 0.5 * (1 + math.cos(math.pi * t / T))),
        sync_coins,
        RATE,
    )
    assert len(loads) == plan.loads == num_loads < T
    assert len(syncs) == sync_plan.rounds == num_syncs < T
    # 60 steps of float32 roundings (6e-8) of numbers of order one.
    np.testing.assert_allclose(np.stack(history), expected, rtol=0, atol=2e-6)
    assert np.abs(expected - expected[:, :1]).max() > 0.1  # workers do go apart
