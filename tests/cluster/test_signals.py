"""Real signals to real processes, minutes: `pytest -m slow -n 0 tests/cluster/test_signals.py`."""

import os
import re
import signal
import time

import numpy as np
import pytest

from experiments.cluster import agree
from tests.commands import (
    LAUNCH_TWO,
    RUN,
    TWO_DEVICES,
    children,
    finish,
    records,
    start,
    stop_in_the_middle,
    wait_for_checkpoint,
)

ALONE = [*RUN, "--workers=8"]
TOGETHER = [*LAUNCH_TWO, *RUN, *TWO_DEVICES]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The records of a run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    finish(ALONE, folder)
    return records(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number,status", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_changes_nothing_that_was_trained(tmp_path, whole, number, status):
    found, output = stop_in_the_middle(ALONE, tmp_path, number)
    assert found == status, output
    if number != signal.SIGKILL:
        assert "Stopped and saved at step" in output
    assert "Goes on from the checkpoint of step" in finish(ALONE, tmp_path)
    assert records(tmp_path) == whole
    assert "6000" in os.listdir(tmp_path / "checkpoints")


@pytest.mark.slow
def test_two_processes_stop_die_go_on_and_equal_one_with_two_devices(tmp_path):
    """Stopped by hand once, then in the loop of docs/launching.md, where one of them is killed."""
    found, output = stop_in_the_middle(TOGETHER, tmp_path / "two", signal.SIGTERM)
    assert found == 143, output
    assert output.count("Stopped and saved at step") == 1  # written once
    process = start(TOGETHER, tmp_path / "two", again=True)
    while not (pair := [n for launch in children(process.pid) for n in children(launch)][:2])[1:]:
        time.sleep(0.05)
    time.sleep(10)
    os.kill(pair[1], signal.SIGKILL)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert "[launch] process 1 ended with exit code 137" in output
    assert "Goes on from the checkpoint of step" in output
    finish(TOGETHER, tmp_path / "undisturbed")
    assert records(tmp_path / "two") == records(tmp_path / "undisturbed")
    finish(RUN + TWO_DEVICES, tmp_path / "one", devices=2)
    two, one = records(tmp_path / "two"), records(tmp_path / "one")
    assert len(two) == 12
    for a, b in zip(two, one, strict=True):
        assert [a[n] for n in ("step", "loads", "rounds")] == [
            b[n] for n in ("step", "loads", "rounds")
        ]
        np.testing.assert_allclose(a["train/loss"], b["train/loss"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_run_whose_process_hangs_ends_and_says_for_whom_it_has_waited(tmp_path, stopped):
    process = start([*TOGETHER, "--patience=15", "--total_steps=60000"], tmp_path)
    wait_for_checkpoint(process, tmp_path)
    os.kill(children(process.pid)[stopped], signal.SIGSTOP)
    begun = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert time.monotonic() - begun < 15 + agree.ASKING + 60, "it waited for something else"
    assert process.returncode == 1, output
    waited = rf"process {1 - stopped} has waited 15 s(, after step \d+,)? for"
    assert re.search(waited, output), output
    who = "Process 1 was last seen after step" if stopped else "Process 0, where the others are"
    assert who in output
