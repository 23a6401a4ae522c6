"""What grows while runs follow each other in one process: no thread, no open file, no list."""

import gc
import os
import signal
import threading

import pytest
from absl import flags as absl_flags

from experiments import train
from experiments.training import run
from tests.little_run import built, plans_of, trained

pytestmark = pytest.mark.slow


def lists_after_saves(folder, every):
    """How many lists Python knows of: TensorStore keeps one of every metric it was asked for."""
    trained(built(), plans_of(), saving=run.Saving(str(folder), every=every))
    gc.collect()
    return sum(type(found) is list for found in gc.get_objects())


def test_saves_leave_nothing_behind(tmp_path):
    lists_after_saves(tmp_path / "first", 2)
    few = lists_after_saves(tmp_path / "few", 30)
    many = lists_after_saves(tmp_path / "many", 2)
    assert many - few < 28, "a list each of 28 more saves would be a leak"


def test_threads_and_files_come_back_from_runs_that_are_stopped_and_go_on(tmp_path):
    """SIGTERM while it trains, from a checkpoint on, and again: as after the first run."""
    held = []
    for attempt in range(6):
        values = absl_flags.FlagValues()
        train.define_flags(values)
        values([
            "train", "--order=cd_grab", "--sync=qsr", "--echo=diffusion", "--workers=4",
            "--num_train=512", "--units_per_step=3", "--evaluations=20", "--total_steps=4000",
            "--checkpoint_every=50", f"--output_dir={tmp_path / str(attempt // 2)}",
        ])  # fmt: skip
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
