"""Experiments in several processes: two equal one with two devices, and start and end together."""

import json
import os
import signal
import threading
import time

import jax
import numpy as np
import pytest
from absl import flags

import experiments.flags
from experiments import launch
from experiments.processes import cluster, distributed
from local_opt import runners
from tests import pair
from tests.two_processes import start_two


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What both of two processes have found, and the folder that they share."""
    folder = tmp_path_factory.mktemp("two")
    with (folder / "out").open("w") as out:
        code = start_two("tests.pair", str(folder), stdout=out)
    assert code == 0
    return [json.loads((folder / f"{n}.json").read_text()) for n in range(2)], folder


@pytest.fixture(scope="module")
def one():
    """The same training in this process, on two devices."""
    return json.loads(json.dumps(pair.measured(runners.worker_mesh(pair.WORKERS))))


def assert_same_records(found, expected, timed=("seconds",)):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - set(timed):
            if isinstance(a[name], float):
                np.testing.assert_allclose(a[name], b[name], rtol=1e-5, err_msg=name)
            else:
                assert a[name] == b[name], name


@pytest.mark.parametrize("name", ["cd_grab", "qsr"])
def test_two_processes_equal_one_with_two_devices(name, two, one):
    expected = one[name]
    for found in two[0]:
        assert found[name]["orders"] == expected["orders"]
        assert_same_records(found[name]["records"], expected["records"])
    orders, records = np.array(expected["orders"]), expected["records"]  # [looks, W, M]
    assert orders.shape[:2] == (4, pair.WORKERS)
    assert (orders[0] != orders[-1]).any() and (orders[:, 0] != orders[:, 1]).any()
    assert records[-1]["train/loss"] < 0.9 * records[0]["train/loss"]
    assert records[-1]["loads"] < pair.STEPS
    if name == "qsr":
        assert records[-1]["rounds"] < pair.STEPS and records[-1]["drift"] > 0


@pytest.mark.parametrize("name", ["cd_grab", "qsr"])
def test_processes_stop_together_with_one_message(name, two, one):
    assert "is not finite in step" in one[name]["stopped"]
    assert [found[name]["stopped"] for found in two[0]] == [one[name]["stopped"]] * 2


def test_a_process_hands_over_its_own_workers_rows_alone(two):
    values = np.arange(6.0).reshape(2, 3)
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), 2)).tolist()
    for number, found in enumerate(two[0]):
        assert found["own"] == found["asked"] == [number]
        assert found["here"] == [values[number].tolist()]
        assert found["whole"] == {"x": values.tolist(), "key": keys}
        assert found["first"] == {"seconds": 0.1, "text": "x"}


def test_process_0_alone_writes(two):
    found, folder = two
    assert (folder / "run" / "metrics.jsonl").read_text() == '{"process": 0}\n'
    assert json.loads((folder / "run" / "settings.json").read_text()) == {"workers": 2}
    assert json.loads((folder / "run" / "versions.json").read_text())["processes"] == 2
    assert [f["done"] for f in found] == [[], []]


def parsed(*arguments):
    values = flags.FlagValues()
    experiments.flags.define(values, "run")
    values(["test", *arguments])
    return values


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--num_processes=2"], "--num_processes=2 without --coordinator_address and --process_id"),
        (["--process_id=0", "--coordinator_address=h:1"], "without --num_processes: several"),
        (["--coordinator_address=auto", "--process_id=0"], "without --num_processes: several"),
        (
            ["--coordinator_address=host", "--num_processes=2", "--process_id=0"],
            "'host': it must be host:port",
        ),
        (
            ["--coordinator_address=h:1", "--num_processes=2", "--process_id=2"],
            "--process_id is 2 of --num_processes=2: ids go from 0",
        ),
    ],
)
def test_flags_that_are_half_given_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        cluster.start(parsed(*arguments))


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    "environment,chosen",
    [
        ({}, None),
        (SLURM, None),  # a batch script: the job has several tasks, this is no step of it
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, {"num_processes": 2, "process_id": 1}),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "JAX_PLATFORMS": "cpu"}, None),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1", "JAX_PLATFORMS": "tpu,cpu"}, {}),
        ({"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"}, {}),
    ],
)
def test_clusters_are_recognised_by_their_environment(environment, chosen, monkeypatch):
    for name in [n for n in os.environ if n.startswith(("SLURM_", "TPU_", "MEGASCALE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    calls = []

    def initialize(*, initialization_timeout, **given):
        calls.append(given)

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    # What start sets besides belongs to the process.
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    cluster.start(parsed())
    assert calls == ([] if chosen is None else [chosen])


def test_one_process_places_as_before_and_is_the_first():
    values = {"x": np.arange(8.0, dtype=np.float32).reshape(4, 2)}
    sharding = runners.owned_sharding(runners.worker_mesh(4))
    for where in (None, sharding):
        placed = distributed.place(values, where)
        assert where is None or placed["x"].sharding == where
        np.testing.assert_array_equal(distributed.on_host(placed)["x"], values["x"])
    assert distributed.is_first() and not distributed.several()
    assert distributed.own_workers(runners.worker_mesh(4), 4) == [0, 1, 2, 3]
    assert distributed.mesh_of("turns", 4) is None
    assert distributed.mesh_of("mesh", 4).shape == {"worker": 4}


def started(tmp_path, source, **options):
    """(exit code, seconds) of two processes that run `source`, a module with no import of JAX."""
    (tmp_path / "child.py").write_text(source)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    begun = time.monotonic()
    code = launch.launch("child", processes=2, environment=environment, **options)
    return code, time.monotonic() - begun


HEAD = """
import os, signal, sys, time
number = int(sys.argv[-1].removeprefix("--process_id="))
"""


def test_a_failing_process_ends_the_others_and_gives_its_exit_code(tmp_path):
    source = (
        HEAD
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that waits for a collective
if number == 1:
    sys.exit(7)
time.sleep(60)
"""
    )
    code, seconds = started(tmp_path, source, grace=0.2)
    assert code == 7 and seconds < 20


