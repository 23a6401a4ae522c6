"""Those that live average on, and one that comes back takes over what they have."""

import functools
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from benchmarks import survivors as kills
from local_opt import survivors

ROOT = pathlib.Path(__file__).resolve().parents[2]
GLOO = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def environment():
    return os.environ | GLOO | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def example():
    """Started first: while its heartbeats are waited for, other tests wait for theirs."""
    command = [sys.executable, str(ROOT / "examples" / "survivors.py")]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, env=environment(), **pipes) as started:
        yield started


def test_one_that_is_new_takes_all_from_the_first_that_is_not_and_weighs_nothing():
    mesh = jax.make_mesh((4,), ("worker",), devices=jax.devices()[:4])
    optimizer, keys = optax.sgd(0.1, momentum=0.9), jax.random.split(jax.random.key(3), 4)
    rounds = local_opt.local_rounds(optimizer, outer=optax.sgd(0.7, momentum=0.5))
    params = jnp.array([jnp.nan, 2.0, 4.0, 9.0])  # of new ones: whatever it is
    state = jax.vmap(rounds.init)(params)
    state = state._replace(since=jnp.array([0, 20, 20, 0]), anchor=jnp.array([5.0, 1, 1, 7]))
    order = {"current": jnp.array([[1, 0], [0, 1], [1, 0], [0, 1]]), "seen": params > 3}
    weight = jnp.array([0.0, 1.0, 1.0, 0.0])

    def sync(params, state, order, key, weight):
        params, state, order, key = survivors.taken_over((params, state, order, key), [1, 0, 0, 1])
        return *rounds.sync(params, state, weight=weight), order, key

    specs = {"in_specs": "worker", "out_specs": "worker"}
    for over in (4, mesh):  # simulated, and on devices
        found = jax.jit(local_opt.map_workers(sync, over, **specs))(
            params, state, order, keys, weight
        )
        params_of, state_of, order_of, key_of = found
        # The mean of 2 and 4 is 3, the change since the anchor 1 - 3, the outer rate 0.7.
        np.testing.assert_allclose(params_of, np.full(4, 1 + 0.7 * 2), rtol=1e-6)
        np.testing.assert_array_equal(state_of.anchor, params_of)
        np.testing.assert_array_equal(order_of["current"], [[0, 1], [0, 1], [1, 0], [0, 1]])
        np.testing.assert_array_equal(order_of["seen"], [False, False, True, False])
        data = np.asarray(jax.random.key_data(key_of))
        np.testing.assert_array_equal(data[1:3], jax.random.key_data(keys)[1:3])
        assert len(np.unique(data, axis=0)) == 4


def test_one_process_meets_itself_as_a_plain_sync_would():
    """With weights and compressors; what is compiled for the same workers is compiled once."""
    rounds = local_opt.local_rounds(optax.sgd(0.1), compress=local_opt.quantize("int8"))
    alone, count = local_opt.Survivors(rounds.sync), jax.local_device_count()
    first = jnp.arange(300.0)
    own = local_opt.replicate((first, rounds.init(first)), count)
    own = (own[0] * jnp.arange(1, count + 1)[:, None], own[1])
    weight = jnp.arange(1.0, count + 1)
    plain = jax.vmap(lambda x, s, w: rounds.sync(x, s, weight=w), axis_name="worker")
    expected = jax.jit(plain)(*own, weight)
    for step in (20, 40):
        found = alone(step, *own, weight=weight)
        near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
        jax.tree.map(near, found, expected)
        assert alone.met.step == step and alone.met.living == (0,)
    assert len(alone.compiled) == 1 and not alone.came_back
    alone.leave(40)  # a single process holds no service


MEETS = """
import json, os, sys, time, jax, local_opt
number, address, steps = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize(
    address, 2, number, heartbeat_timeout_seconds=3, coordinator_bind_address=address)
survivors = local_opt.Survivors(lambda p, s: (p, s))
for step in steps:
    if step == "die":
        os._exit(1)
    if step == "tell":
        print("up", flush=True)
    elif step == "wait":
        sys.stdin.readline()
    else:
        met = survivors.meet(int(step))
        print(json.dumps([met.step, met.living, met.new, survivors.came_back]), flush=True)
survivors.leave(int(steps[-1]))
"""


@pytest.fixture
def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def meeting(number, port, *steps):
    command = [sys.executable, "-c", MEETS, str(number), f"127.0.0.1:{port}", *steps]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=environment(), text=True, **pipes)


