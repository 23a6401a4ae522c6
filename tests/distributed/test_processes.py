"""Two processes give the same results as one with two devices, and start and stop together."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from absl import flags

import experiments.compare.flags
from experiments import fingerprints
from experiments.data.base import first_of
from experiments.distributed import processes
from experiments.distributed.devices import worker_mesh
from tests import pair
from tests.commands import environment, start_two


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The results of two processes, and the folder that they share."""
    folder = tmp_path_factory.mktemp("two")
    with (folder / "out").open("w") as out:
        code = start_two("tests.pair", str(folder), stdout=out)
    assert code == 0
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(2)], folder


@pytest.fixture(scope="module")
def one():
    """The same training in this process, on two devices."""
    return json.loads(json.dumps(pair.trained(worker_mesh(pair.WORKERS))))


def assert_same_records(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.pop("diverged", None) is b.pop("diverged", None) is None
        assert a | {"seconds": 0} == pytest.approx(b | {"seconds": 0}, rel=1e-5)


def test_two_processes_equal_one_with_two_devices(two, one):
    """They also stop together, with a single message."""
    assert "is not finite in step" in one["stopped"]
    for result in two[0]:
        assert result["stopped"] == one["stopped"]
        assert result["orders"] == one["orders"]
        assert_same_records(result["records"], one["records"])
    orders, records = np.array(one["orders"]), one["records"]  # [looks, W, M]
    assert orders.shape[:2] == (4, pair.WORKERS)
    assert (orders[0] != orders[-1]).any() and (orders[:, 0] != orders[:, 1]).any()
    assert records[-1]["train/loss"] < 0.9 * records[0]["train/loss"]
    assert records[-1]["loads"] < pair.STEPS
    assert records[-1]["rounds"] < pair.STEPS and records[-1]["drift"] > 0


def test_a_process_contributes_only_its_own_workers_rows(two):
    values = np.arange(6.0).reshape(2, 3)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 2)).tolist()
    for number, result in enumerate(two[0]):
        assert result["workers"] == result["placed"] == [number]
        assert result["here"] == [values[number].tolist()]
        assert result["whole"] == {"x": values.tolist(), "key": keys}
        key = jax.random.fold_in(jax.random.key(3), number)
        assert result["folded"] == [[jax.random.key_data(key).tolist()]]
        assert result["first"] == {"seconds": 0.1, "text": "x"}


def test_only_process_0_writes(two):
    result, folder = two
    assert (folder / "run" / "metrics.jsonl").read_text() == '{"process": 0}\n'
    assert json.loads((folder / "run" / "settings.json").read_text()) == {"workers": 2}
    assert json.loads((folder / "run" / "versions.json").read_text())["processes"] == 2
    assert [f["done"] for f in result] == [[], []]


def test_differences_are_reported_in_both_processes(two):
    for result in two[0]:
        data, hashed = pair.small_task(), fingerprints.data_hash
        one, other = hashed(data)[:12], hashed(data._replace(train=first_of(data.train, 80)))[:12]
        assert result["differs"].startswith(
            "the processes differ: process 1 has --checkpoint_every=1 where process 0 has "
            f"--checkpoint_every=0; process 1 has data of hash {other} where process 0 has data of "
            f"hash {one}. Start all"
        )
        assert (
            "--run is vmap in 2 processes, each of which would do the whole work" in result["alone"]
        )
        assert "workers is 2 in 2 processes, each of which would average" in result["counted"]
        assert "processes [1] have another plan than process 0" in result["planned"]


PROCESS = """
from absl import app, flags
import experiments.compare.flags
from experiments.distributed import processes
experiments.compare.flags.define(flags.FLAGS, "run")
processes.CONNECT = 1.0
app.run(lambda argv: processes.start(flags.FLAGS))
"""


