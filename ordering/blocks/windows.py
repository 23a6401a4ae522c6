"""Windows over several blocks, whose records are shuffled and cut into batches."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering.blocks.split import Blocks, check_blocks
from ordering.input.loader import check_batches
from ordering.input.steps import step_indices
from syncopate import plans


class Share(NamedTuple):
    """The workers of this host, where orders were made for another number of workers."""

    first: int
    count: int
    workers: int

    @classmethod
    def of(cls, share: Any) -> "Share":
        """The share; ValueError unless it is of three numbers that fit each other."""
        whole = isinstance(share, tuple) and len(share) == 3 and all(map(plans.is_whole, share))
        if not whole or not 0 <= share[0] < share[0] + share[1] <= share[2]:
            raise ValueError(
                f"share is {share!r}: pass (first, count, workers), whole numbers with "
                "first + count <= workers."
            )
        return cls(*share)


class Windows(Sequence):
    """One epoch of windows; see `windows`."""

    def __init__(self, blocks: Blocks, units: np.ndarray, sizes: tuple, seeds: tuple, axes: tuple):
        self._blocks, self._units, self._seeds, self._axes = blocks, units, seeds, axes
        self.window, self.batch_size, self._shuffle = sizes

    def __len__(self) -> int:
        return -(-self._units.shape[1] // self.window)

    @property
    def batches(self) -> int:
        """T, batches of a whole window."""
        return num_batches(self._blocks, self.window, self.batch_size)

    @property
    def mark(self) -> str:
        """Tells epochs apart: a checksum of the orders, the files, the sizes and the seed."""
        sizes = [self.window, self.batch_size, self._shuffle, *self._seeds, *self._axes[2]]
        arrays = self._units, self._blocks.digests.astype(np.int64), np.array(sizes)
        return f"{zlib.crc32(b''.join(x.tobytes() for x in arrays)):08x}"

    def __getitem__(self, number: int) -> tuple[PyTree[np.ndarray], Int[np.ndarray, "T ..."]]:
        return self.load(int(number))

    def load(self, number: int, read: Callable = map) -> tuple[PyTree, np.ndarray]:
        """`self[number]`, with the blocks read by `read(function, units)`."""
        if not 0 <= number < len(self):
            raise IndexError(f"there is no window {number} in an epoch of {len(self)}.")
        units = self._units[:, number * self.window : (number + 1) * self.window]
        batches = num_batches(self._blocks, units.shape[1], self.batch_size)
        full = [unit for unit in units.ravel().tolist() if self._blocks.sizes[unit]]
        found = dict(zip(full, read(self._blocks.read, full), strict=True))
        lanes = [self._lane(own.tolist(), found, batches) for own in units]
        first, last, shape = self._axes
        joined = jax.tree.map(lambda *x: np.concatenate(x, axis=1)[:, first:last], *lanes)
        return jax.tree.map(lambda x: x.reshape(len(x), *shape, *x.shape[2:]), joined)

    def _lane(self, units, found, batches):
        """The batches of one worker, [T, b, ...], and the place of each record's unit."""
        total = batches * self.batch_size
        sizes = [int(self._blocks.sizes[unit]) for unit in units]
        read = [found[unit] for unit in units if unit in found]
        count, places = sum(sizes), np.full(total, -1, np.int32)
        taken = np.zeros(total, np.int64)
        if self._shuffle:
            taken[:count] = permutation((*self._seeds, units[0]), count)
        else:
            taken[:count] = np.arange(count)
        places[:count] = np.repeat(np.arange(len(units), dtype=np.int32), sizes)[taken[:count]]
        if not read:  # a window of units without records, which still needs batches
            read = [self._blocks.read(int(np.argmax(self._blocks.sizes)))]
        records = self._blocks.taken(read, taken)
        shape = (batches, self.batch_size)
        return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), (records, places))