@pytest.mark.usefixtures("example")
def test_one_that_comes_back_is_known_as_new_and_gets_the_step_of_the_others(free_port):
    """No collective runs, as gloo cannot take a process back; who meets is what backends share."""
    first = meeting(0, free_port, "20", "40", "wait", "60", "80")
    other = meeting(1, free_port, "20", "die")
    assert json.loads(other.communicate(timeout=300)[0]) == [20, [0, 1], [], False]
    lines = [json.loads(first.stdout.readline()) for _ in range(2)]
    again = meeting(1, free_port, "tell", "0", "80")
    assert again.stdout.readline() == "up\n"
    lines += [*map(json.loads, first.communicate("go\n", timeout=300)[0].splitlines())]
    back = [*map(json.loads, again.communicate(timeout=300)[0].splitlines())]
    assert first.returncode == again.returncode == 0
    met = [[20, [0, 1], []], [40, [0], []], [60, [0, 1], [1]], [80, [0, 1], []]]
    assert lines == [[*meeting, False] for meeting in met]
    assert back == [[*meeting, True] for meeting in met[2:]]


def test_a_wait_ends_and_names_who_is_late(monkeypatch):
    """And its thread, which nothing can end, does not keep the process."""
    places, came = {f"{survivors.PLACES}/1": "20"}, threading.Event()
    client = types.SimpleNamespace(
        key_value_set=lambda key, step, **how: places.update({key: step}),
        key_value_dir_get=lambda name: list(places.items()),
        get_live_nodes=lambda nodes: came.wait() and dict.fromkeys(nodes, 0),
    )
    monkeypatch.setattr(survivors, "coordination_client", lambda: client)
    waits, before = local_opt.Survivors(lambda p, s: (p, s), patience=0.1), threading.enumerate()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    told = r"process 0 after step 40 has waited 0.1 s for process 1 \(last met after step 20\)"
    with pytest.raises(TimeoutError, match=told):
        waits.meet(40)
    (thread,) = set(threading.enumerate()) - set(before)
    assert thread.daemon
    came.set()


def test_the_example_goes_on_without_the_process_that_it_kills(example):
    """Its numbers are those of a loop in NumPy that drops the dead worker."""
    told, errors = example.communicate(timeout=600)
    assert "exit codes 0 0 -9" in told, errors[-3000:]
    line = re.compile(r"^(\d+) ([\d ]+) loss (\S+) params (.*)$", re.M)
    found = line.findall(told)
    dead = next(i for i, (step, *_) in enumerate(found) if int(step) > 150)
    assert [living for _, living, *_ in found] == dead * ["0 1 2"] + (len(found) - dead) * ["0 1"]
    x, y, w, speed = {}, {}, {}, {}
    for n in range(3):
        draw = np.random.default_rng(n)
        x[n] = draw.normal(size=(20, 8, 4))
        y[n] = x[n] @ np.arange(4) + draw.normal(size=(20, 8))
        w[n], speed[n] = np.zeros(4), np.zeros(4)
    ends, params = {int(step): numbers for step, _, _, numbers in found}, {}
    assert 400 in ends and len(ends) == len(found)
    for t in range(400):
        for n in list(w):
            grad = 2 * x[n][t % 20].T @ (x[n][t % 20] @ w[n] - y[n][t % 20]) / 8
            speed[n] = 0.9 * speed[n] + grad
            w[n] = w[n] - 0.01 * (1 + np.cos(np.pi * t / 400)) * speed[n]
        if t == 150:
            del w[2]
        if t + 1 in ends:
            mean = np.mean([*w.values()], axis=0)
            w, params[t + 1] = dict.fromkeys(w, mean), mean
    for step, numbers in ends.items():
        np.testing.assert_allclose([*map(float, numbers.split())], params[step], atol=2e-5)


def test_processes_that_would_end_together_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="call jax.config.update.*, True. before"):
        local_opt.Survivors(lambda p, s: (p, s))
    with pytest.raises(ValueError, match="patience is 0"):
        local_opt.Survivors(lambda p, s: (p, s), patience=0)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("count,deaths", [(3, 1), (4, 2)])
def test_twelve_kills(count, deaths, inside):
    command = [sys.executable, "-m", "benchmarks.survivors", f"--processes={count}"]
    command += [f"--deaths={deaths}", *["--inside"] * inside]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert not done.returncode, done.stdout + done.stderr[-3000:]
    assert f"{12} of {12} runs as they should be" in done.stdout


def test_a_simulation_drops_the_dead():
    """By hand: two workers without momentum, one step each, then one of them alone."""
    found = kills.simulated({1: (0, 1), kills.STEPS: (0,)})
    (x, y), (v, z) = (kills.data_of(n) for n in range(2))
    mean = sum(2 * a[0].T @ b[0] / 8 for a, b in ((x, y), (v, z))) / 2
    np.testing.assert_allclose(found[1], 0.7 * kills.RATE * mean, rtol=1e-5)
