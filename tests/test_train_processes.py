"""Real signals to real processes: `pytest -m slow -n 0 tests/test_train_processes.py`, minutes."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
RUN = [
    "experiments.train", "--order=cd_grab", "--sync=qsr", "--echo=diffusion_cosine",
    "--total_steps=6000", "--evaluations=12", "--checkpoint_every=150", "--units_per_step=3",
]  # fmt: skip
ONE, TWO_DEVICES = ["--workers=8"], ["--workers=2", "--run=mesh"]


def environment(devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def start(command, folder, devices=1):
    return subprocess.Popen(
        [sys.executable, "-m", *command, f"--output_dir={folder}"],
        cwd=ROOT,
        env=environment(devices),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(command, folder, devices=1):
    process = start(command, folder, devices)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def has_checkpoint(folder):
    """Whether one is whole: those that are being written have another name."""
    found = folder / "checkpoints"
    return found.exists() and any(path.name.isdigit() for path in found.iterdir())


def stop_in_the_middle(command, folder, number, devices=1):
    """Sends a signal after the first checkpoint; (exit status, output)."""
    process = start(command, folder, devices)
    until = time.monotonic() + 200
    while not has_checkpoint(folder):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    finish(RUN + ONE, folder)
    return records(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number,status", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_changes_nothing_that_was_trained(tmp_path, whole, number, status):
    found, output = stop_in_the_middle(RUN + ONE, tmp_path, number)
    assert found == status, output
    if number != signal.SIGKILL:
        assert "Stopped and saved at step" in output
    assert "Goes on from the checkpoint of step" in finish(RUN + ONE, tmp_path)
    assert records(tmp_path) == whole
    assert "6000" in os.listdir(tmp_path / "checkpoints")


@pytest.mark.slow
def test_two_processes_stop_go_on_and_equal_one_with_two_devices(tmp_path):
    together = ["experiments.launch", "--processes=2", "--", *RUN, *TWO_DEVICES]
    found, output = stop_in_the_middle(together, tmp_path / "two", signal.SIGTERM)
    assert found == 143, output
    assert output.count("Stopped and saved at step") == 1  # written once
    assert "Goes on from the checkpoint of step" in finish(together, tmp_path / "two")
    finish(RUN + TWO_DEVICES, tmp_path / "one", devices=2)
    two, one = records(tmp_path / "two"), records(tmp_path / "one")
    assert len(two) == 12
    for a, b in zip(two, one, strict=True):
        assert [a[n] for n in ("step", "loads", "rounds")] == [
            b[n] for n in ("step", "loads", "rounds")
        ]
        np.testing.assert_allclose(a["train/loss"], b["train/loss"], rtol=1e-5)
