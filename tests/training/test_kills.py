"""A hundred kills, anywhere: a run that is started again ends bitwise as one that never was.

pytest -m slow -n 0 -s tests/training/test_kills.py      # half an hour; prints where kills landed

SIGKILL comes at a random moment, or while a call goes on in which something is written, read or
decided, the start again after another kill among them. Runs that end before enough kills have
landed are compared and begun anew. Of four processes, in the loop of docs/use/clusters.md, one is
killed, or the launch with all of them.
"""

import collections
import importlib
import operator
import os
import signal
import time

import numpy as np
import pytest

from tests.commands import children, ended, finish, start
from tests.killed_runs import AIMS, Forks

SMALL = ["--num_train=96", "--num_test=200", "--unit_size=1", "--warmup_steps=2"]
TWO = [*SMALL, "--workers=2", "--units_per_step=4"]
SHORT = ["--total_steps=60", "--evaluations=6", "--checkpoint_every=7"]
SEEDS = ["--seeds=2", "--learning_rates=0.1,0.4"]
TRAIN = [*SMALL, "--h_base=2", "--echo=diffusion+cosine", "--total_steps=240", "--evaluations=12",
         "--checkpoint_every=9"]  # fmt: skip
STUDIES = {
    "train": [*TRAIN, "--workers=4", "--units_per_step=3"],
    "qsr": [*TWO, *SEEDS, *SHORT, "--h_base=2", "--width=8", "--arms=parallel,qsr"],
    "echoing": [*TWO, *SEEDS, "--width=8", "--arms=none,diffusion", "--speeds=2", "--horizon=20",
                "--total_steps=40", "--evaluate_every=5", "--target=0.5", "--step_seconds=0.001",
                "--checkpoint_every=7"],
}  # fmt: skip
KILLS = 24  # of each
FOUR = 10  # kills of four processes


@pytest.fixture(scope="module")
def forks():
    server = Forks()
    yield server
    server.close()


def moment(generator, seconds):
    """How a kill is asked for: half of them at any time, half while some call goes on."""
    if generator.random() < 0.5:
        return {"after": seconds * generator.random()}
    phase = list(AIMS)[generator.integers(len(AIMS))]
    return {"aimed": (phase, int(generator.integers(AIMS[phase][-1])), float(generator.random()))}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_run_that_is_killed_over_and_over_is_the_same_run(name, forks, tmp_path):
    generator, landed, runs = np.random.default_rng(7), collections.Counter(), 0

    def go(folder, **kill):
        arguments = [*STUDIES[name], f"--output_dir={folder}"]
        status = forks.run(f"experiments.{name}", arguments, tmp_path / "log", **kill)
        assert status in (0, -signal.SIGKILL), (tmp_path / "log").read_text()[-3000:]
        return status

    assert not go(tmp_path / "compiles")
    begun = time.monotonic()
    assert not go(tmp_path / "whole")
    seconds, whole = time.monotonic() - begun, ended(tmp_path / "whole")
    assert ended(tmp_path / "compiles") == whole
    while landed.total() < KILLS:
        folder, status, runs = tmp_path / f"killed {runs}", None, runs + 1
        while landed.total() < KILLS and status != 0:
            kill = moment(generator, seconds)
            if status := go(folder, **kill):
                landed[kill.get("aimed", ("at any time",))[0]] += 1
        assert status == 0 or not go(folder)
        assert ended(folder) == whole
    print(f"\n{name}: {landed.total()} kills in {runs} runs of {seconds:.1f} s: {dict(landed)}")
    assert landed.total() == KILLS and len(landed) > 3


LAUNCH = ["experiments.launch", "--processes=4", "--", "experiments.train", *TRAIN,
          "--workers=4", "--run=mesh", "--units_per_step=3"]  # fmt: skip


def killed(process, folder, generator):
    """Whether a launch that trains had all four when their time came: then they are killed."""
    metrics = folder / "metrics.jsonl"
    begun = metrics.exists() and metrics.stat().st_size
    while process.poll() is None and (metrics.exists() and metrics.stat().st_size) == begun:
        time.sleep(0.01)
    time.sleep(generator.uniform(0, 2))
    launches = children(process.pid)
    found = [number for launch in launches for number in children(launch)]
    if len(found) != 4 or process.poll() is not None:
        return False
    one = generator.random() < 0.5
    for number in [found[generator.integers(4)]] if one else [*launches, *found]:
        os.kill(number, signal.SIGKILL)
    return True


@pytest.mark.slow
def test_of_four_processes_one_or_all_are_killed_over_and_over(tmp_path):
    generator, landed = np.random.default_rng(8), 0
    finish(LAUNCH, tmp_path / "whole")
    whole = ended(tmp_path / "whole")
    while landed < FOUR:
        folder = tmp_path / f"after {landed}"
        process = start(LAUNCH, folder, again=True)
        while process.poll() is None and landed < FOUR:
            landed += killed(process, folder, generator)
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
        assert ended(folder) == whole


def test_every_aim_is_there():
    """A phase whose function has another name would never be hit."""
    for module, path, *_ in AIMS.values():
        assert callable(operator.attrgetter(path)(importlib.import_module(module)))
