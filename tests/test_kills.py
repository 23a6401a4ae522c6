"""A hundred kills, anywhere: a run that is started again ends bitwise as one that never was.

pytest -m slow -n 0 -s tests/test_kills.py      # half an hour; prints where kills landed

SIGKILL comes at a random moment, or while a call goes on in which something is written, read or
decided, the start again after another kill among them. Runs that end before enough kills have
landed are compared and begun anew. Of four processes one is killed, under a launch that restarts
all, or the launch with all of them.
"""

import collections
import importlib
import json
import os
import pathlib
import re
import signal
import time

import numpy as np
import pytest

from tests.killed_runs import AIMS, Forks
from tests.test_restarts import children
from tests.test_train_processes import finish, records, start

SMALL = ["--num_train=96", "--num_test=200", "--unit_size=1", "--warmup_steps=2", "--h_base=2"]
TWO = [*SMALL, "--workers=2", "--units_per_step=4"]
SHORT = ["--total_steps=60", "--evaluations=6", "--checkpoint_every=7"]
SEEDS = ["--seeds=2", "--learning_rates=0.1,0.4"]
TRAIN = [*SMALL, "--echo=diffusion_cosine", "--total_steps=240", "--evaluations=12",
         "--checkpoint_every=9"]  # fmt: skip
STUDIES = {
    "train": [*TRAIN, "--workers=4", "--units_per_step=3"],
    "cd_grab": [*TWO, *SEEDS, "--epochs=6", "--checkpoint_every=7", "--bound_every=2",
                "--arms=rr,cd_grab"],
    "qsr": [*TWO, *SEEDS, *SHORT, "--width=8", "--arms=parallel,qsr"],
    "echoing": [*TWO, *SEEDS, "--width=8", "--arms=none,diffusion", "--speeds=2", "--horizon=20",
                "--total_steps=40", "--evaluate_every=5", "--target=0.5", "--step_seconds=0.001",
                "--checkpoint_every=7"],
    "combined": [*TWO, *SHORT, "--seeds=1", "--learning_rates=0.4", "--echo_factor=2"],
    "order_rounds": [*TWO, *SEEDS, *SHORT, "--arms=rr+parallel,cd_grab+constant"],
}  # fmt: skip
KILLS = dict.fromkeys(STUDIES, 16) | {"train": 24}
FOUR = 6  # kills of each way, of four processes
ALONE = "at any time"


@pytest.fixture(scope="module")
def forks():
    server = Forks()
    yield server
    server.close()


def ended(folder):
    """What a run has found: its records without seconds, and its model if it writes one."""
    import orbax.checkpoint as ocp

    lines = sorted(json.dumps(r, sort_keys=True) for r in records(folder))
    if not (folder / "model").exists():
        assert (folder / "table.md").exists() and not list((folder / "checkpoints").glob("*"))
        return lines, None
    with ocp.StandardCheckpointer() as checkpointer:
        model = checkpointer.restore(os.path.abspath(folder / "model"))
    return lines, {name: np.asarray(leaf).tobytes() for name, leaf in model.items()}


def moment(generator, seconds):
    """How a kill is asked for: half of them at any time, half while some call goes on."""
    if generator.random() < 0.5:
        return {"after": seconds * generator.random()}
    phase = list(AIMS)[generator.integers(len(AIMS))]
    return {"aimed": (phase, int(generator.integers(AIMS[phase][-1])), float(generator.random()))}


def files(folder):
    """{checkpoint or metrics.jsonl: its size}: what grows while a run trains."""
    found = {str(path): 0 for path in folder.glob("checkpoints/**/manifest")}
    metrics = folder / "metrics.jsonl"
    return found | ({"metrics": metrics.stat().st_size} if metrics.exists() else {})


