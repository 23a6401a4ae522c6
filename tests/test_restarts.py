"""Real runs under the supervisor: `pytest -m slow -n 0 tests/test_restarts.py`, minutes."""

import os
import pathlib
import re
import signal
import time

import numpy as np
import pytest

from tests.test_train_processes import RUN, TWO_DEVICES, finish, has_checkpoint, records, start

SUPERVISED = ["experiments.launch", "--processes=2", "--restarts=2", "--deadline=60"]


def children(pid):
    """The processes that a launch has started, in their order; of Linux."""
    return [int(n) for n in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def disturbed(folder, number, *options):
    """What a supervised run says of which a signal reaches process 1 after the first checkpoint."""
    process = start([*SUPERVISED, *options, "--", *RUN, *TWO_DEVICES], folder)
    until = time.monotonic() + 200
    while not has_checkpoint(folder):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(children(process.pid)[1], number)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The records of the run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    finish(["experiments.launch", "--processes=2", "--", *RUN, *TWO_DEVICES], folder)
    return records(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number,said", [(signal.SIGKILL, "was ended by SIGKILL"), (signal.SIGSTOP, "is stopped and")]
)
def test_a_restarted_run_is_the_same_run(tmp_path, whole, number, said):
    output = disturbed(tmp_path, number)
    assert (
        f"process 1 {said}" in output
        and "restart 1 of 2, from the last whole checkpoint; processes: 2" in output
    )
    assert "Goes on from the checkpoint of step" in output
    kept, computed = map(int, re.search(r"goodput: (\d+) of (\d+)", output).groups())
    assert kept == 6000 <= computed
    assert records(tmp_path) == whole


@pytest.mark.slow
def test_one_process_goes_on_where_two_have_been(tmp_path, whole):
    output = disturbed(tmp_path, signal.SIGKILL, "--min_processes=1")
    assert "restart 1 of 2, from the last whole checkpoint; processes: 1" in output
    assert "Goes on from the checkpoint of step" in output
    for a, b in zip(records(tmp_path), whole, strict=True):
        assert (a["step"], a["loads"], a["rounds"]) == (b["step"], b["loads"], b["rounds"])
        np.testing.assert_allclose(a["train/loss"], b["train/loss"], rtol=1e-5)


LONG = [
    "experiments.train", "--order=cd_grab", "--sync=qsr", "--echo=diffusion_cosine",
    "--total_steps=40000", "--evaluations=8", "--checkpoint_every=500", "--units_per_step=3",
    "--workers=4", "--run=mesh",
]  # fmt: skip
PUNISHED, EVERY = 600.0, 45.0  # seconds; a start of four processes takes half of the latter here


@pytest.mark.slow
def test_a_run_that_is_punished_is_the_same_run(tmp_path):
    """Every 45 s one of four processes, at random, is killed or stopped, for ten minutes."""
    finish(["experiments.train", *LONG[1:-1], "--run=vmap"], tmp_path / "alone")
    supervised = ["experiments.launch", "--processes=4", "--restarts=100", "--deadline=60"]
    process = start([*supervised, "--", *LONG], tmp_path / "punished")
    generator, begun, signals = np.random.default_rng(0), time.monotonic(), 0
    while process.poll() is None and time.monotonic() < begun + PUNISHED:
        time.sleep(EVERY)
        victims = children(process.pid) if process.poll() is None else []
        if len(victims) == 4:
            number = generator.choice([signal.SIGKILL, signal.SIGSTOP])
            os.kill(victims[generator.integers(4)], number)
            signals += 1
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    print(signals, "signals;", re.search(r"goodput: .*", output).group())
    assert signals >= 3
    for a, b in zip(
        records(tmp_path / "punished"), records(tmp_path / "alone"), strict=True
    ):  # on four devices, not one: the order of sums differs
        assert (a["step"], a["loads"], a["rounds"]) == (b["step"], b["loads"], b["rounds"])
        np.testing.assert_allclose(a["train/loss"], b["train/loss"], rtol=1e-3)
