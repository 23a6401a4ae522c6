"""Those that live average on, and one that comes back takes over what they have."""

import concurrent.futures
import functools
import json
import operator
import os
import pathlib
import re
import socket
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import local_opt
from benchmarks import elastic as kills
from local_opt import corrections, elastic
from tests.plain_loop import Mean, history

ROOT = pathlib.Path(__file__).resolve().parents[2]
GLOO = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def environment():
    return os.environ | GLOO | {"PYTHONPATH": str(ROOT)}


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
        params, state, order, key = elastic.taken_over((params, state, order, key), [1, 0, 0, 1])
        return *rounds.sync(params, state, weight=weight), order, key

    specs = {"in_specs": "worker", "out_specs": "worker"}
    for over in (4, mesh):  # simulated, and on devices
        run = jax.jit(local_opt.map_workers(sync, over, **specs))
        result = run(params, state, order, keys, weight)
        params_of, state_of, order_of, key_of = result
        # The mean of 2 and 4 is 3, the change since the anchor 1 - 3, the outer rate 0.7.
        np.testing.assert_allclose(params_of, np.full(4, 1 + 0.7 * 2), rtol=1e-6)
        np.testing.assert_array_equal(state_of.anchor, params_of)
        np.testing.assert_array_equal(order_of["current"], [[0, 1], [0, 1], [1, 0], [0, 1]])
        np.testing.assert_array_equal(order_of["seen"], [False, False, True, False])
        data = np.asarray(jax.random.key_data(key_of))
        np.testing.assert_array_equal(data[1:3], jax.random.key_data(keys)[1:3])
        assert len(np.unique(data, axis=0)) == 4


def here():
    return jax.sharding.Mesh(jax.local_devices(), ("worker",))


def test_one_process_syncs_itself_as_a_plain_sync_would():
    """With weights and compression; what is compiled for the same members is compiled once."""
    traces, rounds = [], local_opt.local_rounds(optax.sgd(0.1), compress=local_opt.quantize("int8"))

    def sync(params, state, weight=None):
        traces.append(1)
        return rounds.sync(params, state, weight=weight)

    alone, count = local_opt.elastic.ElasticSync(sync), jax.local_device_count()
    first, weight = jnp.arange(300.0), jnp.arange(1.0, count + 1)
    copies = local_opt.replicate((first, rounds.init(first)), count)
    copies = (copies[0] * jnp.arange(1, count + 1)[:, None], copies[1])
    plain = jax.vmap(lambda x, s, w: rounds.sync(x, s, weight=w), axis_name="worker")
    expected = jax.jit(plain)(*copies, weight)
    for step in (20, 40):
        given = jax.device_put(copies, jax.NamedSharding(here(), jax.P("worker")))
        actual = alone(step, *given, weight=weight)
        near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
        jax.tree.map(near, actual, expected)
        assert alone.members == local_opt.elastic.Members(step, (0,), (0,))
        donated = given[0], given[1].anchor, given[1].residual
        assert all(x.is_deleted() for x in donated)
    assert len(traces) == 1 and not alone.rejoined
    alone.shutdown(40)  # a single process holds no service


def test_a_sync_is_compiled_in_the_contexts_of_the_call():
    """Types of 64 bits, and the precision of products, which a thread would not have."""
    x = jax.device_put(
        np.ones((jax.device_count(), 2, 2)), jax.NamedSharding(here(), jax.P("worker"))
    )
    seen = []

    def sync(x):
        seen.append((x.dtype, jax.config.jax_default_matmul_precision))
        return (local_opt.pmean(x @ x),)

    elastic = local_opt.elastic.ElasticSync(sync, donate=False)
    with jax.enable_x64(True):
        wide = jax.device_put(np.full(x.shape, 1 + 1e-12), x.sharding)
        (result,) = elastic(1, wide)
        assert result.dtype == jnp.float64 and result[0, 0, 0] != result.astype("f")[0, 0, 0]
    with jax.default_matmul_precision("highest"):
        elastic(2, x), elastic(3, x)
    elastic(4, x)
    assert seen == [("float64", None), ("float32", "highest"), ("float32", None)]


