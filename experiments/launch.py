r"""Starts an experiment in several local processes on the CPU, for tests and for a look.

    python -m experiments.launch --processes=2 -- experiments.cd_grab --run=mesh --workers=2

Each has one device, unless XLA_FLAGS says otherwise, and its workers' data; gloo carries what they
exchange. (Two CPU devices of one process can each wait for a collective that the other has not
begun.) The output is that of process 0; lines of the others go to stderr, with their number.
Ctrl-C or SIGTERM asks all processes to end, a second one ends them. A process that fails is named,
and the others are ended. With --restarts=3 all go on from the last whole checkpoint, up to three
times, also if one hangs (--deadline), on fewer processes if asked (--min_processes). On a cluster
SLURM does this work: see docs/launching.md.
"""

import functools
import math
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence

from absl import app, flags

from experiments.processes import group
from experiments.processes.supervisor import supervise

GRACE = 5.0  # seconds that the others have once one has failed
HANGS = 600.0  # seconds without a sign of life, where restarts are asked for
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
    restarts: int = 0,
    deadline: float = math.inf,
    min_processes: int | None = None,
) -> int:
    """Runs `python -m module` in several processes that know of each other; waits for all.

    Each is given the arguments, --coordinator_address, --num_processes and --process_id.

    Args:
      module: an experiment; arguments: its flags.
      processes: how many, >= 1.
      environment: of all of them; the CPU and one device each are chosen where it chooses nothing.
      grace: seconds after which the others are asked to end, once one has failed, and again
        before they are killed.
      stdout: where process 0 prints; folder: in which they run; None: as this process.
      restarts: how often all are started again after one has failed; min_processes: the least
        number of them that then share the devices; None: as many as before.
      deadline: seconds after which a process without a sign of life has failed.

    Returns:
      The exit code of the first process that failed, 128 + n where signal n ended it; else 0.

    Raises:
      ValueError: for numbers that are out of range.
    """
    if processes < 1:
        raise ValueError(f"--processes is {processes}: start at least 1.")
    least = processes if min_processes is None else min_processes
    if restarts < 0 or not deadline > 0 or not 1 <= least <= processes:
        raise ValueError(
            f"--restarts is {restarts}, --deadline {deadline} and --min_processes {least}: pass "
            f"restarts >= 0, seconds > 0 and 1 to --processes={processes} processes."
        )
    xla_flags = environment.get("XLA_FLAGS", "")
    if DEVICES not in xla_flags:
        xla_flags = f"{xla_flags} {DEVICES}=1".strip()
    environment = {"JAX_PLATFORMS": "cpu", **environment}
    devices = processes * int(re.search(f"{DEVICES}=(\\d+)", xla_flags)[1])
    # A command that was not found by way of this folder does not look for modules in it either.
    apart = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    command = [sys.executable, *apart, "-m", module, *arguments]

    def attempt(number, resumes):
        # What was trained before is not to be forgotten again.
        further = ["--nooverwrite"] if resumes else []
        further += [f"--coordinator_address=127.0.0.1:{free_port()}", f"--num_processes={number}"]
        each = re.sub(f"{DEVICES}=\\d+", f"{DEVICES}={devices // number}", xla_flags)
        with tempfile.TemporaryDirectory(prefix="heartbeats") as hearts:
            return group.run(
                command + further, number, environment | {"XLA_FLAGS": each},
                group.Watch(hearts, deadline, grace), stdout=stdout, folder=folder,
            )  # fmt: skip

    return supervise(
        attempt, processes=processes, restarts=restarts, min_processes=least, devices=devices
    )


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def define_flags(values: flags.FlagValues = FLAGS) -> None:
    define = functools.partial(flags.DEFINE_integer, flag_values=values)
    define("processes", 2, "to start", lower_bound=1)
    define("restarts", 0, "of all, from the last whole checkpoint, after one died", lower_bound=0)
    define("min_processes", None, "that restarts may come down to; as many as before if unset")
    text = f"seconds without a sign of life after which one has hung; {HANGS:g} with --restarts"
    flags.DEFINE_float("deadline", None, text + ", never without", flag_values=values)


def main(argv: Sequence[str]) -> None:
    if len(argv) < 2:
        raise app.UsageError(
            "no experiment is named: python -m experiments.launch --processes=2 -- "
            "experiments.NAME --run=mesh --workers=2"
        )
    deadline = FLAGS.deadline
    if deadline is None:
        deadline = HANGS if FLAGS.restarts else math.inf
    sys.exit(launch(
        argv[1], argv[2:], processes=FLAGS.processes, restarts=FLAGS.restarts, deadline=deadline,
        min_processes=FLAGS.min_processes,
    ))  # fmt: skip


if __name__ == "__main__":
    define_flags()
    app.run(main)
