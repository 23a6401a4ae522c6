"""What reading a random epoch from a disk costs, by records, by blocks and by other packages.

    pip install -e ".[experiments,data]" torch mosaicml-streaming array_record pyarrow
    python -m benchmarks.block_costs --folder=DIR --gigabytes=4 --seconds=2 --turns=1

The set has so many gigabytes in each format: records of 3,072 random bytes and their number. It is
written once into the folder, which must be on a disk (4 GB in six formats: 24 GB, four minutes).
Every case runs in a new process, in which loaders start no other processes. It opens its reader
once, to import, compile and check the records of a batch. Then it reads the first GiB of the files
plainly, in pieces of 8 MiB one after the other, by one thread and by four. The reader then reads
for so many seconds in batches of 256, at most half of the epoch; then the same examples again,
warm; then it goes on from its position. Before each of these but the warm one, the system's cache
of the files is dropped. Columns, all cold unless they say otherwise:

- `thousand examples/s`, and `of a plain read`: of the bytes/s of the faster plain read;
- `requests` for 1,000 examples: system calls that read, and page faults that waited for the disk;
- `bytes`: bytes from the disk over those of the examples that were delivered, with read-ahead;
- `first s`, `resumed s`: to the first batch, from the paths of the files or a saved position;
- `memory`, MB: the largest resident memory, less what was there before the reader was opened. The
  pages of a mapped file count.

With --turns=N the cases run N times, in turns, and each number is a median.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from absl import app, flags

from benchmarks import block_files, timing
from benchmarks.block_readers import AROUND


class Case(NamedTuple):
    """A row: the format of the files, a reader, and the sizes of `read_blocks`."""

    files: str
    way: str
    block: int = 0
    window: int = 0
    readers: int = 0


def blocks(size: int, window: int = 0, readers: int = 4, files: str = "array") -> Case:
    """A case of `read_blocks`, whose windows hold 16,384 records unless it says otherwise."""
    return Case(files, "read_blocks", size, window or AROUND // size, readers)


CASES = (
    Case("array", "read_epochs, mapped"),
    Case("ArrayRecord", "read_epochs"),
    *(blocks(size) for size in (1, 4, 16, 64, 256, 1024, 4096)),
    *(blocks(1024, window) for window in (1, 4, 64)),
    *(blocks(1024, readers=readers) for readers in (1, 16)),
    *(blocks(1024, files=files) for files in ("ArrayRecord", "ArrayRecord, groups")),
    *(blocks(1024, files=files) for files in ("TFRecord", "Parquet")),
    blocks(1024)._replace(way="read_blocks, tokens"),
    Case("array", "Grain, shuffle, mapped"),
    Case("ArrayRecord", "Grain, shuffle"),
    Case("ArrayRecord", "Grain, WindowShuffleMapDataset"),
    Case("ArrayRecord", "Grain, WindowShuffleIterDataset"),
    Case("TFRecord", "tf.data, shuffle buffer"),
    Case("MDS", "mosaicml-streaming, py1e"),
    Case("MDS", "mosaicml-streaming, py2s"),
)


def measured(case: Case, folder: pathlib.Path, seconds: float) -> dict:
    """What the process of a case has counted; "left out" says why if a package is missing."""
    task = {"folder": str(folder / case.files), "way": case.way, "sizes": case[2:]}
    task |= {"array": str(folder / "array" / "records.npy"), "seconds": seconds}
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.block_readers", json.dumps(task)],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        errors.seek(0)
        if done.returncode:
            raise RuntimeError(f"{case} ended with {done.returncode}:\n{errors.read()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def row_of(case: Case, results: list[dict]) -> dict:
    """A row of medians."""

    def median(part, name):
        return statistics.median(each[part][name] for each in results)

    ratio = statistics.median(each["cold"]["rate"] / each["plain"] for each in results)
    return {
        "files": case.files,
        "reader": case.way,
        "block": case.block or "",
        "window": case.window or "",
        "readers": case.readers or "",
        "thousand examples/s": f"{median('cold', 'rate') / 1e3:.1f}",
        "of a plain read": f"{ratio:.3f}",
        "requests": f"{1e3 * median('cold', 'requests'):.4g}",
        "bytes": f"{median('cold', 'bytes') / block_files.RECORD:.4g}",
        "first s": f"{median('cold', 'first'):.2f}",
        "resumed s": f"{statistics.median(each['resume'] for each in results):.2f}",
        "memory": f"{median('cold', 'memory'):.0f}",
        "warm: thousand examples/s": f"{median('warm', 'rate') / 1e3:.1f}",
    }


def rows(folder: pathlib.Path, count: int, seconds: float, turns: int, cases=CASES) -> Iterator:
    """A row for each case whose packages are installed."""
    written, results = block_files.write(folder, count), {}
    cases = [case for case in cases if case.files in written]
    for turn in range(turns):
        for case in list(cases):
            new = measured(case, folder / str(count), seconds)
            if "left out" in new:
                print(f"{case.way} is left out: {new['left out']}")
                cases.remove(case)
                continue
            results.setdefault(case, []).append(new)
            if turn == turns - 1:
                yield row_of(case, results[case])


def main(argv):
    del argv
    values = flags.FLAGS
    with contextlib.ExitStack() as stack:
        folder = values.folder
        if not folder:  # here, as /tmp may be in memory
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir="."))
        count = block_files.records_in(values.gigabytes)
        print(f"{count:,} records of {block_files.RECORD:,} bytes in each format")
        timing.print_rows(rows(pathlib.Path(folder), count, values.seconds, values.turns))


if __name__ == "__main__":
    flags.DEFINE_string("folder", None, "where the set stays; None writes it anew, for one run")
    flags.DEFINE_float("gigabytes", 4, "of the set in each of the six formats", lower_bound=0.5)
    flags.DEFINE_float("seconds", 2, "how long a reader reads, cold and warm", lower_bound=0.1)
    flags.DEFINE_integer("turns", 1, "how often all cases run", lower_bound=1)
    app.run(main)
