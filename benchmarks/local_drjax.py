"""DiLoCo written with drjax' public functions, both workers in one process.

`python -m benchmarks.local_drjax` is that process, which `local_steps` starts.
"""

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import local_problem
from benchmarks.local_problem import WORKERS, Job, Worker
from benchmarks.local_syncopate import INNER, OUTER, bytes_of, plain_of, step_of


@drjax.program(clients=WORKERS)
def step(params, state, x, y):
    return drjax.map_fn(step_of(INNER.update), (params, state, x, y))


@drjax.program(clients=WORKERS)
def sync(params, anchor, state):
    """`(workers' parameters, those of the server, outer state) -> the next of them`."""
    change = jax.tree.map(jnp.subtract, anchor, drjax.reduce_mean(params))
    updates, state = OUTER.update(change, state, anchor)
    anchor = optax.apply_updates(anchor, updates)
    return drjax.broadcast(anchor), anchor, state


def diloco(job: Job, mesh=None) -> Worker:
    """On one device, or with one device for each worker."""
    run, synced = jax.jit(step, donate_argnums=(0, 1)), jax.jit(sync, donate_argnums=(0, 1, 2))
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec("clients"))
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    anchor = jax.device_put([jnp.asarray(x) for x in local_problem.start(job.widths)], whole)
    params = jax.device_put([jnp.stack([x] * WORKERS) for x in anchor], sharding)
    server = [anchor, jax.device_put(OUTER.init(anchor), whole)]
    clients = [params, jax.device_put(jax.vmap(INNER.init)(params), sharding)]
    plain, other = plain_of(job)

    def place(x, y):
        given = jnp.asarray(x), jnp.asarray(y, jnp.int32)
        return (*given, *jax.device_put(given, sharding))

    def take(given):
        clients[:] = run(*clients, *given[2:])

    def rest(last):
        if last:
            clients[0], *server[:] = synced(clients[0], *server)

    return Worker(
        place=place,
        plain=lambda given: plain(*given[:2]),
        step=take,
        rest=rest,
        wait=lambda: jax.block_until_ready((clients, server, other)),
        params=lambda: [np.asarray(x) for x in server[0]],
        compiled=lambda: bytes_of(synced.lower(clients[0], *server).compile()),
    )


def two_devices(job: Job) -> Worker:
    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = jax.make_mesh((WORKERS,), ("clients",), (jax.sharding.AxisType.Auto,))
    jax.set_mesh(mesh)
    return diloco(job, mesh)


WAYS = {"drjax, one device": diloco, "drjax, two devices": two_devices}


if __name__ == "__main__":
    local_problem.work(WAYS)