def test_a_process_that_a_signal_ended_has_the_shell_s_exit_code(tmp_path):
    code, _ = started(tmp_path, HEAD + "os.kill(os.getpid(), 9)", grace=5.0)
    assert code == 128 + 9


def test_processes_are_told_of_each_other_and_their_output_is_told_apart(tmp_path, capfd):
    source = HEAD + "print(*sys.argv[1:], os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'])"
    assert started(tmp_path, source)[0] == 0
    time.sleep(0.2)  # the other's last line is carried by a thread
    out, err = capfd.readouterr()
    address, count, number, *rest = out.split()
    assert address.startswith("--coordinator_address=127.0.0.1:")
    assert (count, number) == ("--num_processes=2", "--process_id=0")
    assert err.strip() == "[1] " + out.strip().replace("id=0", "id=1")


def test_the_first_signal_asks_all_processes_and_the_second_kills(tmp_path):
    source = (
        HEAD
        + f"""
def handle(*_):
    open(f"{tmp_path}/asked{{number}}", "w").close()
signal.signal(signal.SIGTERM, handle)
open(f"{tmp_path}/up{{number}}", "w").close()
while True:
    time.sleep(0.05)
"""
    )

    def interrupt():
        for name in ("up", "asked"):
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                if all((tmp_path / f"{name}{n}").exists() for n in range(2)):
                    break
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    code, seconds = started(tmp_path, source)
    thread.join()
    assert code == 128 + 9 and seconds < 20
    assert all((tmp_path / f"asked{n}").exists() for n in range(2))
    assert signal.getsignal(signal.SIGINT) is before


def test_no_process_at_all_is_refused():
    with pytest.raises(ValueError, match="--processes is 0: start at least 1"):
        launch.launch("child", processes=0)
