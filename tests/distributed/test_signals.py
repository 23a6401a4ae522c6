"""Signals to processes, in minutes: `pytest -m slow -n 0 tests/distributed/test_signals.py`."""

import os
import re
import signal
import time

import pytest

from experiments.distributed import deadlines
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

TOGETHER = [*LAUNCH_TWO, *RUN, *TWO_DEVICES]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command,number,status",
    [([*RUN, "--workers=8"], signal.SIGINT, 130), (TOGETHER, signal.SIGTERM, 143)],
    ids=["alone", "two processes"],
)
def test_a_signal_does_not_change_the_result_of_training(tmp_path, command, number, status):
    result, output = stop_in_the_middle(command, tmp_path / "stopped", number)
    assert result == status and output.count("Stopped and saved at step") == 1, output
    assert "Continues from the checkpoint of step" in finish(command, tmp_path / "stopped")
    finish(command, tmp_path / "whole")
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")
    assert "6000" in os.listdir(tmp_path / "stopped" / "checkpoints")


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_run_with_a_hanging_process_ends_and_names_it(tmp_path, stopped):
    process = start([*TOGETHER, "--timeout=15", "--total_steps=60000"], tmp_path)
    wait_for_checkpoint(process, tmp_path)
    os.kill(children(process.pid)[stopped], signal.SIGSTOP)
    begun = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert time.monotonic() - begun < 15 + deadlines.ASKING + 60, "it waited for something else"
    assert process.returncode == 1, output
    assert f"process {1 - stopped} has waited 15 s for" in output
    who = r"process 1 after step \d+: look" if stopped else "process 0 does not answer"
    assert re.search(who, output), output
