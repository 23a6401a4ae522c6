"""A launch of several processes without JAX, and the files of docs/launching."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import threading
import time

import pytest
import yaml
from absl import flags

from experiments import launch, train

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "launching.md").read_text()
HEAD = """
import os, signal, sys, time
number = int(sys.argv[-1].removeprefix("--process_id="))
"""


def started(folder, source, **options):
    """(exit code, seconds) of two processes that run `source`, a module with no import of JAX."""
    (folder / "child.py").write_text(HEAD + source)
    environment = os.environ | {"PYTHONPATH": str(folder), "HERE": str(folder)}
    begun = time.monotonic()
    code = launch.launch("child", processes=2, environment=environment, **options)
    return code, time.monotonic() - begun


FAILS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that waits for a collective
if number == 1:
    sys.exit(7)
time.sleep(60)
"""


@pytest.mark.parametrize("source,expected", [(FAILS, 7), ("os.kill(os.getpid(), 9)", 128 + 9)])
def test_a_failing_process_is_named_and_ends_the_others(
    tmp_path, capfd, monkeypatch, source, expected
):
    monkeypatch.setattr(launch, "GRACE", 0.2)
    code, seconds = started(tmp_path, source)
    assert code == expected and seconds < 20
    said = re.search(rf"\[launch\] process (\d) ended with exit code {expected}\n",
                     capfd.readouterr().err)  # fmt: skip
    assert said and (expected != 7 or said[1] == "1")


def test_processes_are_told_of_each_other_and_their_output_is_told_apart(tmp_path, capfd):
    source = "print(*sys.argv[1:], os.environ['XLA_FLAGS'], os.environ['JAX_PLATFORMS'])"
    assert started(tmp_path, source)[0] == 0
    time.sleep(0.2)  # the other's last line is carried by a thread
    out, err = capfd.readouterr()
    address, count, number, *_ = out.split()
    assert address.startswith("--coordinator_address=127.0.0.1:")
    assert (count, number) == ("--num_processes=2", "--process_id=0")
    assert err.strip() == "[1] " + out.strip().replace("id=0", "id=1")
    with pytest.raises(ValueError, match="--processes is 0: start at least 1"):
        launch.launch("child", processes=0)


WAITS = """
def handle(*_):
    open(f"{os.environ['HERE']}/asked{number}", "w").close()
signal.signal(signal.SIGTERM, handle)
open(f"{os.environ['HERE']}/up{number}", "w").close()
while True:
    time.sleep(0.05)
"""


def test_the_first_signal_asks_all_processes_and_the_second_kills(tmp_path):
    def interrupt():
        for name in ("up", "asked"):
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                if all((tmp_path / f"{name}{n}").exists() for n in range(2)):
                    break
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    code, seconds = started(tmp_path, WAITS)
    thread.join()
    assert code == 128 + 9 and seconds < 20
    assert all((tmp_path / f"asked{n}").exists() for n in range(2))
    assert signal.getsignal(signal.SIGINT) is before


def train_flags(text):
    """The parsed flags of the `experiments.train` of a script."""
    command = re.search(r"experiments\.train (.*?--output_dir=[^\s'\"]+)", text, re.S)[1]
    values = flags.FlagValues()
    train.define_flags(values)
    values(["train", *shlex.split(command.replace("\\\n", " "))])
    return values


def test_the_commands_of_the_page_have_flags_that_exist():
    found = re.findall(r"^\S.*experiments\.launch (.*?)\n```", PAGE, re.S | re.M)
    assert found
    for text in found:
        before, _, _ = text.partition(" -- ")
        values = flags.FlagValues()
        launch.define_flags(values)
        assert values(["launch", *before.split()])
        assert train_flags(text).run == "mesh"


@pytest.mark.parametrize("name", ["train.sbatch", "tpu_pod.sh", "jobset.yaml"])
def test_a_file_starts_a_run_with_flags_that_exist(name):
    path = DOCS / "launching" / name
    assert f"launching/{name}" in PAGE
    values = train_flags(path.read_text().replace("$JOB_COMPLETION_INDEX", "3"))
    assert (values.run, values.checkpoint_every) == ("mesh", 500)
    if name != "jobset.yaml":
        subprocess.run(["bash", "-n", path], check=True)


def test_a_job_set_has_a_pod_for_every_process():
    found = yaml.safe_load((DOCS / "launching" / "jobset.yaml").read_text())
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    [job] = found["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]
    [container] = pods["template"]["spec"]["containers"]
    values = train_flags(container["command"][-1].replace("=$JOB_COMPLETION_INDEX", "=3"))
    assert pods["completionMode"] == "Indexed" and job["replicas"] == 1
    assert pods["parallelism"] == pods["completions"] == values.num_processes == values.workers
    name = found["metadata"]["name"]
    assert values.coordinator_address == f"{name}-{job['name']}-0-0.{name}:8476"


def scripted(tmp_path, name, *arguments, codes, **environment):
    """(exit code, what was called) of a script whose cluster's commands end with these codes."""
    log, ends = tmp_path / "log", tmp_path / "ends"
    log.write_text("")
    ends.write_text("".join(f"{code}\n" for code in codes))
    for command in ("srun", "scontrol", "gcloud"):
        path = tmp_path / command
        path.write_text(f"""#!/bin/bash
echo {command} "$@" >> {log}
if [[ "$*" == *experiments.train* ]]; then
  code=$(head -n 1 {ends}); sed -i 1d {ends}; exit $code
fi
""")
        path.chmod(0o755)
    environment |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = DOCS / "launching" / name
    done = subprocess.run(["bash", script, *arguments], env=environment, capture_output=True)
    return done.returncode, log.read_text()


def test_slurm_is_asked_for_a_restart_a_few_times(tmp_path):
    job = {"SLURM_JOB_ID": "7"}
    code, log = scripted(tmp_path, "train.sbatch", codes=[9], **job)
    assert code == 9 and log.startswith("srun --kill-on-bad-exit=1 python -m experiments.train")
    assert "scontrol requeue 7" in log
    code, log = scripted(tmp_path, "train.sbatch", codes=[9], SLURM_RESTART_COUNT="3", **job)
    assert code == 9 and "scontrol" not in log
    assert scripted(tmp_path, "train.sbatch", codes=[0], **job)[0] == 0


def test_a_pod_starts_all_hosts_again_after_one_has_failed(tmp_path):
    code, log = scripted(tmp_path, "tpu_pod.sh", "pod", "zone", codes=[1, 1, 0])
    assert code == 0 and log.count("experiments.train --run") == 3
    assert log.count("ssh pod --zone=zone --worker=all") == 5  # what is left is ended twice
    assert scripted(tmp_path, "tpu_pod.sh", "pod", "zone", codes=[1] * 4)[0] == 1
