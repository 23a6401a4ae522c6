"""Counts examples that are repeated or missing in an epoch whose readers are killed and go on.

    pip install -e ".[experiments,data]" torch torchdata mosaicml-streaming array_record
    python -m benchmarks.input_kills --examples=16384,16200

Two readers of an epoch deliver batches of 256 examples between them: two hosts, each a process that
reads its part, or one host whose loader has two processes. After every tenth batch each host saves
its position as its package documents it. In mid-epoch all are killed (SIGKILL). Then 2, 1 or 4
readers go on from the newest positions to the epoch's end; where a package saves one position per
host, host r gets that of host r mod 2. Consumed are the batches that a training loop was given
before the saved positions, and all after them: `repeated` counts examples that were consumed more
than once (each further time), `missing` those that never were. 16,200 examples make no whole
batches. A package that refuses is quoted.
"""

import json
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import numpy as np
from absl import app, flags

from benchmarks import peer_readers, timing

READERS, AFTER, KILL_AT, TIMEOUT = 2, (2, 1, 4), 25, 240


def run(way: str, data: pathlib.Path, logs: pathlib.Path, readers: int, saved: list, kill_at: int):
    """Runs the readers to their end, or until they are killed; returns a refusal or ""."""
    hosts = readers if peer_readers.WAYS[way][0] == "hosts" else 1
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    running = []
    for host in range(hosts):
        task = {"way": way, "folder": str(data), "log": str(logs / str(host)), "kill_at": kill_at}
        task["saved"] = str(saved[host % len(saved)]) if saved else ""
        task |= {"reader": host, "readers": readers}
        running.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peer_readers", json.dumps(task)],
                env=os.environ | {"MASTER_PORT": port, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.DEVNULL,
                stderr=open(logs / f"{host}.errors", "wb"),
                start_new_session=True,
            )
        )
    try:
        codes = [process.wait(TIMEOUT) for process in running]
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT} s"
    finally:
        for process in running:  # with the loaders' processes
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    for host, code in enumerate(codes):
        if code != (-signal.SIGKILL if kill_at else 0):
            return refusal((logs / f"{host}.errors").read_text())
    return ""


def refusal(errors: str) -> str:
    """The first line of the exception that ended a process; others follow as it ends."""
    after = errors.partition("Traceback (most recent call last):")[2].splitlines()
    raised = [line for line in after if line.strip() and not line.startswith(" ")]
    return raised[0][:150] if raised else "ended without a message"


def labels_of(logs: pathlib.Path, host: int, batches: int | None = None) -> list[np.ndarray]:
    """Labels of the batches that a host logged, or of the first ones."""
    labels = []
    path = logs / str(host)
    with open(path, "rb") as log:
        while log.tell() < path.stat().st_size and (batches is None or len(labels) < batches):
            labels.append(pickle.load(log))
    return labels


def counted(before: list[np.ndarray], after: list[np.ndarray], count: int) -> tuple[int, int]:
    """(repeated, missing) examples of an epoch."""
    times = np.bincount(np.concatenate([*before, *after]), minlength=count)
    return int((times - 1).clip(0).sum()), int((times == 0).sum())


def rows_of(way: str, data: pathlib.Path, count: int) -> Iterator[dict]:
    """One row per number of readers after the kill."""
    row = {"examples": f"{count:,}", "way": way, "readers are": peer_readers.WAYS[way][0]}
    with tempfile.TemporaryDirectory() as scratch:
        first = pathlib.Path(scratch)
        refused = run(way, data, first, READERS, [], KILL_AT)
        if refused:
            print(f"{way} is left out: {refused}")
            return
        saved = sorted(first.glob("*.saved"))
        steps = {pickle.loads(path.read_bytes())[0] for path in saved}
        before = [
            labels for host in range(len(saved)) for labels in labels_of(first, host, min(steps))
        ]
        for readers in AFTER:
            logs = first / f"to_{readers}"
            logs.mkdir()
            refused = run(way, data, logs, readers, saved, 0)
            row["readers"] = f"{READERS} to {readers}"
            if refused:
                yield row | {"repeated": "-", "missing": "-", "refused": refused}
                continue
            hosts = [int(log.name) for log in logs.iterdir() if not log.suffix]
            after = [labels for host in hosts for labels in labels_of(logs, host)]
            repeated, missing = counted(before, after, count)
            yield row | {"repeated": repeated, "missing": missing, "refused": ""}


def rows(counts: list[int], ways: list[str]) -> Iterator[dict]:
    """Rows of every way whose name contains one of these words."""
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            data = pathlib.Path(folder)
            peer_readers.write_examples(data, count)
            for way in peer_readers.WAYS:
                if any(word in way for word in ways):
                    yield from rows_of(way, data, count)


def main(argv):
    del argv
    counts = [int(count) for count in flags.FLAGS.examples]
    if any(count % max(AFTER) or count <= KILL_AT * peer_readers.BATCH for count in counts):
        raise app.UsageError(f"--examples is {counts}: pass multiples of 4 above 6,400.")
    timing.print_rows(rows(counts, flags.FLAGS.ways))


if __name__ == "__main__":
    flags.DEFINE_list("examples", ["16384", "16200"], "numbers of examples")
    flags.DEFINE_list("ways", [""], "words in the names of the ways to run")
    app.run(main)
