"""Progress where standard error is not a terminal: plain lines, ten seconds apart."""

import subprocess
import sys

import pytest
import tqdm.std as tqdm_module
from tqdm import tqdm

from experiments import progress
from experiments.report import records
from tests.commands import ROOT, SHORT, train_run


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, in seconds."""
    now = [100.0]
    monkeypatch.setattr(tqdm_module, "time", lambda: now[0])
    return now


def test_a_line_is_written_every_ten_seconds(clock, capsys):
    with progress.bar(total=2000, initial=800, unit="step") as bar:
        bar.set_description("CD-GraB, seed 0")
        for second in range(60):
            clock[0] += 1
            progress.note(bar, {"train/batch_loss": 0.5, "seconds": 2.0, "step": 10}, examples=64)
            bar.update(10)
            assert bar.n == 810 + 10 * second
    text = capsys.readouterr().err
    lines = text.splitlines()
    assert len(lines) == 7 and "\r" not in text and lines[0] == "step 800 of 2,000"
    assert lines[1] == (
        "CD-GraB, seed 0: step 900 of 2,000, 01:50 left, loss=0.5000, examples/s=320"
    )


@pytest.mark.parametrize(
    "items,expected",
    [
        (["a", "b", "c"], "cells: run 0 of 3\ncells: run 2 of 3, 00:07 left\n"),
        (iter("abc"), "cells: run 0\ncells: run 2\n"),
    ],
)
def test_a_loop_over_items_is_counted_too(clock, capsys, items, expected):
    for _ in progress.bar(items, unit="run", desc="cells"):
        clock[0] += 7
    assert capsys.readouterr().err == expected


def test_a_terminal_has_a_bar(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.bar(total=1) as bar:
        assert isinstance(bar, tqdm)


def test_a_run_is_noted_whenever_the_host_looks_at_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    train_run([*SHORT, "--evaluations=1"], tmp_path)
    written = capsys.readouterr()
    assert written.err.count("step ") > len(records.read(str(tmp_path / "metrics.jsonl")))
    begins = [line.split()[0] for line in written.err.splitlines()[:3]]
    assert begins == ["Preparing", "Compiling", "step"], "before data, compilation and steps"


def test_a_command_says_that_it_loads_before_it_imports_jax():
    code = (
        "import sys; from absl import flags; from experiments import entry\n"
        "def define(v): flags.DEFINE_integer('process_id', None, '', flag_values=v)\n"
        "entry.check_jax = lambda: print(*sys.modules)\nentry.main(define, lambda values: None)"
    )
    for flags, expected in ([], "Loading JAX and the experiment\n"), (["--process_id=1"], ""):
        command = [sys.executable, "-c", code, *flags]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stderr == expected and not {"jax", "numpy"} & {*done.stdout.split()}