def num_batches(blocks: Blocks, units: int, batch_size: int) -> int:
    """T, batches of a window: the same on all workers, whichever units they read."""
    return -(-units * blocks.unit_size // batch_size)


def permutation(seeds: tuple[int, ...], size: int) -> Int[np.ndarray, "n"]:
    """A permutation that depends on the seeds alone, in every version of NumPy."""
    return np.argsort(
        np.random.Philox(np.random.SeedSequence(seeds)).random_raw(size), kind="stable"
    )


def windows(
    blocks: Blocks,
    orders: Int[ArrayLike, "*W M"] | Sequence,
    *,
    window: int,
    batch_size: int,
    epoch: int,
    seed: int = 0,
    num_units: int | None = None,
    total: int | None = None,
    shuffle: bool = True,
    share: Share | tuple[int, int, int] | None = None,
) -> Windows:
    """One epoch of blocks in the sequence of their orders, cut into batches: for other loaders.

    A window is K blocks that follow each other in a worker's order. It is read by K requests, its
    records are shuffled, and cut into T = ceil(K S / b) batches. The shuffle depends on the seed,
    the epoch and the window alone, so any number of readers gives the same batches.

    Windows are elements that a Grain `MapDataset.source`, PyTorch's `DataLoader(windows,
    batch_size=None)` and `ordering.input.batches` read in their processes and threads;
    `batches_of` cuts what they deliver into batches.

    Args:
      blocks: of `split`.
      orders: int[M] or int[W, M], as in `ordering.input.step_indices`.
      window: K >= 1, blocks in a window; `units_per_step` of the order.
      batch_size: b >= 1, records of a worker in a batch.
      epoch: >= 0, its number.
      seed: >= 0, for the shuffles.
      num_units: as in `step_indices`, for a slice of orders that starts at a window.
      total: `len(blocks)` for orders that are dealt; None for fixed shards.
      shuffle: whether records of a window are shuffled.
      share: `(first, count, workers)`: instead of the batches of W workers [W, b], deliver those of
        `count` workers from number `first` on, of `workers` that share each W b records.

    Returns:
      A sequence of windows `(records, places)`, leaves [T, W, b, ...] for orders int[W, M] and
      [T, b, ...] for int[M]. `places` holds for each record the place of its unit in the window,
      0 .. K - 1. It is -1 for a record that only fills a batch, where a window has fewer than K S
      records: leave it out of the loss.

    Raises:
      ValueError: for orders or sizes that do not fit the blocks.

    Examples:
      >>> import numpy as np, ordering
      >>> blocks = ordering.blocks.split(np.arange(12), unit_size=3)
      >>> epoch = ordering.blocks.windows(
      ...     blocks, [2, 0, 3, 1], window=2, batch_size=3, epoch=0, shuffle=False
      ... )
      >>> records, places = epoch[0]
      >>> records.tolist(), places.tolist()
      ([[6, 7, 8], [0, 1, 2]], [[0, 0, 0], [1, 1, 1]])
    """
    check_blocks(blocks)
    batch_size = plans.check_whole("batch_size", batch_size, 1)
    epoch = plans.check_whole("epoch", epoch, 0)
    seed = plans.check_whole("seed", seed, 0, 2**63 - 1)  # a position holds it in 64 bits
    if total is not None and (not plans.is_whole(total) or total != len(blocks)):
        raise ValueError(
            f"total is {total!r}, and there are {len(blocks)} blocks: pass None or that."
        )
    indices, _ = step_indices(orders, units_per_step=1, num_units=num_units, total=total)
    workers = np.shape(orders)[0] if np.ndim(orders) == 2 else 1
    units = indices.reshape(-1, workers).T
    owned = units.shape[1] if num_units is None else int(num_units)
    window = plans.check_whole("window", window, 1, owned)
    # A row of a dealt order may be that of one worker among others, on other hosts.
    if (total is None or np.ndim(orders) == 1) and workers * owned != len(blocks):
        raise ValueError(
            f"the orders name {workers} times {owned} units, and there are {len(blocks)} blocks: "
            "split the files with multiple_of=the number of workers, and make orders for these "
            "units; for those of dealt orders pass int[W, M] and total."
        )
    units, axes = _shared(units, batch_size, share, np.ndim(orders) == 2)
    return Windows(blocks, units, (window, batch_size, shuffle), (seed, epoch), axes)


def _shared(units, batch_size, share, has_workers) -> tuple[np.ndarray, tuple]:
    """The orders to read, and (first, last, shape) of the records to deliver of each batch."""
    workers = len(units)
    if share is None:
        shape = (workers, batch_size) if has_workers else (batch_size,)
        return units, (0, workers * batch_size, shape)
    first, count, parts = Share.of(share)
    if workers * batch_size % parts:
        raise ValueError(
            f"share is of {parts} workers, who cannot share the {workers * batch_size} records of "
            "a batch: pass a number that divides them."
        )
    size = workers * batch_size // parts
    low, high = first * size, (first + count) * size
    lane, end = low // batch_size, -(-high // batch_size)
    begin = lane * batch_size
    return units[lane:end], (low - begin, high - begin, (count, size))


def batches_of(loaded: Iterable, *, first_batch: int = 0) -> Iterator[tuple[PyTree, Any]]:
    """The batches of windows, one after the other.

    Args:
      loaded: windows, as a loader delivers them.
      first_batch: >= 0, batches of the first window to leave out, for a run that resumes.

    Returns:
      An iterator of `(records, places)`, leaves [W, b, ...] or [b, ...].

    Examples:
      >>> import numpy as np, ordering
      >>> blocks = ordering.blocks.split(np.arange(4), unit_size=2)
      >>> epoch = ordering.blocks.windows(
      ...     blocks, [1, 0], window=2, batch_size=2, epoch=0, shuffle=False
      ... )
      >>> [records.tolist() for records, _ in ordering.blocks.batches_of(epoch, first_batch=1)]
      [[0, 1]]
    """
    check_batches("loaded", loaded)
    skipped = plans.check_whole("first_batch", first_batch, 0)
    for records, places in loaded:
        for t in range(skipped, len(places)):
            yield jax.tree.map(lambda x: x[t], (records, places))  # noqa: B023
        skipped = 0
