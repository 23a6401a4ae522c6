"""Kills at any write: a run that is started again ends bitwise as one that never was killed.

pytest -m slow -n 0 -s tests/trainer/test_kills.py      # minutes; prints how many kills landed

SIGKILL comes just before a write into the folder, drawn from all of a run: a file is opened to be
written, made, renamed or removed. Starts after another kill are killed as well. Of four processes,
in the loop of docs/use/clusters.md, one is killed, or the launch with all of them.
"""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.commands import ROOT, children, ended, environment, finish, start

SMALL = ["--num_train=96", "--num_test=200", "--unit_size=1", "--warmup_steps=2", "--h_base=2"]
TRAIN = [
    *SMALL,
    "--echo=diffusion+cosine",
    "--total_steps=240",
    "--evaluations=12",
    "--checkpoint_every=9",
]
COMMANDS = {
    "train": [*TRAIN, "--workers=4", "--units_per_step=3"],
    "qsr": [
        *SMALL,
        "--workers=2",
        "--units_per_step=4",
        "--seeds=2",
        "--learning_rates=0.1,0.4",
        "--total_steps=60",
        "--evaluations=6",
        "--checkpoint_every=7",
        "--arms=parallel,qsr",
    ],
}
KILLS = 24  # of each
FOUR = 10  # kills of four processes

KILLED = """
import os, runpy, signal, sys
left, folder, sys.argv = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
changes = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}

def hook(event, args):
    global left
    if event in changes or event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
        left -= str(args[0]).startswith(folder)
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(hook)
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def go(name, folder, write=-1):
    """The exit status of a run that is killed before a write, if it comes so far."""
    module = [f"experiments.{name}", *COMMANDS[name], f"--output_dir={folder}"]
    command = [sys.executable, "-c", KILLED, str(write), str(folder), *module]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def recorded(folder):
    """How many records a run has written."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_that_is_killed_over_and_over_is_the_same_run(name, tmp_path):
    generator, landed, late, runs = np.random.default_rng(7), [], 0, 0
    assert not go(name, tmp_path / "whole")
    whole = ended(tmp_path / "whole")
    while len(landed) < KILLS:
        folder, status, runs = tmp_path / f"killed {runs}", None, runs + 1
        while status != 0:
            write = int(generator.integers(1, 120)) if len(landed) < KILLS else -1
            status, written = go(name, folder, write), recorded(folder)
            if status and written < len(whole[0]):
                landed.append(written)
            late += bool(status) and written == len(whole[0])  # before its report was written
        assert ended(folder) == whole
    assert len(landed) == KILLS and len({*landed}) > 4  # between different records
    print(f"\n{name}: {KILLS} kills landed after {sorted(landed)} of {len(whole[0])} records")
    print(f"and {late} after the last, in {runs} runs")


LAUNCH = [
    "experiments.launch",
    "--processes=4",
    "--",
    "experiments.train",
    *TRAIN,
    "--workers=4",
    "--run=mesh",
    "--units_per_step=3",
]


def killed(process, folder, generator):
    """Kills one of four, or the launch with all, some time after the next record.

    Returns after how many records they were killed; None if they were not four, or had ended.
    """
    begun = recorded(folder)
    while process.poll() is None and recorded(folder) == begun:
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 2))
    launches = children(process.pid)
    results = [number for launch in launches for number in children(launch)]
    if len(results) != 4 or process.poll() is not None:
        return None
    one = generator.random() < 0.5
    for number in [results[generator.integers(4)]] if one else [*launches, *results]:
        os.kill(number, signal.SIGKILL)
    return recorded(folder)


@pytest.mark.slow
def test_of_four_processes_one_or_all_are_killed_over_and_over(tmp_path):
    generator, landed, runs = np.random.default_rng(8), [], 0
    finish(LAUNCH, tmp_path / "whole")
    whole = ended(tmp_path / "whole")
    while len(landed) < FOUR:
        folder, runs = tmp_path / f"killed {runs}", runs + 1
        with open(f"{folder}.txt", "w") as output:  # a pipe that nobody reads fills up
            process = start(LAUNCH, folder, again=True, stdout=output)
            while process.poll() is None and len(landed) < FOUR:
                at = killed(process, folder, generator)
                landed += [at] * (at is not None and at < len(whole[0]))
            assert process.wait(timeout=280) == 0, pathlib.Path(output.name).read_text()
        assert ended(folder) == whole
    print(f"\nfour: {FOUR} kills landed after {sorted(landed)} of {len(whole[0])} records")
