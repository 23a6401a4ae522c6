"""Times local steps and syncs beside other packages, whose parameters must be the same.

    pip install torch torchft-nightly drjax
    python -m benchmarks.local_steps
    python -m benchmarks.local_steps --parity

Two workers train the perceptron of `local_problem` from the same start on the same batches, and
sync after every 4 steps: two processes over gloo, or, beside drjax, one process. Each of two
processes is bound to one core, and frameworks have one thread for their operations. First come 20
syncs: parameters that differ from those of a simulation in NumPy, beyond rounding, end the program.
Then the ways of a table are started in turns.

    ms of a step   a local step, gradient and update; `times plain`: relative to a step of the
                   framework's own optimizer, in the same process
    ms of a sync   from when both workers are ready until both are done
    MB sent        by one worker in a sync, as the operating system counts
    MB more        the resident peak of a process during a sync, above what it held before
    MB compiled    arguments, outputs and temporaries of our or drjax' compiled sync
    off NumPy      the largest difference of a parameter from the simulation after any of the syncs

With --parity nothing is timed: a row for each sync has the largest difference of a parameter of
ours from the simulation and from every other package's.

Medians over the starts; ratios to ours are of the same turn, with their 95 % interval.
"""

import importlib.util
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from absl import app, flags

from benchmarks import local_problem, timing
from benchmarks.local_problem import Job
from benchmarks.timing import median_interval

ULPS = 32  # of the largest parameter: the allowed difference after 80 steps


class Table(NamedTuple):
    """Ways of the same protocol, by module and the package that it needs; ours first."""

    label: str
    outer: bool
    processes: int
    ways: tuple[tuple[str, str, str], ...]


TORCH, TORCHFT, DRJAX = "local_torch", "local_torchft", "local_drjax"
TABLES = (
    Table("averaging", False, 2, (
        ("local_rounds", "local_syncopate", "jax"),
        ("torch PeriodicModelAverager", TORCH, "torch"),
        ("torch PostLocalSGDOptimizer", TORCH, "torch"),
        ("torchft LocalSGD", TORCHFT, "torchft"),
    )),
    Table("DiLoCo", True, 2, (
        ("local_rounds, DiLoCo", "local_syncopate", "jax"),
        ("torchft DiLoCo", TORCHFT, "torchft"),
    )),
    Table("DiLoCo, one device", True, 1, (
        ("local_rounds, one device", "local_syncopate", "jax"),
        ("drjax, one device", DRJAX, "drjax"),
    )),
    Table("DiLoCo, two devices", True, 1, (
        ("local_rounds, two devices", "local_syncopate", "jax"),
        ("drjax, two devices", DRJAX, "drjax"),
    )),
)  # fmt: skip


def run(module: str, job: Job, folder: str) -> list[dict]:
    """The results of all processes of a way."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ends, environment = (
        socket.socketpair(),
        {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )
    if not job.rounds:  # what is freed goes back at once, so that the next sync's peak shows
        environment["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    started = []
    for rank in range(job.processes):
        given = job._replace(rank=rank, port=port, pipe=ends[rank].fileno(), out=f"{folder}/{rank}")
        with open(f"{folder}/{rank}.log", "w") as log:
            command = [sys.executable, "-m", f"benchmarks.{module}", json.dumps(given)]
            options = {"stdout": log, "stderr": log, "pass_fds": [given.pipe]}
            started.append(subprocess.Popen(command, env=environment, **options))
    for end in ends:
        end.close()
    for rank, code in enumerate([process.wait() for process in started]):
        if code:
            text = pathlib.Path(f"{folder}/{rank}.log").read_text()
            raise RuntimeError(f"{job.way}: process {rank} ended with {code}: {text[-2000:]}")
    return [
        json.loads(pathlib.Path(f"{folder}/{rank}.json").read_text())
        for rank in range(job.processes)
    ]


def installed(table: Table) -> list[tuple[str, str]]:
    """(way, module) of the packages that are here; says which are not."""
    modules = []
    for way, module, package in table.ways:
        if importlib.util.find_spec(package):
            modules.append((way, module))
        else:
            print(f"{way} is left out: {package} is not installed.")
    return modules


def after_syncs(module: str, job: Job, folder: str) -> tuple[dict, np.ndarray]:
    """(bytes and memory of the first process, parameters [processes, syncs, n] after each sync)."""
    taken = run(module, job._replace(rounds=0), folder)[0]
    return taken, np.stack([np.load(f"{folder}/{rank}.npy") for rank in range(job.processes)])


def distance(params: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The largest difference of a parameter of any process, after each sync."""
    return np.abs(params - expected).max(axis=(0, 2))


