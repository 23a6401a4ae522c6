"""Several processes, each with its own workers: how they find each other, and are asked to stop.

    python -m experiments.qsr --run=mesh --workers=2 \
        --coordinator_address=HOST:PORT --num_processes=2 --process_id=0   # and 1, elsewhere

Every process runs the same program. Workers are the devices of a mesh over all processes; a process
places its own workers' data alone. Process 0 writes all files, so that the output folder must be
one that all processes can read. `experiments.launch` starts several on one machine.
"""

import contextlib
import json
import os
import signal
import socket
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
        the processes (see `agree`); for a port that is taken.
      RuntimeError: by JAX, if it was used before.
    """
    if "verbosity" in values and not values["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # a checkpoint alone is told in forty lines
    agree.patience = values["patience"].value
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
    if several():
        sys.excepthook = _leave
        agree.check_settings(values)


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
    # Where the coordinator listens; None is JAX's choice, all interfaces of the machine.
    bound = address.replace("localhost", "127.0.0.1") if is_local(address) else None
    if address and chosen["process_id"] == 0:
        check_port(bound or f":{address.rpartition(':')[2]}")

    def absent():  # JAX would abort, with a stack of C++; an exception cannot reach its wait
        where = f" to --coordinator_address={address}" if address else ""
        return (
            f"not all of {chosen.get('num_processes', 'the')} processes have come within "
            f"{CONNECT:g} s{where}: start every process, each with its own --process_id, look at "
            "the output of those that have ended, and see that no firewall closes the port."
        )

    with agree.limited(CONNECT, absent):
        jax.distributed.initialize(
            **chosen, coordinator_bind_address=bound,
            initialization_timeout=int(2 * CONNECT),  # at whose end JAX aborts, without advice
        )  # fmt: skip


def is_local(address: str | None) -> bool:
    """Whether an address is one that this machine alone reaches."""
    return (address or "").rpartition(":")[0] in LOCAL


def check_port(address: str) -> None:
    """Raises ValueError if somebody listens there: two coordinators would share the port."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        raise ValueError(
            f"port {port} of process 0 is taken, or may not be used ({error.strerror}). Choose "
            "another in --coordinator_address, the same for all processes, or end the run that "
            "has it."
        ) from error


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
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    with agree.for_others("what process 0 has found"):
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
        padded = np.zeros(-(-size // 1024) * 1024, np.uint8)  # few shapes, for each is compiled
        if is_first():
            padded[:size] = text
        return json.loads(multihost_utils.broadcast_one_to_all(padded)[:size].tobytes())


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
