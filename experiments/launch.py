r"""Starts an experiment in several local processes on the CPU, for tests and for a look.

    python -m experiments.launch --processes=2 -- experiments.cd_grab --run=mesh --workers=2

Each has one device, unless XLA_FLAGS says otherwise, and its workers' data; gloo carries what they
exchange. (Two CPU devices of one process can each wait for a collective that the other has not
begun.) The output is that of process 0; lines of the others go to stderr, with their number.
Ctrl-C or SIGTERM asks all processes to end, a second one kills them. A process that fails is named,
the others are ended, and its exit code is passed on; the same command then goes on from the last
whole checkpoint. On a cluster its scheduler does this work: see docs/launching.md.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

from absl import app, flags

GRACE = 5.0  # seconds that the others have once one has failed: gloo lets them wait for ever
DEVICES = "--xla_force_host_platform_device_count"

FLAGS = flags.FLAGS


def launch(
    module: str,
    arguments: Sequence[str] = (),
    *,
    processes: int,
    environment: Mapping[str, str] = os.environ,
    stdout=None,
    folder: str | os.PathLike | None = None,
) -> int:
    """Runs `python -m module` in several processes that know of each other; waits for all.

    Each is given the arguments, --coordinator_address, --num_processes and --process_id.

    Args:
      module: an experiment; arguments: its flags.
      processes: how many, >= 1.
      environment: of all of them; the CPU and one device each are chosen where it chooses nothing.
      stdout: where process 0 prints; folder: in which they run; None: as this process.

    Returns:
      The exit code of the first process that failed, 128 + n where signal n ended it; else 0.

    Raises:
      ValueError: for no process at all.
    """
    if processes < 1:
        raise ValueError(f"--processes is {processes}: start at least 1.")
    xla_flags = environment.get("XLA_FLAGS", "")
    if DEVICES not in xla_flags:
        xla_flags = f"{xla_flags} {DEVICES}=1".strip()
    options = {
        "env": {"JAX_PLATFORMS": "cpu", **environment, "XLA_FLAGS": xla_flags},
        "cwd": folder, "text": True,
        "start_new_session": True,  # the terminal's Ctrl-C reaches it through us
    }  # fmt: skip
    # A command that was not found by way of this folder does not look for modules in it either.
    apart = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *apart, "-m", module, *arguments]
    command += [f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={processes}"]
    running, signals = [], []

    def forward(number, frame):
        signals.append(number)
        _send(running, signal.SIGTERM if len(signals) == 1 else signal.SIGKILL)

    before = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in range(processes):
            running.append(_start([*command, f"--process_id={number}"], number, stdout, options))
        return _wait(running)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _send(running, signal.SIGKILL)


def _start(command, number, stdout, options):
    if not number:
        return subprocess.Popen(command, stdout=stdout, **options)
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, **pipe, **options)

    def relay():
        with process.stdout as lines:
            for line in lines:
                _say(f"[{number}] {line}")

    threading.Thread(target=relay, daemon=True).start()
    return process


def _say(line):
    sys.stderr.write(line)
    sys.stderr.flush()


def _send(running, number):
    for process in running:
        if process.poll() is None:
            process.send_signal(number)


def _wait(running) -> int:
    """Waits for all; ends the rest once one has failed, and returns its exit code."""
    first, until = 0, math.inf
    while True:
        codes = [process.poll() for process in running]
        number, code = next(((n, code) for n, code in enumerate(codes) if code), (0, 0))
        if code and not first:
            first, until = 128 - code if code < 0 else code, time.monotonic() + GRACE
            _say(f"[launch] process {number} ended with exit code {first}\n")
        if None not in codes:
            return first
        if time.monotonic() > until:
            _send(running, signal.SIGKILL)
        time.sleep(0.05)


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    flags.DEFINE_integer("processes", 2, "to start", lower_bound=1, flag_values=values)


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2:
        raise app.UsageError(
            "no experiment is named: python -m experiments.launch --processes=2 -- "
            "experiments.NAME --run=mesh --workers=2"
        )
    sys.exit(launch(argv[1], argv[2:], processes=FLAGS.processes))


if __name__ == "__main__":
    define_flags()
    app.run(main)
