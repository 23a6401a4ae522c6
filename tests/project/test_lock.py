"""Locks of output folders: one run at a time, its owner, and crashes."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments import lock, progress
from experiments.trainer import checkpoint
from tests.commands import ROOT, SHORT, records, train_run

HOLDER = """
import sys, time
from experiments import lock
with lock.held(sys.argv[1]):
    print("held", flush=True)
    time.sleep(600)
"""


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_second_run_is_refused_and_the_lock_of_a_crash_is_taken_over(tmp_path, capsys):
    """Another process holds the folder, and is then killed."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as ended:
            train_run([*SHORT, "--overwrite"], tmp_path)
        assert ended.value.code == lock.BUSY == 75
        output = capsys.readouterr().err
        who = f"process {holder.pid} on {socket.gethostname()}"
        assert f"is taken by another run ({who}" in output
        assert "choose another --output_dir" in output
        assert contents(tmp_path) == before and holder.poll() is None
        holder.kill()
    assert contents(tmp_path) == before
    assert take(tmp_path)["pid"] == os.getpid()
    assert contents(tmp_path)[lock.NAME] == b""


def left(folder, **fields):
    owner = {"host": socket.gethostname(), "pid": 2**22 + 1, "since": "then"}
    (folder / lock.NAME).write_text(json.dumps(owner | fields))


def take(folder):
    with lock.held(str(folder)):
        return json.loads((folder / lock.NAME).read_text())


def test_a_lock_is_respected_unless_the_kernel_shows_it_is_stale(tmp_path, monkeypatch, capsys):
    (tmp_path / lock.NAME).write_text('{"host": ')  # cut in the crash
    take(tmp_path)
    left(tmp_path, host="elsewhere")
    with pytest.raises(SystemExit):
        take(tmp_path)
    output = capsys.readouterr().err
    assert (
        "on elsewhere, since then" in output and "If that process no longer runs, delete" in output
    )
    monkeypatch.setattr(lock, "_lock", lambda file: None)  # a file system without locks
    left(tmp_path)
    with pytest.raises(SystemExit):
        take(tmp_path)
    (tmp_path / lock.NAME).unlink()
    assert take(tmp_path)["pid"] == take(tmp_path)["pid"] == os.getpid()


def deleted(path):
    path.unlink()


def taken(path):
    """By a run elsewhere, on a file system that does not share its locks."""
    path.unlink()
    left(path.parent, host="elsewhere")


def noted(monkeypatch, act):
    """Something happens after the second record."""
    patched = lambda bar, record, *, examples: record["step"] == 12 and act()  # noqa: E731
    monkeypatch.setattr(progress, "note", patched)


@pytest.mark.parametrize(
    "act,expected,every", [(deleted, "is gone", 7), (taken, "belongs to .* on elsewhere", 0)]
)
def test_a_run_whose_lock_is_lost_writes_nothing_more(
    tmp_path, monkeypatch, finished, act, expected, every
):
    """No checkpoint where one comes first, and no record; the next run ends as any other."""
    path, command = tmp_path / lock.NAME, [*SHORT, f"--checkpoint_every={every}"]
    with monkeypatch.context() as patch:
        noted(patch, lambda: act(path))
        with pytest.raises(
            OSError, match=f"lock.json', the lock of this run, {expected}.* ends here"
        ):
            train_run(command, tmp_path)
    assert checkpoint.steps_of(tmp_path / "checkpoints") == [7] * bool(every)
    assert records(tmp_path) == records(finished)[:2]
    assert path.exists() == (act is taken), "another run's lock stays"
    path.unlink(missing_ok=True)
    train_run(command, tmp_path)
    assert records(tmp_path) == records(finished)


def test_one_of_many_concurrent_runs_gets_the_folder(tmp_path, capsys):
    """Repeatedly, so that releases and takes overlap. Locks belong to open files, not processes."""
    busy = tmp_path / "busy"

    def ask(_):
        try:
            with lock.held(str(tmp_path)):
                os.close(os.open(busy, os.O_CREAT | os.O_EXCL))  # fails where another is inside
                busy.unlink()
                return 1
        except SystemExit:
            return 0

    with ThreadPoolExecutor(4) as pool:
        won = sum(pool.map(ask, range(1000)))
    assert 0 < won < 1000 and "is taken by another run" in capsys.readouterr().err
