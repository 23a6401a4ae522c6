"""Measures how fast loaders read an order: indices per second, per loader and reader processes.

    python -m benchmarks.samplers --repeats=3

The source is an array in memory with 64 numbers per example, so the result is the cost of an index
rather than of a disk; 4 workers have 64 units per step each. The clock runs from a quarter of the
epoch, when all processes have started, to the last batch. A row has the median and the slowest
epoch. Aim: 50,000 indices per second.
"""

import statistics
import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import ordering

WORKERS, UNITS, PER_STEP = 4, 32_768, 64


def map_dataset(source, orders, count):
    dataset = ordering.input.map_dataset(source, orders, units_per_step=PER_STEP)
    return _in_processes(dataset, count)


def _in_processes(dataset, count):
    import grain

    read = dataset.to_iter_dataset(grain.ReadOptions(num_threads=0))
    return read.mp_prefetch(grain.MultiprocessingOptions(count, 4)) if count else read


def grain_shuffle(source, orders, count):
    """Grain's own shuffle."""
    import grain

    dataset = grain.MapDataset.source(source).shuffle(seed=0).batch(WORKERS * PER_STEP)
    return _in_processes(dataset, count)


def read_epochs(source, orders, count):
    """Reads onto the device, by a thread."""
    orders = jnp.asarray(orders)
    state = ordering.shuffle_once(UNITS).init(jax.random.key(0), None)
    state = state._replace(current=orders, next=orders)
    return ordering.input.read_epochs(source, lambda: state, units_per_step=PER_STEP, num_epochs=1)


ROWS = {  # (source, orders, reader processes) -> batches, and the numbers of processes
    "grain's shuffle": (grain_shuffle, (0, 1, 4)),
    "map_dataset": (map_dataset, (0, 1, 4)),
    "read_epochs": (read_epochs, (0,)),
}


def indices_per_second(reads: Iterable) -> float:
    """The rate of the steps after the first quarter."""
    clock = [time.perf_counter() for _ in reads]
    steps = UNITS // PER_STEP
    if len(clock) != steps:
        raise RuntimeError(f"{len(clock)} batches arrived, of {steps}.")
    return (steps - 1 - steps // 4) * WORKERS * PER_STEP / (clock[-1] - clock[steps // 4])


def main(argv) -> None:
    del argv
    rng = np.random.default_rng(0)
    source = rng.normal(size=(WORKERS * UNITS, 64)).astype(np.float32)
    orders = np.stack([rng.permutation(UNITS) for _ in range(WORKERS)])
    for name, (read, counts) in ROWS.items():
        for count in counts:
            rates = [
                indices_per_second(read(source, orders, count)) for _ in range(flags.FLAGS.repeats)
            ]
            row = {"reader": name, "processes": count, "repeats": len(rates)}
            row["indices_per_s"] = round(statistics.median(rates))
            print(row | {"slowest": round(min(rates))}, flush=True)


if __name__ == "__main__":
    flags.DEFINE_integer("repeats", 5, "number of epochs per row", lower_bound=1)
    app.run(main)