def test_what_fails_in_a_sync_is_raised_as_it_is():
    """No process is gone: one process, and a callback of its user."""
    x = jax.device_put(np.ones((jax.device_count(), 2)), jax.NamedSharding(here(), jax.P("worker")))

    def fails(x):
        raise RuntimeError("the disk of the callback is full")

    callback = lambda x: (jax.pure_callback(fails, x, x),)  # noqa: E731
    with pytest.raises(Exception, match="the disk of the callback is full") as caught:
        local_opt.elastic.ElasticSync(callback, donate=False)(1, x)
    assert "lost" not in str(caught.value) and not hasattr(caught.value, "__notes__")
    for wrong, match in (
        (lambda x: x, "return a tuple of as many trees"),
        (lambda x: (x, x), "sync returns"),
    ):
        with pytest.raises(ValueError, match=match):
            local_opt.elastic.ElasticSync(wrong)(1, jnp.copy(x))
    with pytest.raises(ValueError, match=r"\[8, ...\]"):
        local_opt.elastic.ElasticSync(lambda x: (x,))(1, x[:3])


class Coordinator:
    """Stands in for JAX's, with threads as processes; `get_live_nodes` waits for all alive."""

    def __init__(self, members):
        self.store, self.members, self.asked = {}, dict(members), {}
        self.lock, self.calls = threading.Condition(), []

    def client(self, process):
        return types.SimpleNamespace(
            key_value_set=lambda key, text, allow_overwrite: self.call(process, key, text),
            key_value_dir_get=lambda folder: [*self.store.items()],
            get_live_nodes=lambda nodes: self.call(process),
        )

    def call(self, process, *item):
        with self.lock:
            self.calls.append((process, "set" if item else "ask"))
            if item:
                self.store.update([item])
                return None
            turn = self.asked.setdefault(process, 0)
            self.asked[process] += 1
            came = lambda: all(self.asked.get(n, 0) > turn for n in self.members)  # noqa: E731
            self.lock.notify_all()
            assert self.lock.wait_for(came, 20)
            return dict(self.members)

    def change(self, members):
        with self.lock:
            self.members, turn = dict(members), max(self.asked.values(), default=0)
            self.asked = dict.fromkeys(members, turn)
            self.lock.notify_all()

    def barrier(self, members, steps, sync=0):
        """What each of the processes that come with a step finds, or its error."""
        with concurrent.futures.ThreadPoolExecutor(len(steps)) as pool:
            tasks = {n: pool.submit(members[n].barrier, step, sync) for n, step in steps.items()}
        return [task.exception() or task.result() for task in tasks.values()]


def memberships(coordinator, processes, count=3):
    return {n: elastic.Membership(coordinator.client(n), n, count) for n in processes}


def test_members_are_those_that_live_and_one_that_comes_back_is_known():
    coordinator = Coordinator({0: 7, 1: 8, 2: 9})
    members = memberships(coordinator, range(3))
    assert not any(m.restarted for m in members.values())
    everyone = local_opt.elastic.Members(20, (0, 1, 2), (7, 8, 9))
    assert coordinator.barrier(members, dict.fromkeys(range(3), 20)) == 3 * [everyone]
    coordinator.calls.clear()
    for step in (40, 60):  # where nothing has changed: one key and one barrier
        result = coordinator.barrier(members, dict.fromkeys(range(3), step))
        assert result == 3 * [everyone._replace(step=step)]
    assert sorted(coordinator.calls) == sorted(
        2 * [*((n, c) for n in range(3) for c in ("ask", "set"))]
    )
    coordinator.change({0: 7, 2: 9})
    result = coordinator.barrier(members, {0: 80, 2: 80})
    assert result == 2 * [local_opt.elastic.Members(80, (0, 2), (7, 9))]
    coordinator.change({0: 7, 1: 12, 2: 9})  # another incarnation of 1, at whatever step
    members |= memberships(coordinator, [1])
    assert members[1].restarted
    result = coordinator.barrier(members, {0: 100, 1: 0, 2: 100})
    back = local_opt.elastic.Members(100, (0, 1, 2), (7, 12, 9), (1,))
    assert result == 3 * [back]
    for member in members.values():
        member.admit(0)
    for sync, rejoined in ((0, ()), (1, (1,)), (0, ())):  # another sync has yet to admit it
        result = coordinator.barrier(members, dict.fromkeys(range(3), 120), sync)
        assert result == 3 * [back._replace(step=120, rejoined=rejoined)]


