"""One problem for all packages with local steps, and how a process of a package is measured.

Two workers train a perceptron by SGD with momentum, and sync after every `H` steps. NumPy makes the
start and the batches, and simulates both workers. `python -m benchmarks.local_steps` compares.
"""

import json
import os
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

WORKERS, H, SYNCS, BATCH, CLASSES = 2, 4, 20, 32, 10
RATE, MOMENTUM = 0.02, 0.9  # of a worker
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9  # of DiLoCo, Nesterov
SIZES = {  # parameters: features, hidden units and classes
    "1,012,950": (784, 784, 500, CLASSES),
    "9,907,722": (784, 2560, 3072, CLASSES),
}
WARM = 3  # rounds before the timed ones


class Job(NamedTuple):
    """What a process does."""

    way: str
    widths: tuple[int, ...]
    rank: int
    processes: int  # one for each worker, or one for both
    port: int
    pipe: int  # a socket to the other process
    rounds: int  # timed; 0 to check
    out: str

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers of this process."""
        return (self.rank,) if self.processes > 1 else tuple(range(WORKERS))


class Worker(NamedTuple):
    """What a package does for the workers of one process.

    A round is H times `step` and `rest`. The time of a sync is how much longer `rest` takes after
    the last step.
    """

    place: Callable  # (x [w, B, F], y [w, B]) of this process -> the batch of `plain` and `step`
    plain: Callable  # batch: a step of the framework's own optimizer, on another copy
    step: Callable  # batch: a local step, or its gradient where its update may sync
    rest: Callable  # whether it is the round's last step
    wait: Callable  # until all of that is done
    params: Callable  # () -> arrays of the form of `start`
    compiled: Callable = lambda: None  # () -> bytes of the compiled sync


def start(widths: tuple[int, ...]) -> list[np.ndarray]:
    """Weights [in, out] and biases, layer by layer."""
    rng, arrays = np.random.default_rng(0), []
    for inside, outside in zip(widths, widths[1:], strict=False):
        arrays += [rng.normal(size=(inside, outside)) / np.sqrt(inside), np.zeros(outside)]
    return [x.astype(np.float32) for x in arrays]


def batch(widths: tuple[int, ...], worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """x [B, F], and as class the largest of its first numbers."""
    x = np.random.default_rng((1, worker, step)).normal(size=(BATCH, widths[0]))
    return x.astype(np.float32), x[:, :CLASSES].argmax(axis=1)


def batches(job: Job, steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for step in range(steps):
        x, y = zip(*(batch(job.widths, worker, step) for worker in job.workers), strict=True)
        yield np.stack(x), np.stack(y)


def gradient(params: list[np.ndarray], x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """The gradients of the mean cross-entropy of a perceptron with tanh, by hand."""
    *inner, last = zip(params[::2], params[1::2], strict=True)
    inputs = [x]
    for w, b in inner:
        inputs.append(np.tanh(inputs[-1] @ w + b))
    out = inputs[-1] @ last[0] + last[1]
    chances = np.exp(out - out.max(axis=1, keepdims=True))
    error = chances / chances.sum(axis=1, keepdims=True)
    error[np.arange(len(y)), y] -= 1
    error /= np.float32(len(y))
    grads = []
    for given, w in zip(inputs[::-1], params[-2::-2], strict=True):
        grads = [given.T @ error, error.sum(axis=0), *grads]
        error = (error @ w.T) * (1 - given**2)
    return grads


def simulated(widths: tuple[int, ...], outer: bool, syncs: int = SYNCS) -> Iterator[np.ndarray]:
    """The parameters after each sync, in NumPy: of plain averaging, or of DiLoCo."""
    anchor, velocity = start(widths), [np.zeros_like(x) for x in start(widths)]
    momenta = [[np.zeros_like(x) for x in anchor] for _ in range(WORKERS)]
    for sync in range(syncs):
        copies = [[x.copy() for x in anchor] for _ in range(WORKERS)]
        for worker, (params, momentum) in enumerate(zip(copies, momenta, strict=True)):
            for step in range(sync * H, sync * H + H):
                grads = gradient(params, *batch(widths, worker, step))
                for p, m, g in zip(params, momentum, grads, strict=True):
                    m *= np.float32(MOMENTUM)
                    m += g
                    p -= np.float32(RATE) * m
        mean = [sum(parts) / np.float32(WORKERS) for parts in zip(*copies, strict=True)]
        for place, (a, m) in enumerate(zip(anchor, mean, strict=True)):
            if outer:
                velocity[place] = np.float32(OUTER_MOMENTUM) * velocity[place] + (a - m)
                change = (a - m) + np.float32(OUTER_MOMENTUM) * velocity[place]
                m = a - np.float32(OUTER_RATE) * change
            anchor[place] = m
        yield flat(anchor)


def flat(params: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(x).reshape(-1) for x in params])


def work(ways: dict[str, Callable[[Job], Worker]]) -> None:
    """A whole process: reads its `Job` from the command line, and writes its result."""
    given = Job(*json.loads(sys.argv[1]))
    job = given._replace(widths=tuple(given.widths))
    cores = sorted(os.sched_getaffinity(0))
    if job.processes > 1:  # before a framework starts threads
        os.sched_setaffinity(0, {cores[job.rank % len(cores)]})
    worker = ways[job.way](job)
    barrier = _barrier(job)
    result = timed(job, worker, barrier) if job.rounds else checked(job, worker, barrier)
    barrier()
    pathlib.Path(job.out).with_suffix(".json").write_text(json.dumps(result))


def _barrier(job: Job) -> Callable:
    """A barrier of both processes, by a socket and without a framework."""
    if job.processes == 1:
        return lambda: None
    other = socket.socket(fileno=job.pipe)

    def barrier():
        other.send(b"0")
        if not other.recv(1):
            sys.exit("the other process has ended")

    return barrier


def timed(job: Job, worker: Worker, barrier: Callable) -> dict[str, list[float]]:
    """Seconds of a plain step, a local step and a sync, which take turns."""
    data = [worker.place(x, y) for x, y in batches(job, H)]
    times = {"plain": [], "step": [], "sync": []}
    for _ in range(WARM + job.rounds):
        worker.wait()
        barrier()
        begin = time.perf_counter()
        for given in data[1:]:
            worker.plain(given)
        worker.wait()
        times["plain"].append((time.perf_counter() - begin) / (H - 1))
        barrier()
        begin, rest = time.perf_counter(), 0.0
        for given in data[1:]:
            worker.step(given)
            after = time.perf_counter()
            worker.rest(False)
            rest += time.perf_counter() - after
        worker.wait()
        times["step"].append((time.perf_counter() - begin) / (H - 1))
        worker.step(data[0])
        worker.wait()
        barrier()
        begin = time.perf_counter()
        worker.rest(True)
        worker.wait()
        times["sync"].append(time.perf_counter() - begin - rest / (H - 1))
    return {name: seconds[WARM:] for name, seconds in times.items()}


def checked(job: Job, worker: Worker, barrier: Callable) -> dict:
    """Saves the parameters after each sync; returns what the syncs sent and added to memory."""
    size = sum(x.size for x in start(job.widths))
    file = pathlib.Path(job.out).with_suffix(".npy")
    saved = np.lib.format.open_memmap(file, "w+", np.float32, (SYNCS, size))
    sent, grown = [], []
    for step, (x, y) in enumerate(batches(job, SYNCS * H)):
        last = step % H == H - 1
        worker.step(worker.place(x, y))
        if not last:
            worker.rest(False)
            continue
        worker.wait()
        barrier()
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak becomes what is held now
        held, written = _kilobytes("VmRSS"), _written()
        worker.rest(True)
        worker.wait()
        sent.append(_written() - written)
        grown.append(1024 * (_kilobytes("VmHWM") - held))
        saved[step // H] = flat(worker.params())
    saved.flush()
    return {"sent": sent, "grown": grown, "compiled": worker.compiled()}


def _kilobytes(field: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0])


def _written() -> int:
    """Bytes that this process has handed to files and sockets."""
    return int(pathlib.Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])
