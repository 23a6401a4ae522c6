"""Syncs inside nodes and, less often, across them; what devices of one worker send is in
test_shards_compiled.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import local_opt
from tests.plain_loop import Mean, ends, history


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
