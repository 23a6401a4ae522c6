"""Processes that die or hang are named, and all are started again."""

import json
import os
import re

import pytest

from experiments import launch
from experiments.processes import heartbeat, supervisor
from experiments.processes.heartbeat import Beat

CHILD = """
import json, os, pathlib, signal, sys, time
number = int(sys.argv[-1].removeprefix("--process_id="))
count = int(sys.argv[-2].removeprefix("--num_processes="))
here = pathlib.Path(os.environ["HERE"])
attempts = here / f"attempts{number}"
attempts.write_text((attempts.read_text() if attempts.exists() else "") + "x")
attempt = len(attempts.read_text())
def beat(step, first=0):
    path = pathlib.Path(os.environ["SYNCOPATE_HEARTBEATS"], str(number))
    path.with_suffix(".tmp").write_text(json.dumps([step, first, step - first, True]))
    path.with_suffix(".tmp").rename(path)
"""


def started(tmp_path, capfd, body, **options):
    """(exit code, what the supervisor has said) of two processes without JAX."""
    (tmp_path / "child.py").write_text(CHILD + body)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "HERE": str(tmp_path)}
    options = {"processes": 2, "grace": 0.2} | options
    code = launch.launch("child", environment=environment, **options)
    lines = capfd.readouterr().err.splitlines()
    return code, [x.removeprefix("[launch] ") for x in lines if x.startswith("[launch] ")]


def attempts(tmp_path):
    """Of the process that was started most often: one may be ended before it can count."""
    return max(len(path.read_text()) for path in tmp_path.glob("attempts*"))


DIES_ONCE = """
beat(7 if attempt == 1 else 20, 0 if attempt == 1 else 5)
time.sleep(0.3)
if attempt == 1 and number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if attempt == 1:
    time.sleep(60)
"""


def test_what_died_is_named_and_all_go_on(tmp_path, capfd):
    code, said = started(tmp_path, capfd, DIES_ONCE, restarts=2)
    assert code == 0 and attempts(tmp_path) == 2
    assert said == [
        "process 1 was ended by SIGKILL after step 7",
        "restart 1 of 2, from the last whole checkpoint; processes: 2",
        "goodput: 20 of 22 computed steps kept (91%); restarts: 1",
    ]


def test_without_restarts_what_died_is_named_all_the_same(tmp_path, capfd):
    code, said = started(tmp_path, capfd, DIES_ONCE)
    assert code == 128 + 9 and attempts(tmp_path) == 1
    assert said == ["process 1 was ended by SIGKILL after step 7"]


def test_after_its_restarts_it_gives_up(tmp_path, capfd):
    body = "beat(3)\nif number == 0:\n    sys.exit(5)\ntime.sleep(60)"
    code, said = started(tmp_path, capfd, body, restarts=2)
    assert code == 5 and attempts(tmp_path) == 3
    assert said.count("process 0 ended with exit code 5 after step 3") == 3
    assert any(line.startswith("gave up after restart 2: look at") for line in said)
    assert said[-1] == "goodput: 0 of 9 computed steps kept (0%); restarts: 2"


def test_an_error_before_the_first_step_is_not_repeated(tmp_path, capfd):
    code, said = started(tmp_path, capfd, "sys.exit(3)", restarts=2)
    assert code == 3 and attempts(tmp_path) == 1
    assert "ended with exit code 3 before its first step" in said[0]
    assert "nothing is restarted" in said[1]


STOPS = """
beat(7)
if attempt == 1 and number == 0:
    time.sleep(60)
if attempt == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
"""
WAITS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one within a collective
if attempt == 1:
    beat(7 + 9 * (number == 0))
    time.sleep(60)
"""


@pytest.mark.parametrize("body,how", [(STOPS, " is stopped and"), (WAITS, "")])
def test_of_processes_that_hang_it_is_named_for_which_the_others_wait(tmp_path, capfd, body, how):
    code, said = started(tmp_path, capfd, body, restarts=1, deadline=4)
    assert code == 0 and attempts(tmp_path) == 2
    expected = f"process 1{how} has given no sign of life for [0-9]+ s after step 7"
    assert re.fullmatch(expected, said[0]), said


def test_a_process_that_shows_life_has_not_hung(tmp_path, capfd):
    body = "for step in range(20):\n    beat(step)\n    time.sleep(0.25)"
    assert started(tmp_path, capfd, body, deadline=4) == (0, [])


def test_a_restart_has_fewer_processes_with_the_same_devices_and_overwrites_nothing(
    tmp_path, capfd
):
    body = """
(here / f"seen{attempt}").write_text(json.dumps([count, os.environ["XLA_FLAGS"], sys.argv[1:]]))
beat(1)
if attempt == 1:
    sys.exit(1)
"""
    code, said = started(tmp_path, capfd, body, restarts=1, min_processes=1)
    assert code == 0 and attempts(tmp_path) == 2
    assert "restart 1 of 1, from the last whole checkpoint; processes: 1" in said
    before, after = (json.loads((tmp_path / f"seen{n}").read_text()) for n in (1, 2))
    devices = [int(xla.rpartition("=")[2]) for _, xla, _ in (before, after)]
    assert (before[0], after[0]) == (2, 1) and devices[1] == 2 * devices[0]
    assert "--nooverwrite" in after[2] and "--nooverwrite" not in before[2]


@pytest.mark.parametrize(
    "options", [{"restarts": -1}, {"deadline": 0}, {"min_processes": 3}, {"min_processes": 0}]
)
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="pass restarts >= 0, seconds > 0 and 1 to --processes=2"):
        launch.launch("child", processes=2, **options)


def test_goodput_of_a_study_counts_ended_runs_as_kept():
    run_ended, next_run = Beat(40, 0, 100, False), Beat(60, 0, 60, False)
    assert supervisor.goodput([run_ended, None, next_run], ended=True) == (160, 160)
    lost = [Beat(40, 0, 100, True), Beat(60, 10, 50, True), Beat(60, 60, 0, False)]
    assert supervisor.goodput(lost, ended=True) == (120, 150)
    assert supervisor.goodput([], ended=False) == (0, 0)


def test_a_run_shows_how_far_it_has_come(tmp_path, monkeypatch):
    with heartbeat.beating(3) as beat:  # nobody looks
        beat(4)
    monkeypatch.setenv(heartbeat.FOLDER, str(tmp_path))
    assert heartbeat.read(tmp_path, 0) is None and heartbeat.when(tmp_path, 0) == 0
    with heartbeat.beating(5) as beat:
        beat(9)
        assert heartbeat.read(tmp_path, 0) == Beat(9, 5, 4, True)
    with heartbeat.beating(0) as beat:  # the next run of a study
        beat(2)
    assert heartbeat.read(tmp_path, 0) == Beat(2, 5, 6, False)
