"""Kills processes that train with local steps, and checks what the others compute afterwards.

    python -m benchmarks.elastic --processes=3 --deaths=1           # twelve runs: two minutes
    python -m benchmarks.elastic --processes=4 --deaths=2
    python -m benchmarks.elastic --processes=3 --deaths=1 --inside  # in the middle of a sync
    python -m benchmarks.elastic --processes=3 --cost               # milliseconds of a sync

SIGKILL comes at a random moment between two syncs. The parameters of the others are compared with a
loop in NumPy that leaves out the dead from the first sync without them. With --inside it comes in
the middle of a sync, which is made long on purpose, and ends the run. The command is then repeated
from the last checkpoint, in turns with all processes and with those that are left.
"""

import argparse
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

UNITS, SIZE, STEPS, PERIOD, RATE, OUTER, MOMENTUM = 10, 4, 400, 20, 0.02, 0.7, 0.5
HEARTBEAT, TIMEOUT, SECONDS = 5, 60.0, 0.005  # SECONDS: of a step, at least


def data_of(process):
    draw = np.random.default_rng(process)
    x = draw.normal(size=(UNITS, 8, SIZE)).astype(np.float32)
    return x, (x.sum(2) * (process + 1)).astype(np.float32)


def train(process, count, address, folder, long):
    import jax
    import jax.numpy as jnp
    import optax

    import local_opt

    jax.config.update("jax_enable_recoverability", True)
    options = {"heartbeat_timeout_seconds": HEARTBEAT, "coordinator_bind_address": address}
    jax.distributed.initialize(address, count, process, **options)
    inner = optax.sgd(optax.cosine_decay_schedule(RATE, STEPS), momentum=MOMENTUM)
    rounds = local_opt.local_rounds(inner, outer=optax.sgd(OUTER, momentum=MOMENTUM))
    rule = optax.cosine_decay_schedule(RATE, STEPS)
    plan = local_opt.qsr(rule, total_steps=STEPS, alpha=0.07, h_base=PERIOD)

    def sync(params, state):
        again = lambda _, x: jax.lax.pmean(x, "worker")  # noqa: E731
        return rounds.sync(params + 0 * jax.lax.fori_loop(0, long, again, params), state)

    def counted(params, state):
        programs.append(1)  # while it is traced
        return (sync if long else rounds.sync)(params, state)

    programs = []

    elastic = local_opt.elastic.ElasticSync(counted, timeout=TIMEOUT)
    here = jax.sharding.Mesh(jax.local_devices(), ("worker",))

    def step(params, state, x, y):
        grads = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(params)
        updates, state = rounds.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = local_opt.map_workers(
        step, here, in_specs=("worker", "worker", "replicated", "replicated"), out_specs="worker"
    )
    step, start, (x, y) = jax.jit(step), 0, data_of(process)
    first = jnp.zeros(SIZE)
    trees = local_opt.replicate((first, rounds.init(first)), here)
    saved = [*folder.glob("*.npz")]
    whole = [
        s
        for s in {int(p.stem.split("_")[0]) for p in saved}
        if all(folder / f"{s}_{n}.npz" in saved for n in range(count))
    ]
    if whole:
        start, leaves = max(whole), jax.tree.leaves(trees)
        with np.load(folder / f"{start}_{process}.npz") as arrays:
            places = [leaf.sharding for leaf in leaves]
            leaves = [*map(jax.device_put, arrays.values(), places)]
        trees = jax.tree.unflatten(jax.tree.structure(trees), leaves)
    record = open(folder / f"records_{process}", "a", buffering=1)  # noqa: SIM115
    for t in range(start, STEPS):
        trees = step(*trees, x[t % UNITS], y[t % UNITS])
        time.sleep(SECONDS)
        if plan.syncs_after(t):
            (folder / f"at_{process}").write_text(str(t + 1))
            trees = elastic(t + 1, *trees)
            row = {"step": t + 1, "members": elastic.members.processes, "plan": plan.digest()}
            row |= {"params": np.asarray(trees[0])[0].tolist(), "time": time.time()}
            record.write(json.dumps(row | {"programs": len(programs)}) + "\n")
            np.savez(folder / f"{t + 1}_{process}_", *map(np.asarray, jax.tree.leaves(trees)))
            os.replace(folder / f"{t + 1}_{process}_.npz", folder / f"{t + 1}_{process}.npz")
    elastic.shutdown(STEPS)