def test_one_that_dies_before_the_first_sync_is_known_when_it_comes_back():
    coordinator = Coordinator({0: 7, 1: 8, 2: 9})
    members = memberships(coordinator, range(3))
    coordinator.change({0: 7, 1: 12, 2: 9})
    members |= memberships(coordinator, [1])
    result = coordinator.barrier(members, {0: 20, 1: 0, 2: 20})
    assert result == 3 * [local_opt.elastic.Members(20, (0, 1, 2), (7, 12, 9), (1,))]


@pytest.mark.parametrize("before", [0, 1, 3])
def test_other_steps_are_refused_at_every_barrier_by_all(before):
    coordinator = Coordinator({0: 7, 1: 8, 2: 9})
    members = memberships(coordinator, range(3))
    for step in range(before):
        coordinator.barrier(members, dict.fromkeys(range(3), step))
    for error in coordinator.barrier(members, {0: 20, 1: 20, 2: 25}):
        assert isinstance(error, ValueError)
        assert "after different steps, {0: 20, 1: 20, 2: 25}: give all one plan" in str(error)


def test_one_that_has_gone_on_is_read_at_the_step_that_it_left():
    coordinator = Coordinator({0: 7, 1: 8})
    members = memberships(coordinator, range(2), 2)
    coordinator.barrier(members, {0: 20, 1: 20})
    slow, real = threading.Event(), members[1].records
    members[1].records = lambda count=None: slow.wait(20) and real(count)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        waits = pool.submit(members[1].barrier, 40, 0)
        assert members[0].barrier(40, 0).step == 40
        ahead = pool.submit(members[0].barrier, 70, 0)  # has written, and waits
        while json.loads(coordinator.store[f"{elastic.RECORDS}/0"])[1][1] != 70:
            time.sleep(0.001)
        slow.set()
        assert waits.result() == local_opt.elastic.Members(40, (0, 1), (7, 8))
        assert pool.submit(members[1].barrier, 70, 0).result() == ahead.result()


def test_who_waited_long_asks_again(monkeypatch):
    """One may have died while the others waited for the last."""
    monkeypatch.setattr(elastic, "SPREAD", 0.05)
    coordinator = Coordinator({0: 7, 1: 8, 2: 9})
    members = memberships(coordinator, range(3))
    coordinator.barrier(members, dict.fromkeys(range(3), 20))
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = [pool.submit(members[n].barrier, 40, 0) for n in (0, 1)]
        time.sleep(0.1)
        pool.submit(members[2].barrier, 40, 0)  # comes late, and another barrier later it is dead
        while coordinator.asked != {0: 4, 1: 4, 2: 4}:
            time.sleep(0.001)
        assert [f.result().processes for f in first] == 2 * [(0, 1, 2)]
    assert coordinator.asked == {0: 4, 1: 4, 2: 4}


def test_process_0_that_was_stopped_does_not_go_on_alone(monkeypatch):
    """It holds the service, which counts all as dead that it has not heard while it was stopped."""
    coordinator = Coordinator({0: 7, 1: 8})
    members = memberships(coordinator, range(2), 2)
    coordinator.barrier(members, {0: 20, 1: 20})
    coordinator.change({0: 7})
    members[0].pause = 12.0
    with pytest.raises(RuntimeError, match="process 0 .* 12.0 s .*step 40"):
        members[0].barrier(40, 0)


MEETS = """
import json, os, sys, jax, jax.numpy as jnp, local_opt
number, address, steps = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
jax.config.update("jax_enable_recoverability", True)
jax.distributed.initialize(
    address, 2, number, heartbeat_timeout_seconds=3, coordinator_bind_address=address)
elastic = local_opt.elastic.ElasticSync(lambda x: (local_opt.pmean(x),))
for step in steps:
    if step == "die":
        os._exit(1)
    if step == "tell":
        print("up", flush=True)
    elif step == "wait":
        sys.stdin.readline()
    elif step in ("20", "40"):
        (mean,) = elastic(int(step), jnp.full((1, 3), number + 1.0))
        members = elastic.members
        print(json.dumps([members.step, members.processes, mean.tolist()]), flush=True)
    else:
        found = elastic.barrier(int(step))
        again = local_opt.elastic.ElasticSync(lambda p, s: (p, s))  # has not come back
        print(json.dumps([found.step, found.processes, found.rejoined, elastic.rejoined,
                          again.rejoined]), flush=True)
elastic.shutdown(int(steps[-1]))
"""