def test_waiting_for_missing_processes_has_a_timeout(tmp_path):
    (tmp_path / "child.py").write_text(PROCESS)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"--coordinator_address=127.0.0.1:{deaf.getsockname()[1]}"
        result = subprocess.run(
            [sys.executable, tmp_path / "child.py", address, "--num_processes=2", "--process_id=1"],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert result.returncode == 1  # not 134, as of JAX's abort
    output = f"not all processes connected to {address.split('=')[1]} within 1 s: start"
    assert output in result.stderr


AUTO = {"coordinator_address": "auto"}
PART = {"num_processes": 2, "process_id": 1}


@pytest.mark.parametrize(
    "given,chosen",
    [
        ({}, None),
        (AUTO, {}),
        # One process has no connections, in which two of its devices could wait for each other.
        ({"coordinator_address": "a:1", "num_processes": 1, "process_id": 0}, None),
        (PART | {"coordinator_address": "node1:80"}, PART | {"coordinator_bind_address": None}),
        *(
            (half, ValueError)
            for half in (
                {"num_processes": 2},
                AUTO | {"process_id": 0},
                PART,
                PART | {"coordinator_address": "host"},
                PART | {"coordinator_address": "h:1", "process_id": 2},
            )
        ),
    ],
)
def test_processes_are_configured_by_their_flags(given, chosen, monkeypatch):
    values, calls, updates = flags.FlagValues(), [], []
    experiments.compare.flags.define(values, "run")
    values(["test", *(f"--{name}={value}" for name, value in given.items())])
    # What start sets belongs to the process.
    monkeypatch.setattr(jax.config, "update", lambda *setting: updates.append(setting))
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    if chosen is ValueError:
        with pytest.raises(ValueError, match=r"are inconsistent: give .*--process_id, 0 to N - 1"):
            processes.start(values)
        return
    processes.start(values)
    if chosen:
        chosen = given | chosen
    limit = {"initialization_timeout": int(2 * processes.CONNECT)}
    assert calls == ([] if chosen is None else [chosen | limit])
    assert bool(updates) == (chosen is not None)


@pytest.mark.parametrize(
    "host,place",
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        ("0.0.0.0", "0.0.0.0"),
        ("203.0.113.7", None),  # of no machine
        ("node1", "127.0.0.3"),  # a name of this one
    ],
)
def test_the_coordinator_listens_at_the_address_that_is_meant(host, place, monkeypatch, capsys):
    real = socket.getaddrinfo
    asked = lambda host, *more, **o: real(host.replace("node1", "127.0.0.3"), *more, **o)  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", asked)
    result = processes._place_of(f"{host}:{free_port()}")
    assert result is place is None or result.rpartition(":")[0] == place
    text = f"{host} is {place} here: processes on other machines do not reach it"
    assert (text in capsys.readouterr().err) == (host in ("node1", "127.0.0.2"))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_port_that_is_taken_and_a_host_that_is_none_are_named_at_once():
    for family, host in [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0")]:
        taken = socket.socket(family, socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the coordinator of a run
        with taken:
            taken.bind((host, 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(
                ValueError, match=f"is {address}, where nothing can listen .*: pass HOST:PORT"
            ):
                processes._place_of(address)
    with pytest.raises(ValueError, match="is no.such.host.invalid:8476, .* listen .*: pass HOST:P"):
        processes._place_of("no.such.host.invalid:8476")


@pytest.mark.parametrize("kind", [ValueError, jax.errors.JaxRuntimeError])
def test_who_has_lost_another_says_so_in_one_line(kind, monkeypatch, capsys):
    """XLA raises either, by whether a program or a single operation was sent."""
    monkeypatch.setattr(processes.threading.Timer, "start", lambda timer: None)
    error = kind(
        "UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:1: Connection reset by peer"
    )
    processes._leave(pytest.fail, kind, error, None)
    text = "Error: process 0 has lost another one (Connection reset by peer): look at the output"
    assert capsys.readouterr().err.startswith(text)


LOST = RuntimeError("Gloo: Connection reset by peer")


@pytest.mark.parametrize(
    "error,first,ends",
    [
        (LOST, False, True),
        (LOST, True, False),
        (ValueError("7"), False, False),
    ],
)
def test_a_process_that_jax_would_abort_ends_once_it_has_told_its_error(
    monkeypatch, capsys, error, first, ends
):
    class Ended(BaseException):
        pass

    def end(code):
        assert code == 1 and processes.leaving.is_set()
        raise Ended

    monkeypatch.setattr(processes, "leaving", threading.Event())
    monkeypatch.setattr(processes, "is_first", lambda: first)
    monkeypatch.setattr(processes, "GRACE", 1e6)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended) if ends else contextlib.nullcontext():
        processes._leave(lambda *error: print(error[1], file=sys.stderr), type(error), error, None)
    output = capsys.readouterr().err
    assert output.count("\n") == 1 and ("has lost another one" in output) == (error is LOST)
