"""Processes that cannot find each other say so soon, and what to do."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from experiments import launch
from experiments.processes import cluster

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_a_taken_port_is_named_before_anything_waits():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} of process 0 is taken.*Choose another"):
            cluster.check_port(f"127.0.0.1:{port}")
    cluster.check_port(f"127.0.0.1:{launch.free_port()}")


def test_a_process_0_that_is_not_there_is_named_with_its_address():
    address = f"127.0.0.1:{launch.free_port()}"
    message = f"process 0 was not reached at --coordinator_address={address} .*: start process 0"
    with pytest.raises(ValueError, match=message):
        cluster.check_reached(address, 0.3)


def test_a_process_0_that_listens_is_reached():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        cluster.check_reached(f"localhost:{listening.getsockname()[1]}", 10.0)


@pytest.mark.parametrize(
    "address,bound",
    [
        ("localhost:80", "127.0.0.1:80"),
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("[::1]:80", "[::1]:80"),
        ("node1:80", None),  # others must reach it
        (None, None),
    ],
)
def test_what_is_local_listens_to_this_machine_alone(address, bound):
    assert cluster.bound_to(address) == bound


PROCESS = """
import sys
from absl import app, flags
import experiments.flags
from experiments.processes import cluster
experiments.flags.define(flags.FLAGS, "run")
cluster.CONNECT = 3.0
app.run(lambda argv: cluster.start(flags.FLAGS))
"""


def test_processes_that_never_come_are_waited_for_no_longer_than_a_limit(tmp_path):
    (tmp_path / "child.py").write_text(PROCESS)
    address = f"--coordinator_address=127.0.0.1:{launch.free_port()}"
    found = subprocess.run(
        [sys.executable, tmp_path / "child.py", address, "--num_processes=2", "--process_id=0"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert found.returncode == 1  # not 134, as of JAX's abort
    assert "not all of 2 processes have come within 3 s" in found.stderr
    assert "start every process" in found.stderr


ALONE = """
import jax
from absl import app, flags
import experiments.flags
from experiments.processes import cluster
experiments.flags.define(flags.FLAGS, "run")

def main(argv):
    cluster.start(flags.FLAGS)
    print(jax.device_count(), jax.distributed.is_initialized())

app.run(main)
"""


def test_one_process_with_two_devices_has_no_wires_in_which_they_could_wait(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    xla = {"XLA_FLAGS": f"{launch.DEVICES}=2", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with (tmp_path / "out").open("w") as out:
        assert launch.launch("alone", processes=1, environment=os.environ | xla, stdout=out) == 0
    assert (tmp_path / "out").read_text().split() == ["2", "False"]
