"""Data parallel inside a worker, local steps between workers: two workers of four devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import local_opt
from tests.compiled_runs import lines_of
from tests.plain_loop import Mean, ends, history
from tests.problems import assert_workers_bitwise_equal
from tests.shards import IN, OUT, SGD, loss, network

WORKERS, DEVICES, BATCH, STEPS = 2, 4, 8, 13  # examples of a worker in a step
PLAN = local_opt.constant(3, total_steps=STEPS)
DATA = [
    np.random.default_rng(2).normal(size=(STEPS, WORKERS * BATCH, n)).astype(np.float32)
    for n in (IN, OUT)
]
BYTES = 4 * sum(x.size for x in jax.tree.leaves(network()))


def mesh_of():
    return jax.make_mesh((WORKERS, DEVICES), ("worker", "data"), (jax.sharding.AxisType.Auto,) * 2)


def mean_loss(params, x, y):
    return jnp.mean(loss(params, {"x": x, "y": y}, None))


def step_of(rounds, mean_loss=mean_loss):
    def step(params, state, x, y):
        updates, state = rounds.update(jax.grad(mean_loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    return step


def by_compiler(rounds, workers):
    """(step, sync): `workers` is a mesh, or the number of those on one device."""
    mapped = functools.partial(local_opt.map_workers, workers=workers)
    step = mapped(
        step_of(rounds), in_specs=("worker", "worker", "batch", "batch"), out_specs="worker"
    )
    return jax.jit(step), jax.jit(mapped(rounds.sync, in_specs="worker", out_specs="worker"))


def by_hand(rounds, mesh):
    """Both axes are manual, and the loss is averaged over "data"."""

    def over(function, *batch):
        def per_device(params, state, *batch):
            local = jax.tree.map(lambda x: x[0], (params, state))
            return jax.tree.map(lambda x: x[None], function(*local, *batch))

        per_worker = P("worker")
        return jax.jit(
            jax.shard_map(
                per_device,
                mesh=mesh,
                in_specs=(per_worker, per_worker, *batch),
                out_specs=per_worker,
            )
        )

    step = step_of(rounds, lambda *args: lax.pmean(mean_loss(*args), "data"))
    return over(step, *[P(("worker", "data"))] * 2), over(rounds.sync)


def trained(rounds, programs, workers):
    step, sync = programs(rounds, workers)
    params, state = local_opt.replicate((network(), rounds.init(network())), workers)
    for t, batch in enumerate(zip(*DATA, strict=True)):
        params, state = step(params, state, *batch)
        if PLAN.syncs_after(t):
            params, state = jax.block_until_ready(sync(params, state))
    return params


def test_a_worker_of_four_devices_trains_as_one_device_with_the_whole_batch():
    """With both axes by hand; by the compiler, docs/use/meshes.md holds it on every mesh."""
    rounds = local_opt.local_rounds(SGD)
    result = trained(rounds, by_hand, mesh_of())
    assert_workers_bitwise_equal(result)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(near, result, trained(rounds, by_compiler, WORKERS))


def test_steps_stay_inside_a_worker_and_a_sync_goes_between_workers_alone(optimised):
    mesh, rounds = mesh_of(), local_opt.local_rounds(SGD)
    step, sync = by_compiler(rounds, mesh)
    state = local_opt.replicate((network(), rounds.init(network())), mesh)
    place = jax.NamedSharding(mesh, P(("worker", "data")))
    batch = jax.device_put([x[0] for x in DATA], place)

    def collectives(lowered):
        results = {}
        for kind, size, axes in lines_of(lowered.compile(), mesh):
            results[kind, axes] = results.get((kind, axes), 0) + size
        return results

    assert collectives(step.lower(*state, *batch)) == {("all-reduce", "data"): BYTES}
    assert collectives(sync.lower(*state)) == {("all-reduce", "worker"): BYTES}


def test_syncs_inside_nodes_and_across_them_share_a_state():
    """Two nodes of three devices, each of them a worker; on a mesh as simulated."""
    near, far = (local_opt.constant(h, total_steps=12) for h in (2, 6))
    rate = 0.1
    grads = np.random.default_rng(4).normal(size=(12, 2, 3, 5)).astype(np.float32)
    node = local_opt.local_rounds(optax.sgd(rate, 0.9), axis_name="device")
    every = local_opt.local_rounds(optax.sgd(rate, 0.9), axis_name=("node", "device"))
    mesh = jax.make_mesh((2, 3), ("node", "device"), (jax.sharding.AxisType.Auto,) * 2)

    def step(x, state, grads):
        updates, state = node.update(grads, state, x)
        return x + updates, state

    def momentum(w, t, x, v):
        v = 0.9 * v + grads[t].reshape(6, 5)[w]
        return x - rate * v, v

    def simulated(function):
        return jax.vmap(jax.vmap(function, axis_name="device"), axis_name="node")

    def on_mesh(function):
        def per_device(*args):
            local = function(*jax.tree.map(lambda x: x[0, 0], args))
            return jax.tree.map(lambda x: x[None, None], local)

        return jax.shard_map(
            per_device, mesh=mesh, in_specs=P("node", "device"), out_specs=P("node", "device")
        )

    means = ends(near, Mean([[0, 1, 2], [3, 4, 5]])) | ends(far)
    expected = history(momentum, np.zeros(5), [np.zeros(5)] * 6, 12, means)
    runs = {run: [jnp.zeros((2, 3, 5))] for run in (simulated, on_mesh)}
    for run, kept in runs.items():
        kept.append(jax.jit(run(node.init))(kept[0]))
    for t in range(12):
        for run, kept in runs.items():
            kept[:] = jax.jit(run(step))(*kept, grads[t])
            if near.syncs_after(t):
                kept[:] = jax.jit(run((every if far.syncs_after(t) else node).sync))(*kept)
            np.testing.assert_allclose(kept[0], expected[t].reshape(2, 3, 5), atol=1e-6)