def cost(process, count, address, size, turns=40):
    """Prints the milliseconds of a sync of all processes, and of the same without `ElasticSync`."""
    import jax
    import jax.numpy as jnp

    import local_opt
    from syncopate.unstable import multihost_utils

    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(address, count, process, coordinator_bind_address=address)
    sync = lambda x: (local_opt.pmean(x),)  # noqa: E731
    elastic, x, times = (
        local_opt.elastic.ElasticSync(sync),
        jnp.ones((1, size)),
        {True: [], False: []},
    )
    (x,) = elastic(0, x)
    mesh = elastic.members.mesh
    plain = jax.jit(local_opt.map_workers(sync, mesh, in_specs="worker", out_specs="worker"))
    whole = multihost_utils.host_local_array_to_global_array(x, mesh, jax.P("worker"))
    for turn in range(2 * turns):
        begun = time.perf_counter()
        if turn % 2:
            (x,) = elastic(turn, x)
        else:
            (whole,) = jax.block_until_ready(plain(whole))
        times[bool(turn % 2)].append(1e3 * (time.perf_counter() - begun))
    if not process:
        with_it, without = (np.percentile(times[k][4:], [50, 25, 75]) for k in (True, False))
        form = "{:.2f} ms ({:.2f} to {:.2f})"
        print(f"{size:,} numbers: {form.format(*with_it)} with, {form.format(*without)} without")
    elastic.shutdown(2 * turns)


def simulated(members: dict[int, tuple[int, ...]]) -> dict[int, np.ndarray]:
    """{step of a sync: parameters}, in NumPy, for {step of a sync: who took part}."""
    everyone = sorted(max(members.values(), key=len))
    data = {n: [z.astype(np.float64) for z in data_of(n)] for n in everyone}
    w, speed = ({n: np.zeros(SIZE) for n in everyone} for _ in range(2))
    anchor, outer, means = np.zeros(SIZE), np.zeros(SIZE), {}
    for t in range(STEPS):
        for n in w:
            x, y = data[n][0][t % UNITS], data[n][1][t % UNITS]
            speed[n] = MOMENTUM * speed[n] + 2 * x.T @ (x @ w[n] - y) / len(y)
            w[n] = w[n] - RATE * (1 + np.cos(np.pi * t / STEPS)) / 2 * speed[n]
        if t + 1 in members:
            mean = sum(w[n] for n in members[t + 1]) / len(members[t + 1])
            outer = MOMENTUM * outer + (anchor - mean)
            anchor = anchor - OUTER * outer
            w, speed = {n: anchor for n in members[t + 1]}, {n: speed[n] for n in members[t + 1]}
            means[t + 1] = anchor
    return means


def started(count, folder, long=0, size=0):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "benchmarks.elastic", f"--folder={folder}"]
    command += [f"--processes={count}", f"--address={address}", f"--long={long}", f"--size={size}"]
    out = open(folder / "output", "a")  # noqa: SIM115
    return [
        subprocess.Popen([*command, f"--process={n}"], env=os.environ | gloo, stderr=out)
        for n in range(count)
    ]


def records_of(folder, processes):
    """{step: record}; raises AssertionError unless the processes have recorded the same."""
    each = [
        {r["step"]: r for r in map(json.loads, (folder / f"records_{n}").open())} for n in processes
    ]
    for step, record in each[0].items():
        for other in each[1:]:
            if step in other and record["members"] == other[step]["members"]:
                assert other[step]["params"] == record["params"], (step, record, other[step])
    assert len({record["plan"] for record in each[0].values()}) == 1
    return each[0]


