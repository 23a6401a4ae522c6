"""Several processes, each with its own workers: how they find each other, and are asked to stop.

    python -m experiments.qsr --run=mesh --workers=2 \
        --coordinator_address=HOST:PORT --num_processes=2 --process_id=0   # and 1, elsewhere

Every process runs the same program. Workers are the devices of a mesh over all processes; a process
places its own workers' data alone. Process 0 writes all files, so that the output folder must be
one that all processes can read. `experiments.launch` starts several on one machine.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import jax
import numpy as np
from absl import flags, logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from tqdm import tqdm

from experiments.cluster import agree
from experiments.cluster.agree import several as several
from local_opt.workers import worker_mesh

NAMES = ("coordinator_address", "num_processes", "process_id")
AUTO = "auto"
LOCAL = ("localhost", "127.0.0.1", "[::1]")  # hosts that this machine alone reaches
CONNECT = 120.0  # seconds in which all processes must have come
GRACE = 5.0  # seconds that a process which fails alone waits for the others at its exit
CALLS = itertools.count()  # of `of_first`, the same in all processes


def start(values: flags.FlagValues = flags.FLAGS) -> None:
    """Joins the other processes, where there are any; before any other call of JAX.

    Args:
      values: parsed flags, those of NAMES among them; without these there is one process.

    Raises:
      ValueError: for flags that are half given or do not fit each other, or that differ between
        the processes (see `agree`).
      RuntimeError: by JAX, if it was used before.
    """
    if "verbosity" in values and not values["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # a checkpoint alone is told in forty lines
    agree.patience = values["patience"].value
    given = {name: values[name].value for name in NAMES}
    # One process alone finds nobody; and over the wires between processes, two CPU devices of one
    # can each wait for a collective that the other has not begun.
    if set(given.values()) == {None} or given["num_processes"] == 1:
        return
    if jax.config.jax_cpu_collectives_implementation is None:  # "mpi" stays if somebody chose it
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's own service would take SIGTERM for a notice, and the process would go on.
    jax.config.update("jax_enable_preemption_service", False)
    _connect(*given.values())
    if several():
        sys.excepthook = _leave
        agree.came_to(0)
        agree.check_settings(values)


def _connect(address, count, number):
    host, _, port = (address or "").rpartition(":")
    fits = port.isdigit() and count is not None and number is not None and 0 <= number < count
    if not fits and (address, count, number) != (AUTO, None, None):
        raise ValueError(
            f"--coordinator_address={address} --num_processes={count} --process_id={number} start "
            "no process: give every one the same --coordinator_address=HOST:PORT, a free port of "
            "process 0, the same --num_processes=N, and its own --process_id, 0 to N - 1; or none; "
            f"or, under SLURM and on TPU pods, --coordinator_address={AUTO} alone."
        )
    chosen = {}
    if fits:
        # Where the coordinator listens; None is JAX's choice, all interfaces of the machine.
        bound = address.replace("localhost", "127.0.0.1") if host in LOCAL else None
        chosen = dict(zip(NAMES, (address, count, number), strict=True))
        chosen["coordinator_bind_address"] = bound

    def absent():  # JAX would abort, with a stack of C++; an exception cannot reach its wait
        return (
            f"not all of the processes have come within {CONNECT:g} s to {address}: start every "
            "one, each with its own --process_id, look at the output of those that have ended, "
            "and see that no firewall closes the port, and that no other run has it."
        )

    with agree.limited(CONNECT, absent):  # at whose double JAX aborts, without advice
        jax.distributed.initialize(**chosen, initialization_timeout=int(2 * CONNECT))


def _leave(*error):
    """Tells of an error that the others do not have, and soon ends this process.

    At its exit a process waits for all others, and they for its part of their next collective. If
    it leaves, whoever has started the processes sees that one has failed.
    """
    sys.__excepthook__(*error)
    sys.stderr.flush()
    timer = threading.Timer(GRACE, os._exit, (1,))
    timer.daemon = True
    timer.start()


def is_first() -> bool:
    """Whether this is process 0, which alone writes files and talks to people."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def of_first(value):
    """What process 0 has, on every process: what they decide by must be the same. A collective.

    Args:
      value: made of what JSON knows; floats survive exactly.

    Example:
      >>> from experiments.cluster import processes
      >>> processes.of_first({"seconds": 0.1})
      {'seconds': 0.1}
    """
    if not several():
        return value
    store, key = agree.store(), f"of process 0/{next(CALLS)}"
    if is_first():
        store.key_value_set(key, json.dumps(value))
    with agree.for_others("what process 0 has found"):
        return json.loads(store.blocking_key_value_get(key, round(2e3 * agree.patience)))


def wait(name: str) -> None:
    """Waits until all processes have come here; `name` tells places apart."""
    if several():
        with agree.for_others(f"all to come to this: {name}"):
            multihost_utils.sync_global_devices(name)


def mesh_of(run: str, workers: int) -> Mesh | None:
    """The mesh of `--run=mesh`, or None.

    Raises:
      ValueError: for another way to run in several processes; as of `worker_mesh`.
    """
    if run == "mesh":
        return worker_mesh(workers)
    if several():
        raise ValueError(
            f"--run is {run} in {jax.process_count()} processes: each would do the whole work. "
            "Pass --run=mesh, or start one process."
        )
    return None


def say(text: str) -> None:
    """Prints, by process 0."""
    if is_first():
        print(text)


def bar(**options) -> tqdm:
    """A progress bar, where somebody looks: `tqdm(**options)` of process 0."""
    return tqdm(disable=not is_first(), **options)


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[bool], tuple[int, bool]]]:
    """SIGTERM and SIGINT ask a run to save and leave; a second one ends it at once.

    Yields `wants to save -> (signal or 0, whether to save)`: the same answer in all processes,
    which must ask after the same step; what one of them is asked or wants, all do.
    """
    signals = []

    def note(number, frame):
        if signals:
            raise KeyboardInterrupt(f"signal {number} came twice")
        signals.append(number)

    def ask(wants_to_save: bool) -> tuple[int, bool]:
        own = signals[0] if signals else 0, wants_to_save
        if not several():
            return own
        with agree.for_others("whether one of them was asked to stop or save"):
            found = multihost_utils.process_allgather(np.array(own, np.uint8))
        number, save = np.max(found, axis=0)
        return int(number), bool(save)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ask
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
