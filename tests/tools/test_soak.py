"""Consecutive runs in one process leak no threads or open files."""

import os
import signal
import threading

import pytest

from experiments import train
from tests.commands import parsed

pytestmark = pytest.mark.slow


def test_stopped_and_resumed_runs_leak_no_threads_or_files(tmp_path):
    """Two runs are stopped by SIGTERM and resumed, and leave as much as the first one."""
    held = []
    for attempt in range(6):
        values = parsed(
            train,
            "--order=cd_grab",
            "--sync=qsr",
            "--echo=diffusion",
            "--workers=4",
            "--num_train=512",
            "--units_per_step=3",
            "--evaluations=20",
            "--total_steps=4000",
            "--checkpoint_every=50",
            f"--output_dir={tmp_path / str(attempt // 2)}",
        )
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