def check(folder, left):
    """The largest relative difference to the simulation, and the sync that waited."""
    recorded = records_of(folder, left)
    members = {step: tuple(record["members"]) for step, record in recorded.items()}
    wanted = simulated(members)
    assert max(recorded) == STEPS and members[STEPS] == tuple(left), members
    off = [
        np.max(np.abs(r["params"] - wanted[s]) / np.abs(wanted[s]).max())
        for s, r in recorded.items()
    ]  # noqa: E501
    times = [record["time"] for record in recorded.values()]
    return max(off), max(np.diff(times)), len(recorded)


def wait_for(path, step):
    until = time.monotonic() + 5 * TIMEOUT
    while not path.exists() or int(path.read_text() or 0) < step:
        assert time.monotonic() < until, path
        time.sleep(0.005)


def killed(count, deaths, draw):
    """One run with kills between two syncs; False if a kill came inside a sync, which ends it."""
    left = range(count - deaths)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        running = started(count, folder)
        wait_for(folder / "at_0", 2 * PERIOD)
        for n in range(count - deaths, count):
            time.sleep(draw.uniform(0.05, 0.6))
            running[n].kill()
        codes = [p.wait() for p in running]
        if "has lost processes" in (folder / "output").read_text():
            print(f"exit codes {codes}: a kill came inside a sync, again")
            return False
        off, longest, syncs = check(folder, left)
        print(f"exit codes {codes}, {syncs} syncs, off by {off:.1e}, longest {longest:.1f} s")
        assert codes[: len(left)] == [0] * len(left) and off < 1e-4
        return True


def killed_inside(count, deaths, draw, fewer):
    """A run that a kill inside a sync ends, and another that goes on from its checkpoint.

    False if the kill came before the sync or after it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        running = started(count, folder, long=2000)
        at = int(draw.integers(2, 6)) * PERIOD
        for n in range(count):
            wait_for(folder / f"at_{n}", at)
        time.sleep(draw.uniform(0.1, 0.2))
        for n in range(count - deaths, count):
            running[n].kill()
        begun = time.monotonic()
        codes = [p.wait() for p in running]
        seconds, text = time.monotonic() - begun, (folder / "output").read_text()
        named = text.count("has lost processes") + text.count("has waited")
        if not named:
            print(f"exit codes {codes}: a kill came between two syncs, again")
            return False
        left = count - deaths if fewer else count
        again = [p.wait() for p in started(left, folder)]
        off, _, syncs = check(folder, range(left))
        print(
            f"exit codes {codes} after {seconds:.1f} s, {named} named it; again with {left} "
            f"processes: {again}, {syncs} syncs, off by {off:.1e}"
        )
        assert 0 not in codes and again == [0] * left and off < 1e-4
        return True


def main(options):
    draw = np.random.default_rng(0)
    for size in (10**3, 10**6) if options.cost else ():
        with tempfile.TemporaryDirectory() as name:
            codes = [p.wait() for p in started(options.processes, pathlib.Path(name), size=size)]
            assert not any(codes), codes
    for number in range(0 if options.cost else options.runs):
        if options.inside:
            run = functools.partial(killed_inside, fewer=number % 2)
        else:
            run = killed
        while not run(options.processes, options.deaths, draw):
            pass
    if not options.cost:
        print(f"{options.runs} of {options.runs} runs as they should be")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    numbers = {"processes": 3, "deaths": 1, "runs": 12, "process": None, "long": 0, "size": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--folder", type=pathlib.Path)
    parser.add_argument("--address")
    given = parser.parse_args()
    if given.process is None:
        main(given)
    elif given.size:
        cost(given.process, given.processes, given.address, given.size)
    else:
        train(given.process, given.processes, given.address, given.folder, given.long)
