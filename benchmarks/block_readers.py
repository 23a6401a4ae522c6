"""Readers of a set on a disk, and what each costs, counted in a separate process.

    python -m benchmarks.block_readers TASK

is the process that `benchmarks.block_costs` starts for a case; the task is JSON. A reader of a
random epoch is a function `(Place, saved) -> Reader`: its batches, arrays of whole records, and the
position from which it goes on.
"""

import ctypes
import functools
import gc
import json
import os
import pathlib
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from absl import app

import ordering
from benchmarks import block_files
from benchmarks.block_files import BATCH, PIXELS, RECORD
from benchmarks.peer_readers import Reader

AROUND = 16_384  # records that are shuffled together where a reader does not shuffle all


class Place(NamedTuple):
    """The files of a format, and how they are read: see `read_blocks`, or as the reader says."""

    folder: pathlib.Path
    block: int = 0
    window: int = 0
    readers: int = 1

    @property
    def paths(self) -> list[str]:
        return [str(path) for path in block_files.files_of(self.folder)]


def decoded(record) -> np.ndarray:
    return np.frombuffer(record, np.uint8)


@functools.cache
def _first_order(units):
    return jax.jit(ordering.random_reshuffling(units).init)  # compiled once


def _random_order(units):
    return _first_order(units)(jax.random.key(0), None)


def blocks(place, saved):
    """`read_blocks` of the files as they are."""
    parts = ordering.blocks.files(place.paths)
    return _of_blocks(place, saved, parts, decoded)


def tokens(place, saved):
    """`read_blocks` of the bytes of the array, as tokens of 16 bits."""
    header = os.path.getsize(place.paths[0]) % RECORD
    sizes = {"length": RECORD // 2, "header_bytes": header}
    return _of_blocks(place, saved, ordering.blocks.tokens(place.paths, **sizes), None)


def _of_blocks(place, saved, parts, decode):
    is_bytes = "record" in place.folder.name.lower()
    split = ordering.blocks.split(parts, unit_size=place.block, decode=decode if is_bytes else None)
    order = ordering.random_reshuffling(len(split), units_per_step=place.window)
    reads = ordering.blocks.read_blocks(
        split,
        order,
        jax.random.key(0),
        batch_size=BATCH,
        readers=place.readers,
        num_epochs=1,
        state=saved,
    )

    def batches():
        with reads:
            for records, places in reads:
                (records,), kept = map(np.asarray, jax.tree.leaves(records)), places != -1
                yield records if kept.all() else records[np.asarray(kept)]

    return Reader(batches(), reads.state)


def mapped(place, saved):
    """`read_epochs` of single records in a random order, of the mapped array."""
    return _of_epochs(np.load(place.paths[0], mmap_mode="r"), saved)


class _Records:
    """The records of ArrayRecord files as a source."""

    def __init__(self, paths):
        import grain

        self._files = grain.sources.ArrayRecordDataSource(paths)

    def __len__(self):
        return len(self._files)

    def __getitem__(self, index):
        return decoded(self._files[index])

    def __getitems__(self, indices):
        return [decoded(record) for record in self._files.__getitems__(indices)]


def records(place, saved):
    """`read_epochs` of single records in a random order, of ArrayRecord files."""
    return _of_epochs(_Records(place.paths), saved)


def _of_epochs(source, saved):
    order = ordering.random_reshuffling(len(source), units_per_step=BATCH)
    reads = ordering.data.read_epochs(source, order, jax.random.key(0), num_epochs=1, state=saved)

    def batches():
        with reads:
            yield from map(np.asarray, reads)

    return Reader(batches(), reads.state)


def _of_grain(source: Callable, read: Callable):
    """A reader of what `read(grain, source)` makes of `source(grain, paths)`."""

    def reader(place, saved):
        import grain

        records = grain.MapDataset.source(source(grain, place.paths))
        batches = iter(read(grain, records).batch(BATCH))
        if saved is not None:
            batches.set_state(saved)
        return Reader(batches, batches.get_state)

    return reader


def _array_record(grain, paths):
    return grain.sources.ArrayRecordDataSource(paths)


def _mapped(grain, paths):
    return np.load(paths[0], mmap_mode="r")


def _shuffled(grain, source):
    return source.shuffle(seed=0).map(decoded).to_iter_dataset()


def _window_shuffled(grain, source):
    shuffled = grain.experimental.WindowShuffleMapDataset(source, window_size=AROUND, seed=0)
    return shuffled.map(decoded).to_iter_dataset()


def _in_sequence(grain, source):
    read = source.map(decoded).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(read, window_size=AROUND, seed=0)


def tf_data(place, saved):
    """A shuffle of the files, which are interleaved, and a shuffle buffer."""
    import tensorflow as tf

    paths = place.paths
    read = tf.data.Dataset.from_tensor_slices(paths).shuffle(len(paths), seed=0)
    read = read.interleave(
        tf.data.TFRecordDataset, cycle_length=len(paths), num_parallel_calls=tf.data.AUTOTUNE
    )
    read = read.shuffle(AROUND, seed=0).batch(BATCH)
    read = iter(read.map(lambda x: tf.io.decode_raw(x, tf.uint8)).prefetch(tf.data.AUTOTUNE))
    checkpoint = tf.train.Checkpoint(read)
    if saved is not None:
        checkpoint.read(saved).assert_consumed()
    folder = tempfile.mkdtemp()
    return Reader((x.numpy() for x in read), lambda: checkpoint.write(f"{folder}/position"))


def _mosaicml(algorithm):
    def read(place, saved):
        import streaming

        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            local=str(place.folder),
            batch_size=BATCH,
            shuffle=True,
            shuffle_algo=algorithm,
            num_canonical_nodes=1,
        )
        loader = streaming.StreamingDataLoader(
            dataset,
            batch_size=BATCH,
            collate_fn=lambda examples: np.stack([x["record"] for x in examples]),
        )
        if saved is not None:
            loader.load_state_dict(saved)
        return Reader(iter(loader), loader.state_dict)

    return read