@pytest.fixture
def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launched(number, port, *steps):
    command = [sys.executable, "-c", MEETS, str(number), f"127.0.0.1:{port}", *steps]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    return subprocess.Popen(command, env=environment(), text=True, **pipes)


def printed(process, count):
    """The next lists that a process prints, between the lines of gloo."""
    lines = (line for line in process.stdout if not line.startswith("[Gloo]"))
    return [json.loads(next(lines)) for _ in range(count)]


def test_one_that_comes_back_is_known_as_new_and_gets_the_step_of_the_others(free_port):
    """A mean of two, then of the one that is left; gloo cannot take a process back into one."""
    first = launched(0, free_port, "20", "40", "wait", "60", "80")
    other = launched(1, free_port, "20", "die")
    together, alone = [20, [0, 1], [[1.5] * 3]], [40, [0], [[1.0] * 3]]
    assert printed(other, 1) == [together] and printed(first, 2) == [together, alone]
    other.communicate(timeout=300)
    again = launched(1, free_port, "tell", "0", "80")
    assert again.stdout.readline() == "up\n"
    first.stdin.write("go\n")
    first.stdin.flush()
    members = [[60, [0, 1], [1]], [80, [0, 1], [1]]]  # barriers admit nobody
    assert printed(first, 2) == [[*each, False, False] for each in members]
    assert printed(again, 2) == [[*each, True, False] for each in members]
    for process in (first, again):
        process.communicate(timeout=300)
    assert [process.returncode for process in (first, other, again)] == [0, 1, 0]


def test_a_wait_ends_and_names_who_is_late(monkeypatch):
    """It names a live process; the thread, which nothing can end, does not keep the process."""
    last, came = [[1, 10, 0.0], [2, 20, 0.0]], threading.Event()
    store = {f"{elastic.RECORDS}/{n}": json.dumps(last[: n + 1][-2:]) for n in (1,)}
    store[f"{elastic.RECORDS}/2"] = json.dumps([[0, 0, 0.0], [1, 10, 0.0]])  # has died since
    client = types.SimpleNamespace(
        key_value_set=lambda key, text, **how: store.update({key: text}),
        key_value_dir_get=lambda name: list(store.items()),
        get_live_nodes=lambda nodes: came.wait() and dict.fromkeys(nodes, 0),
    )
    membership = elastic.Membership(client, 0, 1)
    membership.last, membership.members = elastic.Record(2, 20), {0: 7, 1: 8}
    monkeypatch.setattr(elastic, "membership_of", lambda client: membership)
    waits, before = (
        elastic.ElasticSync(lambda p, s: (p, s), timeout=0.1),
        threading.enumerate(),
    )
    message = (
        r"process 0 after step 40 has waited 0.1 s for process 1 \(last seen after step 20\): look"
    )
    with pytest.raises(TimeoutError, match=message):
        waits.barrier(40)
    (thread,) = set(threading.enumerate()) - set(before)
    assert thread.daemon
    came.set()


@pytest.mark.parametrize(
    "lives,match",
    [
        ({0: 7, 1: 8}, "^boom"),
        ({0: 7}, r"process 0 after step 40 has lost processes \[1\] in a"),
        ({0: 7, 1: 9}, r"has lost processes \[1\] in a sync"),
        (None, "^boom"),
    ],
)
def test_only_where_one_is_gone_a_sync_says_so(monkeypatch, lives, match):
    monkeypatch.setattr(elastic, "ASKING", 0.1)
    waits = local_opt.elastic.ElasticSync(lambda x: (x,))
    who_lives = lambda: threading.Event().wait() if lives is None else lives  # noqa: E731
    waits._membership = types.SimpleNamespace(who_lives=who_lives)

    def fails(*args):
        raise RuntimeError("boom")

    program = types.SimpleNamespace(
        lower=lambda *args: types.SimpleNamespace(compile=lambda: fails)
    )
    with pytest.raises(RuntimeError, match=match) as caught:
        waits._run(program, local_opt.elastic.Members(40, (0, 1), (7, 8)))
    notes = getattr(caught.value, "__notes__", [])
    assert len(notes) == (lives is None) and all("one of which may be gone" in n for n in notes)


