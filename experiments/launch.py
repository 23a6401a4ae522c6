r"""Starts an experiment in several local processes on the CPU, to test or try multi-process runs.

    python -m experiments.launch --processes=2 -- experiments.cd_grab --run=mesh --workers=2

Each process has one device, unless XLA_FLAGS says otherwise, and its own workers' data; they
communicate over gloo. Process 0 prints to stdout, the others to stderr. Ctrl-C or SIGTERM asks all
processes to stop; a second one kills them. If a process fails, launch names it, ends the others and
returns its exit code; give the command again to resume from the last complete checkpoint. On Linux
the processes end with launch, however it ends; elsewhere they outlive its SIGKILL. On a cluster the
scheduler does this work: see docs/use/clusters.md.
"""

import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from absl import flags

from experiments import entry
from syncopate.refusals import UserError

PER_CORE = 8
GRACE = 5.0  # seconds that the others get once one has failed; gloo has no timeout


def launch(command: Sequence[str], processes: int) -> int:
    """Returns the first failure's exit code, 128 + n if signal n ended that process; 0 if none."""
    if not command:
        raise UserError("no experiment: pass --processes=2 -- experiments.NAME --run=mesh")
    cores = os.cpu_count() or 1
    if processes > PER_CORE * cores:
        raise UserError(
            f"--processes is {processes}: each loads JAX, and {cores} cores run at most "
            f"{PER_CORE * cores} of them. Pass fewer, or start them on several machines."
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    xla = os.environ.get("XLA_FLAGS", "")
    xla = xla if entry.DEVICES in xla else f"{xla} {entry.DEVICES}=1"
    environment = {"JAX_PLATFORMS": "cpu", **os.environ, "XLA_FLAGS": xla}
    # Pass -P unless the current folder is on this process's own path.
    isolated = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *isolated, "-m", *command, f"--num_processes={processes}"]
    running, asked = [], []

    def send(number):
        for process in running:
            if process.poll() is None:
                process.send_signal(number)

    def ask(number, frame):
        asked.append(number)
        send(signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, ask)
    try:
        for number in range(processes):
            process_flags = [f"--coordinator_address=127.0.0.1:{port}", f"--process_id={number}"]
            out = sys.stderr if number else None
            # In its own session, so that the terminal's Ctrl-C reaches it only through us.
            options = {"env": environment, "stdout": out, "start_new_session": True}
            options["preexec_fn"] = _ends_with(os.getpid())
            running.append(subprocess.Popen([*command, *process_flags], **options))
        return _first_failure(running, send)
    finally:
        send(signal.SIGKILL)


def _ends_with(parent: int) -> Callable[[], None] | None:
    """What a child of Linux calls before its program: SIGKILL once this process is gone."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # loaded before the fork

    def bind():
        prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # gone already
            os._exit(128 + signal.SIGKILL)

    return bind


def _first_failure(running, send) -> int:
    """Waits for all processes, and ends them once one has failed."""
    first, until = 0, math.inf
    while True:
        codes = [process.poll() for process in running]
        for number, code in enumerate(codes):
            if not code or first:
                continue
            first, until = 128 - code if code < 0 else code, time.monotonic() + GRACE
            print(f"[launch] process {number} ended with exit code {first}", file=sys.stderr)
        if None not in codes:
            return first
        if time.monotonic() > until:
            send(signal.SIGKILL)
        time.sleep(0.05)


def define_flags(values: flags.FlagValues) -> None:
    bounds = {"lower_bound": 1, "upper_bound": 2**31 - 1, "flag_values": values}
    flags.DEFINE_integer("processes", 2, "number of processes", **bounds)
    values.register_key_flag_for_module(entry.THIS_COMMAND, values["processes"])


if __name__ == "__main__":
    run = lambda values, rest: launch(rest, values.processes)  # noqa: E731
    entry.main(define_flags, run, rest=True)
