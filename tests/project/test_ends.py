"""Exit codes and messages equal those of docs/use/exit_codes.md."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest

from experiments import lock
from experiments.distributed import processes
from tests.commands import ROOT, SHORT, train_run

PAGE = (ROOT / "docs" / "use" / "exit_codes.md").read_text()
CODES = {int(code) for code in re.findall(r"^\| (\d+) +\|", PAGE, re.M)}


def code_of(folder, *flags):
    """The exit code that Python gives to the end of a call of `train`."""
    try:
        train_run([*SHORT, *flags], folder)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def signalled(number):
    def end(folder, monkeypatch):
        @contextlib.contextmanager
        def caught():
            yield lambda wants_to_save: (number, True)

        monkeypatch.setattr(processes, "interrupts", caught)
        return code_of(folder)

    return end


def taken(folder, monkeypatch):
    with lock.held(str(folder)):
        return code_of(folder)


def called(folder, *command):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, env=environment
    )


def broken(folder, monkeypatch):
    """An invalid flag, and a run that diverges."""
    done = called(folder, "experiments.train", "--task=cats", f"--output_dir={folder}")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: --task is cats: choose one of")
    assert code_of(folder, "--learning_rate=1e38") == done.returncode
    return done.returncode


def killed(folder, monkeypatch):
    (folder / "child.py").write_text("import os; os.kill(os.getpid(), 9)")
    return called(folder, "experiments.launch", "--processes=1", "--", "child").returncode


ENDS = {
    0: lambda folder, monkeypatch: code_of(folder),
    1: broken,
    75: taken,
    130: signalled(signal.SIGINT),
    137: killed,
    143: signalled(signal.SIGTERM),
}


@pytest.mark.parametrize("code", sorted(CODES | set(ENDS)))
def test_runs_end_with_the_exit_codes_of_the_page(code, tmp_path, monkeypatch):
    assert code in CODES and ENDS[code](tmp_path, monkeypatch) == code


def test_messages_on_the_page_are_in_the_code():
    rows = re.findall(r"^\| (.*?) +\|", PAGE.split("## Messages")[1].split("##")[0], re.M)[2:]
    assert len(rows) > 8
    sources = [path.read_text() for path in (ROOT / "experiments").glob("**/*.py")]
    code = re.sub(r'"\s*f?"', "", re.sub(r"\{[^{}]*\}", "", "\n".join(sources)))
    code = " ".join(code.split())
    for row in rows:
        for part in re.split(r"\.\.\.|\(.*?\)|\b[NnP]\b", row):
            assert part.strip() in code, part