WAYS = {
    "read_epochs, mapped": mapped,
    "read_epochs": records,
    "read_blocks": blocks,
    "read_blocks, tokens": tokens,
    "Grain, shuffle, mapped": _of_grain(_mapped, _shuffled),
    "Grain, shuffle": _of_grain(_array_record, _shuffled),
    "Grain, WindowShuffleMapDataset": _of_grain(_array_record, _window_shuffled),
    "Grain, WindowShuffleIterDataset": _of_grain(_array_record, _in_sequence),
    "tf.data, shuffle buffer": tf_data,
    "mosaicml-streaming, py1e": _mosaicml("py1e"),
    "mosaicml-streaming, py2s": _mosaicml("py2s"),
}


def counters() -> dict[str, int]:
    """System calls that read plus page faults of mapped memory, and bytes from the disk."""
    with open("/proc/self/io") as file:
        counts = {name: int(value) for name, value in (line.split(":") for line in file)}
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {"requests": counts["syscr"] + faults, "bytes": counts["read_bytes"]}


def memory(field: str) -> float:
    """MB of this process: VmRSS now, VmHWM at most since `timed` began."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1e3


def check(place: Place, batch: np.ndarray, whole: np.ndarray) -> None:
    """Raises AssertionError unless a batch has distinct records as they were written."""
    if batch.dtype != np.uint8:
        batch = np.ascontiguousarray(batch[:, : RECORD // 2].astype(np.uint16)).view(np.uint8)
    numbers = np.ascontiguousarray(batch[:, PIXELS:]).view("<i8").ravel()
    np.testing.assert_array_equal(batch, whole[numbers])
    assert len(set(numbers.tolist())) == len(batch)


def timed(read: Callable, place: Place, saved, seconds: float, most=np.inf) -> tuple[dict, Reader]:
    """The time to the first batch, and examples/s, requests, bytes and memory of the batches of so
    many seconds, or of so many examples."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    base, before, start = memory("VmRSS"), counters(), time.perf_counter()
    reader = read(place, saved)
    batches: Iterator = iter(reader.batches)
    number = total = len(next(batches))
    first = now = time.perf_counter()
    while now < first + seconds and total < most and (batch := next(batches, None)) is not None:
        total, now = total + len(batch), time.perf_counter()
    after, rate = counters(), (total - number) / max(now - first, 1e-9)
    measured = {name: (after[name] - before[name]) / total for name in before}
    measured |= {"first": first - start, "rate": rate, "memory": memory("VmHWM") - base}
    return measured | {"examples": total}, reader


def measure(name: str, place: Place, array: pathlib.Path, seconds: float) -> dict:
    """What a case costs cold, and warm for the same examples; the rate of the faster plain read."""
    read, whole = WAYS[name], np.load(array, mmap_mode="r")
    half = len(whole) // 2  # at most, to resume within the epoch
    _, reader = timed(read, place, None, 0)  # imports and compiles
    check(place, next(iter(reader.batches)), whole)
    del reader, whole
    plain = max(block_files.plain_rate(place.folder, threads) for threads in (1, 4)) / RECORD
    block_files.drop(place.folder)
    cold, reader = timed(read, place, None, seconds, half)
    saved = reader.position()
    del reader
    warm, reader = timed(read, place, None, seconds, cold["examples"])
    del reader
    block_files.drop(place.folder)
    resumed, reader = timed(read, place, saved, 0)
    del reader
    return {"cold": cold, "warm": warm, "resume": resumed["first"], "plain": plain}


def main(argv):
    task = json.loads(argv[1])
    place = Place(pathlib.Path(task["folder"]), *task["sizes"])
    try:
        result = measure(task["way"], place, pathlib.Path(task["array"]), task["seconds"])
    except ImportError as error:
        result = {"left out": str(error)}
    print(json.dumps(result), flush=True)
    os._exit(0)  # loaders' threads may still read


if __name__ == "__main__":
    app.run(main)
