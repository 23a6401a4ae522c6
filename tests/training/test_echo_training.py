"""Training with echoed batches: the papers' loops, one sync per load, and orders."""

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
from tests import reference, tables
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


@pytest.mark.parametrize("name", tables.ECHO_PLANS)
def test_one_sync_per_load_of_every_plan(name):
    plan = tables.ECHO_PLANS[name](41)
    sync_plan = local_opt.SyncPlan(plan.load_steps, plan.total_steps)
    assert sync_plan.rounds == plan.loads and sync_plan.total_steps == 41
    np.testing.assert_array_equal(sync_plan.starts, plan.load_steps)
    np.testing.assert_array_equal(sync_plan.periods, plan.uses)


# Orders: an echoed batch is not observed.

UNITS, PER_STEP, WORKERS = 8, 2, 4
USES = [3, 1, 2, 3, 2, 1, 3, 2]  # two epochs of four loads
ECHOES = ordering.echo.EchoPlan(np.concatenate([np.arange(u) == 0 for u in USES]))
GRADIENTS = jnp.asarray(tables.whole_numbers((WORKERS, UNITS, 5), seed=3))
PLAIN = ordering.cd_grab(UNITS, units_per_step=PER_STEP)


def observe(state, gradients, start, step, fresh):
    """Of a batch of gradients, other ones in every step, as the parameters have moved."""
    units = jax.lax.dynamic_slice_in_dim(state.current, start, PER_STEP)
    rows = jnp.roll(gradients[units], step, axis=1) * (1 + step % 3)
    return jax.lax.cond(fresh, lambda s: PLAIN.observe(s, rows), lambda s: s, state)


init = tables.vmap_workers(lambda key, g: PLAIN.init(key, g[0]))
next_epoch = tables.vmap_workers(PLAIN.next_epoch)


def echoed_orders(observe, last_use=False):
    """[3, W, M]: the first order and those after two epochs, of `observe(state, *at, fresh)`."""
    state = init(jax.random.split(jax.random.key(0), WORKERS), GRADIENTS)
    orders, load, visited = [np.asarray(state.current)], -1, []
    for step, fresh in enumerate(ECHOES.fresh.tolist()):
        load += fresh
        if load == 4 and fresh:
            state = next_epoch(state)
            orders.append(np.asarray(state.current))
        start = PER_STEP * (load % 4)
        before = np.asarray(state.position)
        state = observe(state, GRADIENTS, start, step + last_use * (USES[load] - 1), fresh)
        seen = np.asarray(state.position) - before
        assert (seen == (PER_STEP if fresh else 0)).all()
        if fresh:
            visited.append(np.asarray(state.current)[:, start : start + PER_STEP])
    for epoch in (visited[:4], visited[4:]):  # every unit once
        units = np.sort(np.concatenate(epoch, axis=1), axis=1)
        np.testing.assert_array_equal(units, np.stack([np.arange(UNITS)] * WORKERS))
    state = next_epoch(state)
    return np.stack([*orders, np.asarray(state.current)])


def test_every_unit_is_observed_once_however_fresh_is_told():
    """By a step of its own, to each worker, or to all: the condition then stays a branch."""
    mapped = tables.vmap_workers(observe)

    def each(state, gradients, *at):
        return mapped(state, gradients, *(jnp.full(WORKERS, value) for value in at))

    def two_steps(state, gradients, start, step, fresh):
        return each(state, gradients, start, step, True) if fresh else state

    together = jax.jit(jax.vmap(observe, (0, 0, None, None, None), axis_name="worker"))
    expected = echoed_orders(two_steps)
    for step in (each, together):
        np.testing.assert_array_equal(echoed_orders(step), expected)
    # An echoed step that is observed instead would be noticed.
    assert (echoed_orders(together, last_use=True) != expected).any()
