"""Waits for others end, and say for what: `pytest -m slow -n 0 tests/test_waits.py`, a minute."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments.processes import heartbeat, waits
from tests.test_restarts import children
from tests.test_train_processes import ROOT, RUN, TWO_DEVICES, has_checkpoint, start


def test_a_wait_that_is_too_long_ends_the_process_with_what_it_was_for():
    code = (
        "import time\nfrom experiments.processes import waits\n"
        "with waits.limited(60, lambda: 'never'):\n    pass\n"
        "with waits.limited(0.1, lambda: 'too long'):\n    time.sleep(60)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (1, "too long\n")


@pytest.mark.parametrize(
    "places,said",
    [
        ({0: 8, 1: 8, 2: 4}, "Process 2 was last seen after step 4: look at its output."),
        ({0: 8, 1: 8}, "Process 1 was last seen after step 8: look"),  # nobody is behind
        ({0: 8}, "Look at the others' output."),
        (None, "Process 0, where the others are known, does not answer"),
    ],
)
def test_who_has_come_less_far_is_named(places, said):
    told = waits._told(0, "the mean loss", 60, places)
    assert said in told and told.startswith("process 0 has waited 60 s")
    assert "for the mean loss." in told and "a longer --patience" in told
    assert (", after step 8," in told) == (places is not None)


def test_nothing_watches_a_process_alone():
    with waits.for_others("nobody"):
        waits.came_to(3)
    with heartbeat.beating(0) as beat:
        beat(1)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_run_whose_process_hangs_ends_without_a_supervisor(tmp_path, stopped):
    command = ["experiments.launch", "--processes=2", "--", *RUN, *TWO_DEVICES, "--patience=15"]
    process = start([*command, "--total_steps=60000"], tmp_path)
    until = time.monotonic() + 200
    while not has_checkpoint(tmp_path):
        assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
        time.sleep(0.01)
    os.kill(children(process.pid)[stopped], signal.SIGSTOP)
    begun = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert time.monotonic() - begun < 15 + waits.ASKING + 60, "it waited for something else"
    assert process.returncode == 1, output
    waited = rf"process {1 - stopped} has waited 15 s(, after step \d+,)? for"
    assert re.search(waited, output), output
    who = "Process 1 was last seen after step" if stopped else "Process 0, where the others are"
    assert who in output