SCALE, TARGET, RATE, PERIOD = np.array([1.0, 2, 4, 1]), np.array([3, -1, 0.5, 10]), 0.1, 5


def scaffold_in_numpy(phases, length=60):
    """x and c_w - c after each phase, in which those workers take part: SCAFFOLD with its c_w."""
    x, variates, ends, before = 0.0, np.zeros(4), [], (0, 1, 2, 3)
    for workers in phases:
        x_of, new = list(workers), [w for w in workers if w not in before]
        if workers != before:
            variates[new] = 0
            stay = [w for w in x_of if w not in new]
        for turn in range(length):
            w = np.full(4, x)
            for _ in range(PERIOD):
                w = w - RATE * (SCALE * (w - TARGET) + variates)
            counted = stay if turn == 0 and workers != before else x_of
            if counted != x_of or (turn == 0 and workers != before):
                variates[counted] -= variates[counted].mean()
            x = w[counted].mean()
            variates[counted] += (w[counted] - x) / (PERIOD * RATE)
        before = workers
        ends.append((x, variates[x_of].copy()))
    return ends


def test_control_variates_add_up_to_nothing_over_those_that_live():
    """Workers converge to the optimum of the members, after a death and after a return."""
    rounds = local_opt.local_rounds(optax.sgd(RATE), correction=local_opt.corrections.scaffold())

    @jax.jit
    @functools.partial(jax.vmap, axis_name="worker")
    def steps(x, state, scale, target):
        for _ in range(PERIOD):
            updates, state = rounds.update(scale * (x - target), state, x, rate=RATE)
            x = x + updates
        return x, state

    @functools.partial(jax.jit, static_argnames="new")
    def sync(x, state, weight, new=None):
        def one(x, state, weight):
            x, state = (x, state) if new is None else elastic.admitted((x, state), weight, new)
            return rounds.sync(x, state, weight=weight)

        return jax.vmap(one, axis_name="worker")(x, state, weight)

    phases = [(0, 1, 2, 3), (0, 1, 2), (0, 1, 2, 3)]
    x = jnp.zeros(4)
    state = jax.vmap(rounds.init)(x)
    for workers, new, optimum, wanted in zip(
        phases,
        [None, (False,) * 3, (False,) * 3 + (True,)],
        [1.625, 3 / 7, 1.625],
        scaffold_in_numpy(phases),
        strict=True,
    ):
        local = np.array(workers)
        if len(x) < len(local):  # one that comes back has started afresh, at other numbers
            x, state = jax.tree.map(lambda y: jnp.concatenate([y, 0 * y[:1] + 7]), (x, state))
        x, state = jax.tree.map(operator.itemgetter(local), (x, state))
        for turn in range(60):
            x, state = steps(x, state, SCALE[local], TARGET[local])
            first = new is not None and turn == 0
            weight = jnp.where(jnp.array(new), 0.0, 1.0) if first and any(new) else None
            x, state = sync(x, state, weight, new=new if first else None)
        np.testing.assert_allclose(x, optimum, atol=1e-4)
        np.testing.assert_allclose(x, wanted[0], atol=1e-5)
        np.testing.assert_allclose(state.correction.variate, wanted[1], atol=1e-4)
        np.testing.assert_allclose(state.correction.variate.sum(), 0, atol=1e-4)


def test_control_variates_are_centred_under_the_weights_of_the_sync():
    state = corrections.ControlState(jnp.array([1.0, 2, 6, 9]), jnp.zeros(4))
    is_new, weight = jnp.array([False, False, False, True]), jnp.array([1.0, 2, 1, 0])
    centre = lambda state, new, weight: corrections.recentred(state, new, "worker", weight)  # noqa: E731
    result = jax.vmap(centre, axis_name="worker")(state, is_new, weight).variate
    np.testing.assert_allclose(result, [1 - 11 / 4, 2 - 11 / 4, 6 - 11 / 4, 0], rtol=1e-6)


