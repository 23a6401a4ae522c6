"""Compares computed permutations: are they permutations, how random are they, and how fast?

    python -m benchmarks.permutations --part=quality
    python -m benchmarks.permutations --part=speed

*quality* counts for how many sizes up to 4,096, and for 65,537 and 262,145, a way is not a
permutation. Then it counts in cells where units land, pairs of neighbours, pairs of one place in
two epochs, and triples of neighbours. For small sizes a cell is a unit; for larger ones it is the
unit's high or its low bits. The numbers are (chi2 - df) / sqrt(2 df), with expectation 0 and
standard deviation 1. Above 4 a way is not random. Seeds are fixed.

*speed* reads a first batch of 10^10 units, or of fewer if a way has a limit, and then a million
indices. Memory is the peak of resident memory of a new process, less what it had after its imports.
"""

import functools
import importlib
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np
from absl import app, flags

import ordering
from benchmarks import timing
from ordering import permutations

PLACES = 48  # groups of three neighbours, in one permutation of many units
Way = Callable[[int, int, int, np.ndarray], np.ndarray]  # (M, seed, epoch, places) -> units


def counted(size, seed, epoch, places):
    return ordering.index_shuffle(places, size, jax.random.key(seed), epoch=epoch)


@functools.lru_cache(1)
def stored(size, seed, epoch):
    return np.random.default_rng((seed, epoch)).permutation(size)


def numpy_permutation(size, seed, epoch, places):
    return stored(size, seed, epoch)[places]


def grain(size, seed, epoch, places):
    """As `MapDataset.shuffle` calls it."""
    from grain._src.python.experimental.index_shuffle.python import index_shuffle_module

    call = functools.partial(
        index_shuffle_module.index_shuffle, max_index=size - 1, seed=seed + epoch, rounds=4
    )
    return np.array([call(int(i)) for i in places.ravel()]).reshape(places.shape)


