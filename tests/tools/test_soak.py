"""Consecutive runs in one process leak no threads, open files or lists."""

import gc
import os
import signal
import threading

import pytest

from experiments import train
from experiments.training import run
from tests.commands import parsed
from tests.little_run import built, plans_of, trained

pytestmark = pytest.mark.slow


def lists_after_saves(folder, every):
    """The number of lists: TensorStore keeps one per metric that it was asked for."""
    trained(built(), plans_of(), saving=run.Saving(str(folder), every=every))
    gc.collect()
    return sum(type(found) is list for found in gc.get_objects())


def test_saves_leak_nothing(tmp_path):
    lists_after_saves(tmp_path / "first", 2)
    few = lists_after_saves(tmp_path / "few", 30)
    many = lists_after_saves(tmp_path / "many", 2)
    assert many - few < 28, "a list each of 28 more saves would be a leak"


def test_stopped_and_resumed_runs_leak_no_threads_or_files(tmp_path):
    """Two runs are stopped by SIGTERM and resumed, and leave as much as the first one."""
    held = []
    for attempt in range(6):
        values = parsed(
            train, "--order=cd_grab", "--sync=qsr", "--echo=diffusion", "--workers=4",
            "--num_train=512", "--units_per_step=3", "--evaluations=20", "--total_steps=4000",
            "--checkpoint_every=50", f"--output_dir={tmp_path / str(attempt // 2)}",
        )  # fmt: skip
        before = signal.signal(signal.SIGTERM, lambda number, frame: None)
        timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM))
        if attempt % 2 == 0:  # every second one goes on from where it was stopped
            timer.start()
        try:
            train.run(values)
        except SystemExit as ended:
            assert ended.code == 128 + signal.SIGTERM
        finally:
            timer.cancel()
            signal.signal(signal.SIGTERM, before)
        held.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert held[-1][0] <= held[1][0] and held[-1][1] <= held[1][1], held
