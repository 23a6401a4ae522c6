"""Launching several processes, here without JAX, and the files of docs/use/launching."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest
import yaml

from experiments import launch, train
from tests.commands import ROOT, children, parsed
from tests.waiting import wait_for

USE = pathlib.Path(__file__).parents[2] / "docs" / "use"
PAGE = (USE / "clusters.md").read_text()
HEAD = """
import os, signal, sys, time
number = int(sys.argv[-1].removeprefix("--process_id="))
"""


LAUNCH = ["-m", "experiments.launch", "--processes=2", "--"]
QUICK = "from experiments import launch; launch.GRACE = 0.2; exit(launch.launch(['child'], 2))"


def started(folder, source, launch=LAUNCH):
    """Two processes that run `source`, a module with no import of JAX."""
    (folder / "child.py").write_text(HEAD + source)
    path = f"{folder}{os.pathsep}{ROOT}"
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.Popen(
        [sys.executable, *launch, "child", "--flag"],
        env=environment | {"PYTHONPATH": path},
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


FAILS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that waits for a collective
if number == 1:
    sys.exit(7)
time.sleep(60)
"""
DIES = "os.kill(os.getpid(), 9) if number else print(*sys.argv[1:], os.environ['XLA_FLAGS'])"


@pytest.mark.parametrize("source,code", [(FAILS, 7), (DIES, 128 + 9)])
def test_a_failing_process_is_named_and_ends_the_others(tmp_path, source, code):
    process = started(tmp_path, source, LAUNCH if source == DIES else ["-c", QUICK])
    out, err = process.communicate(timeout=50)  # less than one of them would sleep
    assert process.returncode == code
    assert err.count(f"[launch] process 1 ended with exit code {code}\n") == 1
    if source == DIES:  # process 0 was told of the other
        *flag, count, address, number, xla = out.split()
        assert (*flag, count, number) == ("--flag", "--num_processes=2", "--process_id=0")
        assert address.startswith("--coordinator_address=127.0.0.1:") and xla.endswith("count=1")


WAITS = """
signal.signal(signal.SIGTERM, lambda *_: open(f"asked{number}", "w").close())
open(f"up{number}", "w").close()
while True:
    time.sleep(0.05)
"""


def test_more_processes_than_the_cores_can_run_are_refused(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", None)  # none is started
    with pytest.raises(ValueError, match="--processes is 17: .* 2 cores run at most 16 of them"):
        launch.launch(["child"], 17)


def test_the_first_signal_asks_all_processes_and_the_second_kills(tmp_path):
    process = started(tmp_path, WAITS)
    for name in ("up", "asked"):
        wait_for(lambda name=name: all((tmp_path / f"{name}{n}").exists() for n in range(2)))
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 128 + 9


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux ends them")
def test_what_kills_launch_ends_its_processes(tmp_path):
    process = started(tmp_path, WAITS)
    wait_for(lambda: all((tmp_path / f"up{n}").exists() for n in range(2)))
    running = children(process.pid)
    assert len(running) == 2
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: not any(alive(pid) for pid in running))


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def train_flags(text):
    """The parsed flags of a script's call of `experiments.train`."""
    command = re.search(r"experiments\.train (.*?--output_dir=[^\s'\"]+)", text, re.S)[1]
    return parsed(train, *shlex.split(command.replace("\\\n", " ")))


def test_the_command_on_the_page_uses_known_flags():
    result = re.findall(r"^python -m experiments.launch [^\n]* -- (.*?)\n```", PAGE, re.S | re.M)
    assert [train_flags(text).run for text in result] == ["mesh"]


@pytest.mark.parametrize("name", ["train.sbatch", "tpu_pod.sh", "jobset.yaml"])
def test_a_script_starts_a_run_with_known_flags(name):
    path = USE / "launching" / name
    assert f"launching/{name}" in PAGE
    values = train_flags(path.read_text().replace("$JOB_COMPLETION_INDEX", "3"))
    assert (values.run, values.checkpoint_every) == ("mesh", 500)
    if name != "jobset.yaml":
        assert values.coordinator_address == "auto"
        subprocess.run(["bash", "-n", path], check=True)


def test_a_job_set_has_one_pod_per_process():
    result = yaml.safe_load((USE / "launching" / "jobset.yaml").read_text())
    [job] = result["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    [container] = pods["template"]["spec"]["containers"]
    values = train_flags(container["command"][-1].replace("=$JOB_COMPLETION_INDEX", "=3"))
    assert pods["parallelism"] == pods["completions"] == values.num_processes == values.workers
