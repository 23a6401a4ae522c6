"""One run at a time in an output folder: locks, who holds them, and what a crash leaves."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time

import pytest

from experiments.processes import lock
from tests.test_studies import RUN, SMALL, train_run

ROOT = pathlib.Path(__file__).resolve().parents[1]
HOLDER = """
import sys, time
from experiments.processes import lock
with lock.held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""
SHORT = [*(a for a in SMALL if "seeds" not in a and "rates" not in a), *RUN, "--learning_rate=0.2"]


@pytest.fixture
def holder(tmp_path):
    """Another process that has the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_second_run_ends_and_says_why_and_the_first_goes_on(holder, tmp_path, capsys):
    before = contents(tmp_path)
    for flags in ([], ["--overwrite"]):
        with pytest.raises(SystemExit) as ended:
            train_run([*SHORT, *flags], tmp_path)
        assert ended.value.code == lock.BUSY == 75
        said = capsys.readouterr().err
        assert f"is taken by another run (process {holder.pid} on {socket.gethostname()}" in said
        assert "choose another --output_dir" in said
    assert contents(tmp_path) == before and holder.poll() is None


def test_a_crash_leaves_a_lock_that_is_taken_over(holder, tmp_path, capsys):
    holder.kill()
    holder.wait()
    assert (tmp_path / lock.NAME).exists()
    train_run(SHORT, tmp_path)
    assert f"Takes over the folder of process {holder.pid}" in capsys.readouterr().out
    assert not (tmp_path / lock.NAME).exists()


def left(folder, **fields):
    known = {"host": socket.gethostname(), "pid": os.getpid(), "started": "1", "since": "then"}
    (folder / lock.NAME).write_text(json.dumps(known | fields))


def take(folder):
    with lock.held(str(folder)):
        return json.loads((folder / lock.NAME).read_text())


@pytest.mark.parametrize("kernel", [True, None], ids=["locks", "no locks"])
def test_a_lock_is_stale_if_its_process_is_gone_or_another(tmp_path, monkeypatch, kernel):
    """A process of the same number that began at another time is another one."""
    if kernel is None:
        monkeypatch.setattr(lock, "_lock", lambda file: None)
    left(tmp_path)
    assert take(tmp_path)["pid"] == os.getpid()
    left(tmp_path, pid=2**22 + 1)
    take(tmp_path)
    (tmp_path / lock.NAME).write_text('{"host": ')  # cut in the crash
    take(tmp_path)


def test_without_locks_of_the_kernel_a_process_that_lives_is_known_by_its_beginning(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lock, "_lock", lambda file: None)
    started = lock._started(os.getpid())
    if started is None:
        pytest.skip("this system does not say when processes began")
    left(tmp_path, started=started)
    with pytest.raises(SystemExit):
        take(tmp_path)


def test_a_process_of_another_machine_may_live(tmp_path, capsys):
    left(tmp_path, host="elsewhere")
    with pytest.raises(SystemExit):
        take(tmp_path)
    said = capsys.readouterr().err
    assert "on elsewhere, since then" in said and "If that process is gone, delete" in said
    assert (tmp_path / lock.NAME).exists()


def test_of_many_that_ask_at_once_one_gets_the_folder(tmp_path):
    """Over and over, so that removing and taking meet."""
    code = (
        "import sys, os\nfrom experiments.processes import lock\n"
        "won = 0\nflag = os.path.join(sys.argv[1], 'busy')\n"
        "for _ in range(300):\n"
        "    try:\n"
        "        with lock.held(sys.argv[1]):\n"
        "            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))\n"
        "            os.remove(flag)\n"
        "            won += 1\n"
        "    except SystemExit:\n"
        "        pass\n"
        "print(won)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    found = [process.communicate(timeout=120) for process in ran]
    ends = [(p.returncode, told[-2000:]) for p, (_, told) in zip(ran, found, strict=True)]
    assert [code for code, _ in ends] == [0] * 3, f"none met another inside: {ends}"
    assert all(int(text) for text, _ in found)


def test_a_lock_that_goes_while_it_is_looked_at_is_asked_for_again(tmp_path, monkeypatch):
    """Its holder may remove it between any two calls."""
    path = str(tmp_path / lock.NAME)
    locked, taken = lock._lock, []

    def removed(file):
        free = locked(file)
        if not taken:
            os.remove(path)
        taken.append(free)
        return free

    monkeypatch.setattr(lock, "_lock", removed)
    monkeypatch.setattr(os.path, "exists", lambda path: True)  # true when it was asked
    assert take(tmp_path)["pid"] == os.getpid()
    assert len(taken) == 2


@pytest.mark.slow
def test_two_runs_in_one_folder(tmp_path):
    """Two commands: the second ends at once, the first as if it had been alone."""
    command = [sys.executable, "-m", "experiments.train", *SHORT, "--echo=none"]
    command = [*command, "--total_steps=4000", f"--output_dir={tmp_path / 'run'}"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen(command, **options)
    while not (tmp_path / "run" / "settings.json").exists():
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.01)
    second = subprocess.run(command, **options)
    assert second.returncode == lock.BUSY, second.stderr
    assert f"process {first.pid} on" in second.stderr
    assert first.wait(300) == 0
    assert not (tmp_path / "run" / lock.NAME).exists()
