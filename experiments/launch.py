r"""Starts an experiment in several local processes on the CPU, for tests and for a look.

    python -m experiments.launch --processes=2 -- experiments.cd_grab --run=mesh --workers=2

Each has one device, unless XLA_FLAGS says otherwise, and its workers' data; gloo carries what they
exchange. (Two CPU devices of one process can each wait for a collective that the other has not
begun.) The output is that of process 0; lines of the others go to stderr, with their number.
Ctrl-C or SIGTERM asks all processes to end, a second one ends them. On a cluster SLURM's srun does
this work: see experiments/processes/distributed.py.
"""

import contextlib
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

GRACE = 5.0  # seconds that the others have once one has failed; gloo lets them wait for ever
DEVICES = "--xla_force_host_platform_device_count"

FLAGS = flags.FLAGS


def launch(
    module: str,
    arguments: Sequence[str] = (),
    *,
    processes: int,
    environment: Mapping[str, str] = os.environ,
    grace: float = GRACE,
    stdout=None,
    folder: str | os.PathLike | None = None,
) -> int:
    """Runs `python -m module` in several processes that know of each other; waits for all.

    Each is given the arguments, --coordinator_address, --num_processes and --process_id.

    Args:
      module: an experiment; arguments: its flags.
      processes: how many, >= 1.
      environment: of all of them; the CPU and one device each are chosen where it chooses nothing.
      grace: seconds after which the others are killed, once one has failed.
      stdout: where process 0 prints; folder: in which they run; None: as this process.

    Returns:
      The exit code of the first process that failed, 128 + n where signal n ended it; else 0.
    """
    if processes < 1:
        raise ValueError(f"--processes is {processes}: start at least 1.")
    xla_flags = environment.get("XLA_FLAGS", "")
    if DEVICES not in xla_flags:
        xla_flags = f"{xla_flags} {DEVICES}=1".strip()
    environment = {"JAX_PLATFORMS": "cpu", **environment, "XLA_FLAGS": xla_flags}
    shared = [f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={processes}"]
    command = [sys.executable, "-m", module, *arguments, *shared]
    running = []
    try:
        with _forwarded_signals(running):
            for number in range(processes):
                running.append(_start(command, number, environment, stdout, folder))
            return _wait(running, grace)
    finally:
        _send(running, signal.SIGKILL)
        for process in running:
            process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _start(command, number, environment, stdout, folder):
    """Process `number`, in a session of its own: the terminal's Ctrl-C reaches it through us."""
    outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        [*command, f"--process_id={number}"], text=True, cwd=folder, env=environment,
        start_new_session=True, **outputs if number else {"stdout": stdout},
    )  # fmt: skip
    if number:
        threading.Thread(target=_relay, args=(process.stdout, number), daemon=True).start()
    return process


def _relay(lines, number):
    with lines:
        for line in lines:
            sys.stderr.write(f"[{number}] {line}")
            sys.stderr.flush()


@contextlib.contextmanager
def _forwarded_signals(running):
    """While the body runs: the first SIGINT or SIGTERM ends the processes, the second kills."""
    asked = []

    def handle(number, frame):
        del frame
        _send(running, signal.SIGKILL if asked else signal.SIGTERM)
        asked.append(number)

    before = {n: signal.signal(n, handle) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(running, number):
    for process in running:
        if process.poll() is None:
            process.send_signal(number)


def _wait(running, grace) -> int:
    """Waits for all, or `grace` seconds after a failure for what is left; the exit code."""
    first, deadline = 0, math.inf
    while True:
        left = [process for process in running if process.poll() is None]
        if not first and (first := next((p.returncode for p in running if p.returncode), 0)):
            deadline = time.monotonic() + grace
        if not left or time.monotonic() > deadline:
            return 128 - first if first < 0 else first
        time.sleep(0.05)


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
