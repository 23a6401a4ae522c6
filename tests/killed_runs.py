"""Starts experiments that end by SIGKILL at a chosen moment; for test_kills.

`python -m tests.killed_runs` imports what all experiments need, once, and then makes a process per
line of JSON that it reads, by fork: starts are what kills cost. It prints the process's number and,
when that has ended, its exit status.
"""

import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import subprocess
import sys
import threading

from tests.commands import ROOT, environment

IMPORTED = ("echoing", "qsr", "train")
# Where a kill is aimed at: phase -> (module, what is called then, seconds that this goes on for,
# below which of its calls).
AIMS = {
    "taking the folder": ("experiments.cluster.lock", "_take", 0.001, 1),
    "reading the folder": ("experiments.results.records", "open_folder", 0.002, 1),
    "choosing a checkpoint": ("experiments.training.checkpoint", "settled", 0.1, 1),
    "restoring": ("experiments.training.checkpoint", "restore", 0.1, 1),
    "a sync": ("experiments.training.loop", "carry_out", 0.001, 30),
    "an epoch's end": ("experiments.training.loop", "carry_out", 0.001, 12),
    "a record": ("experiments.training.run", "Recorder.record", 0.002, 12),
    "a save": ("experiments.training.checkpoint", "save", 0.1, 6),
    "writing a file": ("experiments.cluster.files", "write_whole", 0.001, 6),
    "removing checkpoints": ("shutil", "rmtree", 0.002, 2),
    "writing the model": ("experiments.training.checkpoint", "export", 0.05, 1),
}
WANTED = {  # of calls that do other things too
    "a sync": lambda program, state, segment, *_: segment.rounds,
    "an epoch's end": lambda program, state, segment, *_: segment.kind.epoch_end,
    "removing checkpoints": lambda path, *_, **options: "checkpoints" in str(path),
}


def aim(phase: str, call: int, delay: float) -> None:
    """Kills this process while a call of that phase goes on."""
    name, path, seconds, _ = AIMS[phase]
    *owners, function = path.split(".")
    owner = importlib.import_module(name)
    for part in owners:
        owner = getattr(owner, part)
    real, wanted, calls = getattr(owner, function), WANTED.get(phase), iter(range(call))

    def killed(*args, **options):
        if (wanted is None or wanted(*args, **options)) and next(calls, None) is None:
            threading.Timer(delay * seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return real(*args, **options)

    setattr(owner, function, killed)


def child(request: dict) -> None:
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(log, standard)
    sys.argv = [request["module"], *request["arguments"]]
    if request["aim"]:
        aim(*request["aim"])
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def serve() -> None:
    for name in IMPORTED:
        importlib.import_module(f"experiments.{name}")
        del sys.modules[f"experiments.{name}"]  # it is run as __main__
    importlib.import_module("orbax.checkpoint")
    print("ready", flush=True)
    for line in sys.stdin:
        if not (pid := os.fork()):
            child(json.loads(line))
            sys.exit()
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


class Forks:
    """The client of such a process."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.killed_runs"], cwd=ROOT, env=environment(),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self._process.stdout.readline() == "ready\n"

    def run(self, module, arguments, log: pathlib.Path, *, after=None, aimed=None) -> int:
        """The exit status of an experiment.

        Args:
          after: seconds until SIGKILL; aimed: (phase, which call of it, share of its seconds).
        """
        request = {"module": module, "arguments": arguments, "log": str(log), "aim": aimed}
        self._process.stdin.write(json.dumps(request) + "\n")
        pid = int(self._process.stdout.readline())
        if after is not None:
            ended, _, _ = select.select([self._process.stdout], [], [], after)
            if not ended:
                os.kill(pid, signal.SIGKILL)
        return int(self._process.stdout.readline())

    def close(self):
        with self._process:  # closes its pipes, and waits
            pass


if __name__ == "__main__":
    serve()
