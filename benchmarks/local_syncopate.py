"""Local steps by `local_opt.local_rounds`, with plain averaging and as DiLoCo.

`python -m benchmarks.local_syncopate` is a process of one worker or of both, which `local_steps`
starts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import local_opt
from benchmarks import local_problem
from benchmarks.local_problem import MOMENTUM, RATE, WORKERS, Job, Worker
from experiments.distributed.devices import worker_mesh, worker_sharding

INNER = optax.sgd(RATE, momentum=MOMENTUM)
OUTER = optax.sgd(local_problem.OUTER_RATE, momentum=local_problem.OUTER_MOMENTUM, nesterov=True)


def loss_of(params, x, y):
    """The mean cross-entropy of a perceptron with tanh."""
    pairs = list(zip(params[::2], params[1::2], strict=True))
    for w, b in pairs[:-1]:
        x = jnp.tanh(x @ w + b[None])
    out = jax.nn.log_softmax(x @ pairs[-1][0] + pairs[-1][1][None])
    return -jnp.mean(jnp.take_along_axis(out, y[:, None], axis=1))


def step_of(update):
    """`(params, state, x, y) -> (params, state)`, by an optimizer's update."""

    def step(params, state, x, y):
        updates, state = update(jax.grad(loss_of)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    return step


def plain_of(job: Job):
    """`x, y -> state` of steps by the optimizer alone, of all workers of this process."""
    step = step_of(INNER.update)
    many = len(job.workers)
    run = jax.jit(jax.vmap(step), donate_argnums=(0, 1))
    params = [jnp.stack([x] * many) for x in local_problem.start(job.widths)]
    held = [params, jax.vmap(INNER.init)(params)]

    def call(x, y):
        held[:] = run(*held, x, y)

    return call, held


def bytes_of(compiled) -> int:
    """Arguments, outputs that are not arguments, and temporaries of a compiled call."""
    memory = compiled.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + made + memory.temp_size_in_bytes


def rounds(job: Job, outer, mesh) -> Worker:
    """Workers on a mesh, or simulated on one device."""
    workers = mesh or WORKERS
    made = local_opt.local_rounds(INNER, outer=outer)
    mapped = functools.partial(local_opt.map_workers, workers=workers)
    step = mapped(step_of(made.update), in_specs="worker", out_specs="worker")
    sync = mapped(made.sync, in_specs="worker", out_specs="worker")
    step, sync = (jax.jit(call, donate_argnums=(0, 1)) for call in (step, sync))
    params = local_opt.replicate([jnp.asarray(x) for x in local_problem.start(job.widths)], workers)
    held = [params, jax.jit(mapped(made.init, in_specs="worker", out_specs="worker"))(params)]
    plain, other = plain_of(job)
    sharding = worker_sharding(mesh)

    def place(x, y):
        given = jnp.asarray(x), jnp.asarray(y, jnp.int32)
        if mesh is None:
            return (*given, *given)
        return (*given, *(jax.make_array_from_process_local_data(sharding, a) for a in (x, y)))

    def take(given):
        held[:] = step(*held, *given[2:])

    def rest(last):
        if last:
            held[:] = sync(*held)

    return Worker(
        place=place,
        plain=lambda given: plain(*given[:2]),
        step=take,
        rest=rest,
        wait=lambda: jax.block_until_ready((held, other)),
        params=lambda: [np.asarray(x.addressable_shards[0].data[0]) for x in held[0]],
        compiled=lambda: bytes_of(sync.lower(*held).compile()),
    )


def two_processes(job: Job, outer=None) -> Worker:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{job.port}", WORKERS, job.rank)
    return rounds(job, outer, worker_mesh(WORKERS))


def two_devices(job: Job) -> Worker:
    jax.config.update("jax_num_cpu_devices", WORKERS)
    return rounds(job, OUTER, worker_mesh(WORKERS))


WAYS = {
    "local_rounds": two_processes,
    "local_rounds, DiLoCo": functools.partial(two_processes, outer=OUTER),
    "local_rounds, one device": functools.partial(rounds, outer=OUTER, mesh=None),
    "local_rounds, two devices": two_devices,
}


if __name__ == "__main__":
    local_problem.work(WAYS)
