"""Three processes train with local steps, one of them is killed, and the others finish.

    python examples/elastic.py         # on one machine: a quarter of a minute

Each process holds a third of the data and steps alone. QSR says after which steps the living
processes average. On a cluster, start this loop once per process, with the address of process 0.
"""

import os
import signal
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from syncopate import local_opt

PROCESSES, UNITS, BATCH, STEPS, DIES = 3, 20, 8, 400, 150
HEARTBEAT, TIMEOUT = 5, 120.0  # seconds


def data_of(process):
    """[UNITS, BATCH, 4] inputs and [UNITS, BATCH] targets of one process."""
    draw = np.random.default_rng(process)
    x = draw.normal(size=(UNITS, BATCH, 4)).astype(np.float32)
    return x, x @ np.arange(4, dtype=np.float32) + draw.normal(size=(UNITS, BATCH)).astype("f")


def train(process, address):
    jax.config.update("jax_enable_recoverability", True)  # a death does not end the others
    jax.distributed.initialize(
        address,
        PROCESSES,
        process,
        heartbeat_timeout_seconds=HEARTBEAT,
        coordinator_bind_address=address,  # by default the coordinator listens at all addresses
    )
    rate = optax.cosine_decay_schedule(0.02, STEPS)
    plan = local_opt.qsr(rate, total_steps=STEPS, alpha=0.06, h_base=20)
    rounds = local_opt.local_rounds(optax.sgd(rate, momentum=0.9))
    elastic = local_opt.elastic.ElasticSync(rounds.sync, timeout=TIMEOUT)
    here = jax.sharding.Mesh(jax.local_devices(), ("worker",))  # of this process alone
    inputs, targets = data_of(process)

    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(params)
        updates, state = rounds.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(
        local_opt.map_workers(
            step,
            here,
            in_specs=("worker", "worker", "replicated", "replicated"),
            out_specs="worker",
        )
    )
    params, state = local_opt.replicate((jnp.zeros(4), rounds.init(jnp.zeros(4))), here)
    for t in range(STEPS):
        unit = t % UNITS
        params, state, loss = step(params, state, inputs[unit], targets[unit])
        if (process, t) == (2, DIES):
            os.kill(os.getpid(), signal.SIGKILL)
        if plan.syncs_after(t):
            params, state = elastic(t + 1, params, state)
            if process == 0:
                numbers = " ".join(f"{x:.6f}" for x in np.asarray(params)[0])
                print(t + 1, *elastic.members.processes, f"loss {loss[0]:.4f} params {numbers}")
    elastic.shutdown(STEPS)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), sys.argv[2])
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, __file__]
        environ = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}  # one device each
        environ["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
        started = [
            subprocess.Popen([*command, str(i), address], env=environ) for i in range(PROCESSES)
        ]
        print("exit codes", *(process.wait() for process in started))
