"""How the processes of one run find each other: by flags, under SLURM and on TPU pods."""

import os
import socket
import sys
import threading
import time

import jax
from absl import flags, logging

from experiments.processes import agreement, waits

FLAGS = flags.FLAGS
NAMES = ("coordinator_address", "num_processes", "process_id")
AUTO = "auto"
LOCAL = ("localhost", "127.0.0.1", "[::1]")  # hosts that this machine alone reaches
CONNECT = 120.0  # seconds in which all processes must have come
GRACE = 5.0  # seconds that a process which fails alone waits for the others at its exit


def start(values: flags.FlagValues = FLAGS) -> None:
    """Joins the other processes, where there are any; before any other call of JAX.

    By the flags; without them automatically where the environment has several tasks of one SLURM
    step, or several hosts of a TPU pod. TPU pods that do not name their hosts in the environment
    need --coordinator_address=auto. Otherwise nothing happens.

    Args:
      values: parsed flags, those of NAMES among them.

    Raises:
      ValueError: for flags that are half given or do not fit each other, or that differ between
        the processes (see `agreement`); for a taken port, or a process 0 that is not there.
      RuntimeError: by JAX, if it was used before.
    """
    if "verbosity" in values and not values["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # a checkpoint alone is told in forty lines
    waits.set_patience(values["patience"].value)
    chosen = _from_flags(*(values[name].value for name in NAMES))
    if chosen is None:
        chosen = _from_environment(os.environ)
    # One process alone finds nobody; and over the wires between processes, two CPU devices of one
    # can each wait for a collective that the other has not begun.
    if chosen is None or chosen.get("num_processes") == 1:
        return
    if jax.config.jax_cpu_collectives_implementation is None:  # "mpi" stays if somebody chose it
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's own service would take SIGTERM for a notice, and the process would go on.
    jax.config.update("jax_enable_preemption_service", False)
    _connect(chosen)
    if jax.process_count() > 1:
        sys.excepthook = _leaving(sys.excepthook)
        agreement.check_settings(values)


def _from_flags(address, count, number) -> dict | None:
    """Arguments of `jax.distributed.initialize`; None if no flag is given."""
    if address == AUTO and count is None and number is None:
        return {}
    given = dict(zip(NAMES, (address, count, number), strict=True))
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        shown = ", ".join(f"--{k}={v}" for k, v in given.items() if v is not None)
        raise ValueError(
            f"{shown} without --{' and --'.join(missing)}: several processes need all three. Give "
            "every process the same address and number, and its own --process_id; or give none."
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(
            f"--coordinator_address is {address!r}: it must be host:port of process 0. Choose a "
            f"free port there, as in --coordinator_address=localhost:8476, or {AUTO!r} alone."
        )
    if count < 1 or not 0 <= number < count:
        raise ValueError(
            f"--process_id is {number} of --num_processes={count}: ids go from 0 to the number of "
            "processes - 1. Give every process its own."
        )
    return given


def _from_environment(environment) -> dict | None:
    """The same, from what SLURM and TPU pods set; None for a single process."""
    # The step's tasks: a script outside of srun has the job's SLURM_NTASKS, and runs once.
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks > 1:
        return {"num_processes": tasks, "process_id": int(environment["SLURM_PROCID"])}
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and "tpu" not in platforms:
        return None
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES", "")
    slices = int(environment.get("MEGASCALE_NUM_SLICES") or 1)
    return {} if "," in hosts or slices > 1 else None


def _connect(chosen):
    address = chosen.get("coordinator_address")
    if address and chosen["process_id"] == 0:
        check_port(address)
    elif address:
        check_reached(address, CONNECT)
    bound = bound_to(address)
    with waits.limited(CONNECT, lambda: _absent(chosen.get("num_processes"), address)):
        jax.distributed.initialize(
            **chosen,
            **({"coordinator_bind_address": bound} if bound else {}),
            initialization_timeout=int(2 * CONNECT),  # at whose end JAX aborts, without advice
        )


def bound_to(address: str | None) -> str | None:
    """Where the coordinator listens; None: JAX's choice, all interfaces of the machine."""
    host, _, port = (address or "").rpartition(":")
    return f"{host.replace('localhost', '127.0.0.1')}:{port}" if host in LOCAL else None


def check_port(address: str) -> None:
    """Raises ValueError if somebody listens already where process 0 would."""
    host, _, port = (bound_to(address) or f":{address.rpartition(':')[2]}").rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise ValueError(
            f"port {port} of process 0 is taken, or may not be used ({error.strerror}). Choose "
            f"another in --coordinator_address={address}, the same for all processes, or end the "
            "run that has it."
        ) from error


def check_reached(address: str, seconds: float) -> None:
    """Raises ValueError if nobody listens at the address of process 0 for so long."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise ValueError(
                    f"process 0 was not reached at --coordinator_address={address} for "
                    f"{seconds:g} s ({error}): start process 0 there, give all processes its "
                    "address, and see that no firewall closes the port."
                ) from error
        time.sleep(0.1)


def _absent(count, address) -> str:
    """JAX would abort, with a stack of C++; an exception cannot reach its wait."""
    return (
        f"not all of {count or 'the'} processes have come within {CONNECT:g} s"
        f"{f' to {address}' if address else ''}: start every process, each with its own "
        "--process_id, and look at the output of those that have ended."
    )


def _leaving(excepthook):
    """Ends this process soon after an error that the others do not have.

    At its exit a process waits for all others, and they for its part of their next collective. If
    it leaves, whoever has started the processes sees that one has failed.
    """

    def hook(*error):
        excepthook(*error)
        sys.stderr.flush()
        timer = threading.Timer(GRACE, os._exit, (1,))
        timer.daemon = True
        timer.start()

    return hook