def check(module: str, job: Job, folder: str, expected: np.ndarray) -> dict:
    """What the syncs of a way take beside time; raises ValueError if its parameters are wrong."""
    taken, params = after_syncs(module, job, folder)
    off, most = distance(params, expected), np.abs(expected).max(axis=1)
    if wrong := np.flatnonzero(~(off <= ULPS * np.finfo(np.float32).eps * most)).tolist():
        sync = wrong[0]
        raise ValueError(
            f"{job.way}: after sync {sync + 1} a parameter is {off[sync]:.2g} from the simulation, "
            f"of numbers up to {most[sync]:.2g}: no package's times were compared."
        )
    megabytes = {name: np.median(taken[name]) / 1e6 for name in ("sent", "grown")}
    compiled = taken["compiled"]
    return {
        "MB sent": f"{megabytes['sent']:.2f}" if job.processes > 1 else "-",
        "MB more": f"{megabytes['grown']:.1f}",
        "MB compiled": f"{compiled / 1e6:.1f}" if compiled else "-",
        "off NumPy": f"{off.max():.1e}",
    }


def parity(tables: list[Table], size: str, folder: str) -> Iterator[dict]:
    """After each sync, the largest difference of every way's parameters from ours."""
    columns = {}
    for table in tables:
        job = Job("", local_problem.SIZES[size], 0, table.processes, 0, 0, 0, "")
        (way, module), *others = installed(table)
        ours = after_syncs(module, job._replace(way=way), folder)[1]
        simulated = np.stack(list(local_problem.simulated(job.widths, table.outer)))
        columns[f"{table.label}: NumPy"] = distance(ours, simulated)
        for way, module in others:
            params = after_syncs(module, job._replace(way=way), folder)[1]
            columns[f"{table.label}: {way.split(',')[0]}"] = distance(params, ours)
    for sync in range(local_problem.SYNCS):
        yield {"sync": sync + 1} | {name: f"{off[sync]:.1e}" for name, off in columns.items()}


def timed(module: str, job: Job, folder: str) -> dict[str, float]:
    """Medians over the rounds of one start: mean steps of the workers, syncs of the slower one."""
    results = run(module, job, folder)
    times = {
        name: np.array([process_times[name] for process_times in results]) for name in results[0]
    }
    step = times["step"].mean(axis=0)
    return {
        "step": float(np.median(step)),
        "plain": float(np.median(step / times["plain"].mean(axis=0))),
        "sync": float(np.median(times["sync"].max(axis=0))),
    }


def rows_of(
    table: Table, size: str, expected: np.ndarray, folder: str, turns: int, rounds: int
) -> Iterator[dict]:
    """The rows of one protocol and size."""
    job = Job("", local_problem.SIZES[size], 0, table.processes, 0, 0, rounds, "")
    ways = installed(table)
    taken = {way: check(module, job._replace(way=way), folder, expected) for way, module in ways}
    times = {way: {"step": [], "plain": [], "sync": []} for way, _ in ways}
    for _, (way, module) in itertools.product(range(turns), ways):
        for name, seconds in timed(module, job._replace(way=way), folder).items():
            times[way][name].append(seconds)
    (ours, _), *_ = ways
    for way, measured in times.items():
        row = {"parameters": size, "protocol": table.label, "way": way}
        for name in ("step", "sync"):
            process_times = np.array(measured[name])
            row[f"ms of a {name}"] = f"{1e3 * np.median(process_times):.2f}"
            if name == "step":
                row["times plain"] = shown(np.array(measured["plain"]))
            row[f"{name}, times ours"] = shown(process_times / np.array(times[ours][name]))
        yield row | taken[way]


def shown(ratios: np.ndarray) -> str:
    middle, low, high = median_interval(ratios)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main(argv):
    del argv
    values, head = flags.FLAGS, ()
    tables = [table for table in TABLES if table.label in values.tables]
    for size in values.sizes:
        with tempfile.TemporaryDirectory() as folder:
            if values.parity:
                timing.print_rows(parity(tables, size, folder))
                continue
            expected = {}
            for table in tables:
                if table.outer not in expected:
                    simulated = local_problem.simulated(local_problem.SIZES[size], table.outer)
                    expected = {table.outer: np.stack(list(simulated))}
                given = expected[table.outer], folder, values.turns, values.rounds
                head = timing.print_rows(rows_of(table, size, *given), head)


if __name__ == "__main__":
    labels = [table.label for table in TABLES]
    flags.DEFINE_multi_enum("tables", labels, labels, "protocols to compare")
    sizes = list(local_problem.SIZES)
    flags.DEFINE_multi_enum("sizes", sizes, sizes, "parameters of the perceptrons")
    flags.DEFINE_bool("parity", False, "differences after each sync alone, without times")
    flags.DEFINE_integer("turns", 7, "starts of every way")
    flags.DEFINE_integer("rounds", 20, "timed rounds of a start")
    app.run(main)
