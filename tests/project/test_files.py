"""What a disk refuses is an error with the path and what to do, and the run goes on after it."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from experiments import entry, files, lock
from experiments.report import records as records_of
from experiments.trainer import checkpoint
from tests.cases import mostly_slow
from tests.commands import ROOT, SAVED, environment, records, train_run
from tests.refused import refuses

DEEP = "[" * 10**5
NO_OBJECTS = {
    text[:9]: (lambda text=text: files.loads(text, "'x.json'"), r"^'x.json' is broken \(.*--over")
    for text in (DEEP, '{"a":' * 10**5, "[]", "null", "7", '"text"', "", "{", b"\xff", "9" * 5000)
}
test_only_objects_of_strict_json_are_read = refuses(NO_OBJECTS)


def test_numbers_that_are_not_finite_are_null():
    value = {"a": float("nan"), "b": [np.float32(np.inf), (1, np.arange(2))], 3: None}
    assert files.dumps(value) == '{"a": null, "b": [null, [1, [0, 1]]], "3": null}'


def refusing(monkeypatch, owner, name, wanted, number):
    """Calls with an argument that has `wanted` in it end in this error of the system."""
    real = getattr(owner, name)

    def call(*args, **options):
        if any(wanted in str(arg) for arg in args):
            raise OSError(number, os.strerror(number))
        return real(*args, **options)

    monkeypatch.setattr(owner, name, call)


ADVICE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "make room",
    errno.EROFS: "make it writable",
    errno.EACCES: "make it writable",
    errno.EIO: "look at that disk",
    errno.ENOENT: "bring it back",
    errno.ENAMETOOLONG: "choose another",
}


def test_no_link_is_followed_where_a_file_is_written(tmp_path):
    other, run = tmp_path / "of_another", tmp_path / "run"
    run.mkdir()
    other.write_text("kept")
    for path in (run / "table.md", run / "table.md.tmp", run / lock.NAME):
        path.symlink_to(other)
    files.write_whole(str(run / "table.md"), "new")
    assert not (run / "table.md").is_symlink() and (run / "table.md").read_text() == "new"
    assert not (run / "table.md.tmp").exists()
    with pytest.raises(OSError, match="lock.json' cannot be used .*: move away what is there"):
        with lock.held(str(run)):
            pass
    assert other.read_text() == "kept"


def again(folder):
    files.write_json(f"{folder}/settings.json", {})
    records_of.open_folder(folder, {})


READS = {
    "settings.json": lambda folder: records_of.open_folder(folder, {}),
    "metrics.jsonl": records_of.read_folder,
    "lock.json": lambda folder: lock.held(folder).__enter__(),
    "command.txt": again,
    "trackers.json": lambda folder: files.read_json(f"{folder}/trackers.json", {}),
}
KINDS = {"fifo": os.mkfifo, "folder": os.mkdir, "device": lambda at: at.symlink_to(os.devnull)}


@pytest.mark.parametrize("name,kind", [(name, kind) for name in READS for kind in KINDS])
def test_what_is_no_file_is_refused_before_it_is_read(tmp_path, name, kind):
    path, folder = tmp_path / "7" / name, tmp_path / "7"
    path.parent.mkdir(parents=True)
    if name != "metrics.jsonl":
        (folder / "metrics.jsonl").touch()
    KINDS[kind](path)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits"))
    signal.alarm(5)  # a FIFO is opened and read for ever
    try:
        with pytest.raises(OSError, match=rf"{path.name}'? .*: move"):
            READS[name](str(folder))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("number", ADVICE, ids=errno.errorcode.get)
def test_a_refused_write_leaves_the_file_as_it_was(tmp_path, monkeypatch, number):
    path = tmp_path / "table.md"
    files.write_whole(str(path), "before")
    refusing(monkeypatch, os, "replace", "table.md", number)
    with pytest.raises(OSError, match=rf"table.md' cannot be used .*: {ADVICE[number]}"):
        files.write_whole(str(path), "after")
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "before"


def test_what_tensorstore_reports_is_advised_and_what_is_elsewhere_is_not():
    for words in ("Error writing local file", "RESOURCE_EXHAUSTED: Failed writing:"):
        text = f"""{words} "/d/checkpoints/7/d/1": full [os_error_code='28']"""
        with pytest.raises(OSError, match="'/d/checkpoints/7/d/1' cannot be used .*: make room"):
            with files.advised("/d"):
                raise ValueError(text)
    with pytest.raises(ValueError, match="Failed writing"), files.advised("/e"):
        raise ValueError(text)
    with pytest.raises(ConnectionError), files.advised("/d"):
        raise ConnectionError(errno.ECONNREFUSED, "no tracker")


WRITES = {
    "a record": (files, "append", "metrics.jsonl"),
    "a checkpoint": (checkpoint, "_save", ""),
    "the owner": (files, "append", "lock.json"),
    "settings": (os, "replace", "settings.json"),
    "versions": (os, "replace", "versions.json"),
    "kept lines": (os, "replace", "metrics.jsonl"),
    "a plan": (os, "replace", "sync_plan.json"),
    "the model": (checkpoint, "export", ""),
}


@pytest.mark.parametrize("what", mostly_slow(WRITES, quick=("a checkpoint",)))
def test_a_run_continues_once_there_is_room(tmp_path, monkeypatch, finished, what):
    with monkeypatch.context() as patch:
        refusing(patch, *WRITES[what], errno.ENOSPC)
        with pytest.raises(OSError, match=rf"'{tmp_path}.*' cannot be used .*: make room"):
            train_run(SAVED, tmp_path)
    train_run(SAVED, tmp_path)
    assert records(tmp_path) == records(finished)


# Its run alone is cut. What it would leave of bytecode and of compiled programs, the other process
# and later tests would read: Python before 3.13.1 takes a file of which a part is written as whole.
FULL_FOR_ONE = """
import os, resource, sys
if any(argument == "--process_id=1" for argument in sys.orig_argv):
    sys.dont_write_bytecode = True
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1e9"
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))  # bytes of a file
"""


def test_a_disk_that_is_full_for_one_process_is_told_once_and_ends_all(tmp_path):
    """Where the others wait for it, in a barrier of orbax that it never reaches."""
    (tmp_path / "sitecustomize.py").write_text(FULL_FOR_ONE)
    command = ["experiments.train", *SAVED, "--run=mesh", f"--output_dir={tmp_path / 'run'}"]
    quick = f"from experiments import launch; launch.GRACE = 1; exit(launch.launch({command}, 2))"
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", quick],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment() | {"PYTHONPATH": path},
        timeout=240,
    )
    # Anywhere in a line: threads of the checkpoint write tracebacks of their own between ours.
    errors = re.findall("Error: (?:'/|process).*", done.stderr)
    full_disk = [text for text in errors if "cannot be used (File too large): make room" in text]
    assert (
        done.returncode == 1
        and len(full_disk) == 1
        and f"'{tmp_path / 'run'}/check" in full_disk[0]
    )
    # Whichever ends first: the one without room, or the one that has lost it.
    assert re.search("process [01] ended with exit code 1", done.stderr)
    others = {*errors} - {*full_disk}
    assert all("process 0 has lost another one" in text for text in others)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_memory_that_is_gone_is_told_in_one_line_and_ends_all_threads(monkeypatch, capsys, error):
    entry.tell(type(error), error, None)
    assert re.fullmatch("Error: .+: free memory, or ask for more.*\n", capsys.readouterr().err)
    ended = []
    monkeypatch.setattr(entry, "end_without_memory", lambda: ended.append(error))
    monkeypatch.setattr(threading, "__excepthook__", lambda thread: None)
    entry.ended(types.SimpleNamespace(exc_type=type(error), exc_value=error))
    entry.ended(types.SimpleNamespace(exc_type=KeyError, exc_value=KeyError(7)))
    assert ended == [error]


@pytest.mark.parametrize("name", ["checkpoints", pytest.param("", marks=pytest.mark.slow)])
def test_what_is_in_the_place_of_a_folder_is_named(tmp_path, finished, name):
    folder = tmp_path / "run"
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(OSError, match=rf"'{path}.*' cannot be used .*: move away"):
        train_run([*SAVED, "--overwrite"], folder)
    path.unlink()
    train_run(SAVED, folder)
    assert records(folder) == records(finished)