def test_residuals_and_legacy_keys_of_one_that_comes_back_are_its_own():
    """W x + sum of residuals moves by what died alone; a key has one of three forms."""
    compress = local_opt.quantize("int4")
    rounds = local_opt.local_rounds(optax.sgd(0.1), compress=compress)
    x = jax.random.normal(jax.random.key(1), (3, 300))
    state = jax.vmap(rounds.init)(0 * x)
    x, state = jax.jit(jax.vmap(rounds.sync, axis_name="worker"))(x, state)
    keys = jnp.tile(jax.random.PRNGKey(4), (3, 1))
    trees = (x, state, keys, jnp.stack([keys, keys], 1), {"key": jax.random.wrap_key_data(keys)})
    admitted = functools.partial(elastic.admitted, rejoined=(False, False, True))
    admit = jax.jit(jax.vmap(admitted, axis_name="worker"))
    for weight in (None, jnp.array([1.0, 1, 0])):
        _, result, *keys_of = admit(trees, weight)
        assert np.abs(state.residual).max() > 1e-3
        np.testing.assert_array_equal(result.residual[:2], state.residual[:2])
        np.testing.assert_array_equal(result.residual[2], 0)
        for new, old in zip(jax.tree.leaves(keys_of), jax.tree.leaves(trees[2:]), strict=True):
            np.testing.assert_array_equal(
                *(
                    jax.random.key_data(k) if jnp.issubdtype(k.dtype, jax.dtypes.prng_key) else k
                    for k in (new[:2], old[:2])
                )
            )
            assert (new[2] != new[0]).all()


@pytest.mark.slow
def test_the_example_goes_on_without_the_process_that_it_kills():
    """Its numbers are those of a loop in NumPy that drops the dead worker."""
    command = [sys.executable, str(ROOT / "examples" / "elastic.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    text = done.stdout
    assert "exit codes 0 0 -9" in text, done.stderr[-3000:]
    line = re.compile(r"^(\d+) ([\d ]+) loss (\S+) params (.*)$", re.M)
    result = line.findall(text)
    dead = next(i for i, (step, *_) in enumerate(result) if int(step) > 150)
    assert [members for _, members, *_ in result] == dead * ["0 1 2"] + (len(result) - dead) * [
        "0 1"
    ]
    ends, data = {int(step): numbers for step, _, _, numbers in result}, []
    assert 400 in ends and len(ends) == len(result)
    for n in range(3):
        draw = np.random.default_rng(n)
        x = draw.normal(size=(20, 8, 4))
        data.append((x, x @ np.arange(4) + draw.normal(size=(20, 8))))

    def step(n, t, w, speed):
        x, y = (a[t % 20] for a in data[n])
        speed = 0.9 * speed + 2 * x.T @ (x @ w - y) / 8
        return w - 0.01 * (1 + np.cos(np.pi * t / 400)) * speed, speed

    syncs = {end - 1: Mean(weights=[1, 1, end <= 150]) for end in ends}
    expected = history(step, np.zeros(4), [np.zeros(4)] * 3, 400, syncs)
    for end, numbers in ends.items():
        np.testing.assert_allclose([*map(float, numbers.split())], expected[end - 1, 0], atol=2e-5)


def test_processes_that_would_end_together_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="jax.config.update"):
        local_opt.elastic.ElasticSync(lambda p, s: (p, s))
    with pytest.raises(ValueError, match="timeout is 0"):
        local_opt.elastic.ElasticSync(lambda p, s: (p, s), timeout=0)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("count,deaths", [(3, 1), (4, 2)])
def test_twelve_kills(count, deaths, inside):
    command = [sys.executable, "-m", "benchmarks.elastic", f"--processes={count}"]
    command += [f"--deaths={deaths}", *["--inside"] * inside]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert not done.returncode, done.stdout + done.stderr[-3000:]
    assert f"{12} of {12} runs as they should be" in done.stdout


def test_a_simulation_drops_the_dead():
    """By hand: two workers without momentum, one step each, then one of them alone."""
    result = kills.simulated({1: (0, 1), kills.STEPS: (0,)})
    (x, y), (v, z) = (kills.data_of(n) for n in range(2))
    mean = sum(2 * a[0].T @ b[0] / 8 for a, b in ((x, y), (v, z))) / 2
    np.testing.assert_allclose(result[1], 0.7 * kills.RATE * mean, rtol=1e-5)