def power_of_two(size, seed, epoch, places):
    """The rounds of Levanter's FeistelPermutation: multiplications, in halves of bits."""
    bits = max(1, (size - 1).bit_length())
    low = np.uint64(bits - bits // 2)
    mask = np.uint64((1 << int(low)) - 1)
    keys = np.random.default_rng((seed, epoch)).integers(0, 1 << int(low), 5, np.uint64)

    def once(x):
        left, right = x >> low, x & mask
        for key in keys:
            left, right = right, left ^ ((right * np.uint64(2654435761) + key) & mask)
        return left << low | right

    units = once(places.astype(np.uint64))
    while (beyond := units >= size).any():
        units[beyond] = once(units[beyond])
    return units.astype(np.int64)


def affine(size, seed, epoch, places):
    """A stride without a common divisor with M, and a start."""
    draw = np.random.default_rng((seed, epoch))
    stride = next(a for a in iter(lambda: int(draw.integers(1, size)), 0) if np.gcd(a, size) == 1)
    start = int(draw.integers(0, size))
    return ((stride * places.astype(object) + start) % size).astype(np.int64)


WAYS: dict[str, Way] = {
    "ordering.counted": counted,
    "numpy.random.permutation": numpy_permutation,
    "Grain's shuffle": grain,
    "5 rounds in a power of two": power_of_two,
    "a stride": affine,
}


def deviation(cells: np.ndarray, count: int) -> float:
    """(chi2 - df) / sqrt(2 df) of numbers of cells, all with the same expectation."""
    expected = cells.size / count
    chi2 = np.square(np.bincount(cells, minlength=count) - expected).sum() / expected
    return round(float((chi2 - count + 1) / np.sqrt(2 * (count - 1))), 1)


def deviations(units: np.ndarray, size: int) -> dict:
    """From the units [n, 3] at three neighbouring places and [n] of the next permutation."""
    a, b, c, later = units.T
    if size <= 16:
        following = b - (b > a)  # among the others
        third = c - (c > a).astype(int) - (c > b)
        return {
            "lands": deviation(a, size),
            "neighbours": deviation(a * (size - 1) + following, size * (size - 1)),
            "epochs": deviation(a * size + later, size * size),
            "triples": deviation(
                (a * (size - 1) + following) * (size - 2) + third, size * (size - 1) * (size - 2)
            ),
        }
    high = lambda x, count: x // (size // count)  # noqa: E731
    low = lambda x, count: x % count  # noqa: E731
    worst = lambda cells: max((cells(high), cells(low)), key=abs)  # noqa: E731
    return {
        "lands": worst(lambda bits: deviation(bits(a, 256), 256)),
        "neighbours": worst(lambda bits: deviation(bits(a, 16) * 16 + bits(b, 16), 256)),
        "epochs": worst(lambda bits: deviation(bits(a, 16) * 16 + bits(later, 16), 256)),
        "triples": worst(
            lambda bits: deviation((bits(a, 8) * 8 + bits(b, 8)) * 8 + bits(c, 8), 512)
        ),
    }


def drawn(way: Way, size: int, count: int, over: str) -> np.ndarray:
    """int64[n, 4], units at three neighbouring places, and of the first one in the next epoch."""
    starts = np.array([0]) if size <= 16 else np.linspace(0, size - 3, PLACES).astype(np.int64)
    places = starts[:, None] + np.arange(3)
    at = [(5, e) if over == "epochs" else (e, 0) for e in range(count + 1)]
    units = np.stack([way(size, *pair, places) for pair in at])
    return np.concatenate([units[:-1], units[1:, :, :1]], axis=-1).reshape(-1, 4)


def quality_rows(draws: int) -> Iterator[dict]:
    """One row per way and size; a deviation is the larger one over epochs or over keys."""
    for name, way in WAYS.items():
        sizes = [*range(2, 4097), 65_537, 262_145]
        wrong = [m for m in sizes if (np.bincount(way(m, 0, 0, np.arange(m))) != 1).any()]
        for size, count in (
            (5, draws),
            (12, draws),
            (196_608, draws // 10),
            (3 * 2**36, draws // 10),
        ):
            stored.cache_clear()
            row = {"way": name, "no permutation": len(wrong), "units": f"{size:,}"}
            if (way is grain and size > 2**31) or (way is numpy_permutation and size > 2**20):
                continue  # Grain's limit, and the memory's
            both = [deviations(drawn(way, size, count, over), size) for over in ("epochs", "keys")]
            yield row | {key: max((x[key] for x in both), key=abs) for key in both[0]}


def of_large_sizes(number: int = 1000) -> dict:
    """Places of random sizes up to 10^12: collisions, and inverses that are wrong."""
    draw, collisions, wrong = np.random.default_rng(0), 0, 0
    for size in draw.integers(1, 10**12, number).tolist():
        places = np.unique(draw.integers(0, size, 10_000))
        domain = permutations.domain_of(size)
        key_data = jax.random.key_data(jax.random.key(size % 1000))
        keys = permutations.keys_of_epoch(key_data, 0, domain)
        units = permutations.shuffle_by_numpy(places, domain, keys)
        collisions += len(places) - len(np.unique(units))
        back = permutations.shuffle_by_numpy(units, domain, keys, permutations.feistel_inverse)
        wrong += int((back != places).sum())
    return {"sizes": number, "collisions": collisions, "wrong inverses": wrong}


class Numbers:
    """Any number of examples: an example is its number modulo 1,000."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return np.int32(i % 1000)

    def __getitems__(self, numbers):
        return [np.int32(i % 1000) for i in numbers]


def read_counted(size):
    order = ordering.counted(size, units_per_step=32)
    reads = ordering.data.read_epochs(Numbers(size), order, jax.random.key(0), workers=8)
    next(reads)
    indices = order.units(reads.order_state)
    return lambda: np.asarray(indices[: 2**20])


def read_grain(size):
    import grain as package

    examples = package.MapDataset.source(Numbers(size)).shuffle(seed=0)
    next(iter(examples.batch(256)))
    return lambda: [examples._shuffled_index(i) for i in range(2**20)]


def read_grain_counted(size):
    import grain as package

    order = ordering.counted(size)
    indices = order.units(order.init(jax.random.key(0), None))
    source = Numbers(size)
    examples = package.MapDataset.source(indices).map(lambda i: source[i])
    next(iter(examples.batch(256)))
    return lambda: [indices[i] for i in range(2**20)]


def read_torch(size):
    import torch

    sampler = iter(torch.utils.data.RandomSampler(Numbers(size)))
    next(sampler)
    return lambda: [next(sampler) for _ in range(2**20)]


def read_mosaic(size):
    from streaming.base.shuffle import get_shuffle

    indices = get_shuffle("py1e", np.full(size // 10_000, 10_000), 8, 0, 0)
    return lambda: indices[: 2**20].tolist()


READERS = {  # way: (a reader's first batch, the most units that it takes here)
    "ordering.counted, 8 workers": (read_counted, 10**10),
    "ordering.counted in Grain": (read_grain_counted, 10**10),
    "Grain's shuffle": (read_grain, 2 * 10**9),
    "torch RandomSampler": (read_torch, 10**8),
    "mosaicml-streaming py1e": (read_mosaic, 10**8),
}
IMPORTS = {
    "torch RandomSampler": ("torch",),
    "mosaicml-streaming py1e": ("streaming.base.shuffle",),
}


def megabytes(field: str) -> float:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def speed_row(name: str) -> dict:
    """The first batch in this process, its memory, and then a million indices."""
    make, size = READERS[name]
    for module in (*IMPORTS.get(name, ()), "grain") if "rain" in name else IMPORTS.get(name, ()):
        importlib.import_module(module)
    jax.block_until_ready(jax.numpy.zeros(1) + 1)
    before, begun = megabytes("VmRSS"), time.perf_counter()
    read = make(size)
    first, peak = time.perf_counter() - begun, megabytes("VmHWM")
    begun = time.process_time()
    read()
    per_second = 2**20 / (time.process_time() - begun)
    return {
        "way": name,
        "units": f"{size:,}",
        "seconds to the first batch": round(first, 2),
        "MB": round(peak - before),
        "million indices a second": round(per_second / 1e6, 2),
    }


def speed_rows() -> Iterator[dict]:
    for name in READERS:
        command = [sys.executable, "-m", "benchmarks.permutations", "--part=row", f"--way={name}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", flush=True)
        else:
            yield json.loads(done.stdout.splitlines()[-1])


def main(argv) -> None:
    del argv
    values = flags.FLAGS
    if values.part == "quality":
        print(of_large_sizes(), flush=True)
        timing.print_rows(quality_rows(values.draws))
    elif values.part == "speed":
        timing.print_rows(speed_rows())
    else:
        print(json.dumps(speed_row(values.way)))


if __name__ == "__main__":
    flags.DEFINE_enum("part", "quality", ["quality", "speed", "row"], "what to measure")
    flags.DEFINE_enum("way", "ordering.counted, 8 workers", list(READERS), "of a row")
    flags.DEFINE_integer("draws", 20_000, "permutations of a small size", lower_bound=100)
    app.run(main)
