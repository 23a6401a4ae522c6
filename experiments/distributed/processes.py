"""Runs over several processes, each with its own workers: connects them, and stops them together.

    python -m experiments.qsr --run=mesh --workers=2 \
        --coordinator_address=HOST:PORT --num_processes=2 --process_id=0   # and 1, elsewhere

Every process runs the same program. Workers are the devices of a mesh over all processes, and a
process places only its own workers' data. Process 0 writes all files; all processes must be able to
read the output folder. `experiments.launch` starts several processes on one machine.
"""

import contextlib
import errno
import functools
import ipaddress
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
from absl import flags

from experiments.distributed import AUTO, PROCESSES, deadlines
from experiments.distributed.deadlines import several as several
from syncopate.refusals import UserError
from syncopate.unstable import coordination_client, multihost_utils

LOCAL = ("localhost", "127.0.0.1", "[::1]")  # hosts that only this machine reaches
CONNECT = 120.0  # seconds until all processes must be connected
GRACE = 5.0  # seconds that a failing process waits for the others at its exit
GONE = re.compile("Connection (reset|closed) by peer|Socket closed")  # of gloo and gRPC
leaving = threading.Event()  # set once an error has been told that ends this process
CALLS = itertools.count()  # number of calls of `of_first`, the same in all processes


def start(values: flags.FlagValues = flags.FLAGS) -> None:
    """Connects to the other processes, if there are any. Call it before anything else of JAX.

    Args:
      values: parsed flags, including those of PROCESSES; if these are unset there is one process.
    """
    deadlines.timeout = values["timeout"].value
    given = {name: values[name].value for name in PROCESSES}
    # A single process connects to nothing: with collectives between processes, two CPU devices of
    # one process can each wait for a collective that the other has not started.
    if set(given.values()) == {None} or given["num_processes"] == 1:
        return
    if jax.config.jax_cpu_collectives_implementation is None:  # keeps a chosen "mpi"
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's own service would intercept SIGTERM, and the process would continue.
    jax.config.update("jax_enable_preemption_service", False)
    _connect(*given.values())
    if several():
        sys.excepthook = functools.partial(_leave, sys.excepthook)
        deadlines.came_to(0)


def _connect(address, count, number):
    host, _, port = (address or "").rpartition(":")
    fits = port.isdigit() and 0 < int(port) < 1 << 16 and None not in (count, number)
    fits = fits and 0 <= number < count
    if not fits and (address, count, number) != (AUTO, None, None):
        raise UserError(
            f"--coordinator_address={address} --num_processes={count} --process_id={number} are "
            "inconsistent: give every process the same --coordinator_address=HOST:PORT (a free "
            "port of process 0), the same --num_processes=N and its own --process_id, 0 to N - 1; "
            f"or, under SLURM and on TPU pods, only --coordinator_address={AUTO}; or none of them."
        )
    chosen = {}
    if fits:
        chosen = dict(zip(PROCESSES, (address, count, number), strict=True))
        chosen["coordinator_bind_address"] = None if number else _place_of(address)

    def absent():  # JAX would abort with a C++ stack trace
        return (
            f"not all processes connected to {address} within {CONNECT:g} s: start every one with "
            "its own --process_id, look at the output of those that have ended, and check that no "
            "firewall blocks the port and no other run uses it."
        )

    with deadlines.limited(CONNECT, absent):  # before JAX aborts, at twice that time
        try:
            jax.distributed.initialize(**chosen, initialization_timeout=int(2 * CONNECT))
        except ValueError as error:
            raise UserError(f"--coordinator_address is {address}, but JAX: {error}") from error


def _place_of(address: str) -> str | None:
    """The address at which process 0 listens; None: at all addresses of this machine.

    A port that is taken is refused: the coordinator itself would share it with another run's.
    """
    host, _, port = address.rpartition(":")
    try:
        places = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        family, _, _, _, place = places[0]
        socket.create_server(place, family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:  # as behind a translation of addresses
            return None
        raise UserError(
            f"--coordinator_address is {address}, where nothing can listen ({error.strerror}): "
            "pass HOST:PORT of process 0, with a port that no other program or run has."
        ) from error
    if ipaddress.ip_address(place[0].partition("%")[0]).is_loopback and host not in LOCAL:
        text = f"{host} is {place[0]} here: processes on other machines do not reach it."
        print(text, file=sys.stderr, flush=True)
    return f"[{place[0]}]:{port}" if family == socket.AF_INET6 else f"{place[0]}:{port}"


def _leave(tell: Callable, *error):
    """Tells an error that only this process has, and ends the process after GRACE seconds.

    At exit a process waits for all others, which in turn wait for it in their next collective. By
    ending it, whatever started the processes sees that one has failed. One that has lost another
    ends at once, before JAX aborts it; process 0 does not, as the rest would lose it, too.
    """
    gone = isinstance(error[1], RuntimeError | ValueError) and GONE.search(str(error[1]))
    if gone:
        text = f"Error: process {jax.process_index()} has lost another one ({gone[0]})"
        print(f"{text}: look at the output of the others.", file=sys.stderr)
    else:
        tell(*error)
    sys.stderr.flush()
    leaving.set()
    if gone and not is_first():
        os._exit(1)
    timer = threading.Timer(GRACE, os._exit, (1,))
    timer.daemon = True
    timer.start()


def is_first() -> bool:
    """Whether this is process 0, the only one that writes files and prints."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def of_first(value):
    """A collective that returns the value of process 0 on every process: what JSON can hold."""
    if not several():
        return value
    store, key = coordination_client(), f"of process 0/{next(CALLS)}"
    if is_first():
        store.key_value_set(key, json.dumps(value))
    with deadlines.for_others("a value of process 0"):
        return json.loads(store.blocking_key_value_get(key, round(2e3 * deadlines.timeout)))


def wait(name: str) -> None:
    """Waits until all processes are here; `name` distinguishes such places."""
    if several():
        with deadlines.for_others(f"all processes to reach: {name}"):
            multihost_utils.sync_global_devices(name)


def say(text: str, **options) -> None:
    """Prints on process 0 only."""
    if is_first():
        print(text, flush=True, **options)


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[bool], tuple[int, bool]]]:
    """Lets SIGTERM and SIGINT ask a run to save and stop; a second signal ends it at once.

    Yields `wants to save -> (signal or 0, whether to save)`. All processes must call it after the
    same step, and all get the same answer: to stop or save if any of them was asked to.
    """
    signals = []

    def note(number, frame):
        if signals:
            raise KeyboardInterrupt(f"signal {number} came twice")
        signals.append(number)

    def ask(wants_to_save: bool) -> tuple[int, bool]:
        here = signals[0] if signals else 0, wants_to_save
        if not several():
            return here
        with deadlines.for_others("whether any of them was asked to stop or save"):
            every = multihost_utils.process_allgather(np.array(here, np.uint8))
        number, save = np.max(every, axis=0)
        return int(number), bool(save)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ask
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