def before_it(folder, begun):
    """What a run that was killed at any time was at, by its files there and when it began."""
    now = files(folder)
    if now == begun or not now.keys() - {"metrics"}:
        return "starting again" if begun else "starting"
    names = [path.name for path in folder.rglob("*")]
    return "saving" if any("orbax-checkpoint-tmp" in name for name in names) else "training"


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_run_that_is_killed_over_and_over_is_the_same_run(name, forks, tmp_path):
    generator, module = np.random.default_rng(7), f"experiments.{name}"
    landed, again, runs = collections.Counter(), 0, 0

    def go(folder, **kill):
        arguments = [*STUDIES[name], f"--output_dir={folder}"]
        status = forks.run(module, arguments, tmp_path / "log", **kill)
        assert status in (0, -signal.SIGKILL), (tmp_path / "log").read_text()[-3000:]
        return status

    assert not go(tmp_path / "compiles")
    begun = time.monotonic()
    assert not go(tmp_path / "whole")
    seconds, whole = time.monotonic() - begun, ended(tmp_path / "whole")
    assert ended(tmp_path / "compiles") == whole
    while landed.total() < KILLS[name]:
        folder, first, status = tmp_path / f"killed {runs}", True, None
        while landed.total() < KILLS[name] and status != 0:
            kill, before = moment(generator, seconds), files(folder)
            status = go(folder, **kill)
            if status:
                known = (
                    kill["aimed"][0] if "aimed" in kill else f"{ALONE}: {before_it(folder, before)}"
                )
                landed[known] += 1
                again += not first
            first = False
        assert status == 0 or not go(folder)
        assert ended(folder) == whole
        runs += 1
    print(f"\n{name}: {landed.total()} kills in {runs} runs of {seconds:.1f} s, {again} of them of "
          f"a run that had been killed before; {dict(landed.most_common())}")  # fmt: skip
    assert landed.total() == KILLS[name] and again and len(landed) > 3


LAUNCH = ["experiments.launch", "--processes=4"]
MESH = ["--workers=4", "--run=mesh"]
TOGETHER = {
    "train": [*TRAIN, *MESH, "--units_per_step=3"],
    "qsr": [*SMALL, *MESH, *SHORT, "--units_per_step=4", "--seeds=1", "--learning_rates=0.1,0.4",
            "--width=8", "--arms=parallel,qsr"],
}  # fmt: skip


@pytest.fixture(scope="module", params=TOGETHER)
def four(request, tmp_path_factory):
    """(command of the experiment, what it finds with nobody killed)."""
    folder = tmp_path_factory.mktemp(request.param)
    command = [f"experiments.{request.param}", *TOGETHER[request.param]]
    finish([*LAUNCH, "--", *command], folder / "compiles")
    finish([*LAUNCH, "--", *command], folder / "whole")
    assert ended(folder / "compiles") == ended(folder / "whole")
    return command, ended(folder / "whole")


def killed(process, victims, folder, generator):
    """Whether a launch had started all four when their time came: then they are killed.

    Half of the times are any, of which a start takes most; the others come while they train.
    """
    until, begun = time.monotonic() + generator.uniform(3, 25), files(folder)
    if generator.random() < 0.5:
        while files(folder) == begun and process.poll() is None:
            time.sleep(0.01)
        until = time.monotonic() + generator.uniform(0, 2)
    while time.monotonic() < until and process.poll() is None:
        time.sleep(0.01)
    numbers = victims(process) if process.poll() is None else []
    for number in numbers:
        os.kill(number, signal.SIGKILL)
    return bool(numbers)


@pytest.mark.slow
def test_one_of_four_processes_is_killed_over_and_over(four, tmp_path):
    command, whole = four
    generator, landed = np.random.default_rng(8), 0

    def one(process):
        found = children(process.pid)
        return [found[generator.integers(4)]] if len(found) == 4 else []

    while landed < FOUR:
        folder = tmp_path / f"after {landed}"
        process = start([*LAUNCH, "--restarts=100", "--", *command], folder)
        while process.poll() is None and landed < FOUR:
            landed += killed(process, one, folder, generator)
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
        assert ended(folder) == whole
    print(f"\n{command[0]}: {landed} kills of one of four;", re.findall(r"goodput: .*", output))


@pytest.mark.slow
def test_four_processes_and_their_launch_are_killed_over_and_over(four, tmp_path):
    command, whole = four
    generator, landed, runs = np.random.default_rng(9), collections.Counter(), 0

    def all_of_them(process):
        found = children(process.pid)
        return [process.pid, *found] if len(found) == 4 else []

    while landed.total() < FOUR:
        folder, code = tmp_path / f"killed {runs}", None
        while code != 0:
            process = start([*LAUNCH, "--", *command], folder)
            begun = files(folder)
            if landed.total() < FOUR and killed(process, all_of_them, folder, generator):
                landed[before_it(folder, begun)] += 1
            output, _ = process.communicate(timeout=280)
            code = process.returncode
            assert code in (0, -signal.SIGKILL), output
        assert ended(folder) == whole
        runs += 1
    print(f"\n{command[0]}: {landed.total()} kills of four and their launch; {dict(landed)}")


def test_every_aim_is_there():
    """A phase whose function has another name would never be hit."""
    for module, path, *_ in AIMS.values():
        found = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
        assert callable(found) and pathlib.Path(found.__code__.co_filename).exists()
