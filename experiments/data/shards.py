"""Which training examples each worker has, and what a worker weighs in means.

Orders that give examples or units anew to all workers in every epoch have no shards.
"""

import numpy as np

from syncopate.refusals import UserError

SHARDS = ("equal", "by_class", "sizes")
WEIGHTS = ("equal", "examples")
PARTS = 1, 2, 4, 4  # of every four workers' examples: one has a half, one a quarter, two an eighth


def check(kind: str, workers: int) -> None:
    """Raises ValueError for shards that so many workers cannot have."""
    if kind == "sizes" and workers % len(PARTS):
        raise UserError(
            f"--shards is sizes with {workers} workers: of every four one has a half of their "
            "examples, one a quarter and two an eighth. Pass --workers=4 or a multiple."
        )


def units_per_worker(kind: str, units: int, workers: int) -> int:
    """M, of the whole set's units: of unequal sizes the units of the largest shard.

    Smaller shards have a half or a quarter of M units, and visit each twice or four times in an
    epoch, so that an epoch has equally many steps for all workers.
    """
    if kind != "sizes":
        return units // workers
    largest = PARTS[-1]  # which every other shard divides
    whole = units // (workers // 2) // largest * largest
    if not whole:
        raise UserError(
            f"--shards is sizes and there are {units} units of {workers} workers: an eighth of "
            "four workers' units is none. Lower --workers or --unit_size."
        )
    return whole


def repeats_of(kind: str, workers: int) -> np.ndarray:
    """int[W], how often each worker visits an example in an epoch."""
    return np.resize(PARTS, workers) if kind == "sizes" else np.ones(workers, int)


def weights_of(kind: str, workers: int) -> tuple[float, ...]:
    """Each worker's number of examples over their mean.

    With these weights the mean over workers of means over shards is the mean over examples.
    """
    counts = 1 / repeats_of(kind, workers)
    return tuple((counts / counts.mean()).tolist())


def units_used(kind: str, units: int, workers: int) -> int:
    """The units of all workers, each counted once, of M per worker."""
    return int((units // repeats_of(kind, workers)).sum())


def examples_of(train, kind: str, workers: int, units: int, unit_size: int) -> np.ndarray | None:
    """int[W, M, S], the examples of every worker's units; None for neighbours in their order."""
    if kind == "equal":
        return None
    if kind == "by_class":
        numbers = np.argsort(labels_of(train)[: workers * units * unit_size], kind="stable")
        return numbers.reshape(workers, units, unit_size)
    sizes = units // repeats_of(kind, workers)
    starts = np.cumsum(sizes) - sizes
    unit = starts[:, None] + np.arange(units) % sizes[:, None]
    return unit[..., None] * unit_size + np.arange(unit_size)


def labels_of(train):
    """[N], the class of every example, or its shape; ValueError without classes in memory."""
    labels = train.get("y") if isinstance(train, dict) else None
    if labels is None or len(labels.shape) != 1 or labels.dtype.kind not in "iub":
        raise UserError(
            "--shards is by_class, which needs one class of every example in memory, as digits "
            "have: choose another --task, or --shards=sizes."
        )
    return labels
