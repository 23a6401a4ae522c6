"""The position of a run in its blocks, and its conversion for another number of workers."""

from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree, UInt32

from ordering import base
from ordering.base import Ordering, State
from ordering.blocks.units import Blocks
from ordering.data import place
from ordering.data.batches import Sizes
from ordering.data.place import Count
from ordering.resizing import resize as resize_order


class BlockState(NamedTuple):
    """A position in the blocks and the order's state there; see `BlockEpochs.state`."""

    order: State  # the states of all workers
    epoch: Count
    units: Count  # units of this epoch in the windows that all workers together have read
    loads: Count  # batches read since the run began
    digest: UInt32[np.ndarray, ""]  # of the order
    batch: Count  # batches of the next window that were read
    summed: Count  # how many of these are in `sums`
    sums: PyTree  # sums of gradients for the window's blocks
    window: Count  # K
    batch_size: Count  # b
    seed: Count
    unit_size: Count  # S
    filter: Count  # digest of the records that `keep` keeps, 0 without it
    files: Int[ArrayLike, "F 3"]  # number of records and digest of each file


COUNTS = ("epoch", "units", "loads", "batch", "summed")
SIZES = {"unit_size": "records in a block", "filter": "the digest of keep=", "seed": "the seed"}
OF_WINDOW = {"window": "blocks in a window", "batch_size": "records in a batch"}


def restore(
    saved: Any, fresh: BlockState, blocks: Blocks, order: Ordering, sizes: Sizes
) -> BlockState:
    """A saved state with the types of a fresh one; raises ValueError if it is of something else."""
    parts = _parts_of(saved)
    counts = place.counts_of(parts, (*COUNTS, *SIZES, *OF_WINDOW))
    _check_files(np.asarray(parts["files"]), fresh.files, blocks)
    inside = counts["batch"] or counts["summed"]  # of a window
    for name, what in (SIZES | OF_WINDOW if inside else SIZES).items():
        if counts[name] != getattr(fresh, name):
            where = ", inside a window" if name in OF_WINDOW else ""
            raise ValueError(
                f"{what}: the state was saved with {counts[name]}{where}, now it is "
                f"{getattr(fresh, name)}. Pass the same."
            )
    place.check_place(counts["units"], order, sizes, aligned=True)
    place.check_digest(parts, order, 1, counts["units"])
    same = (*OF_WINDOW, "files") if inside else (*OF_WINDOW, "files", "sums")
    return place.restore(fresh, parts | {name: getattr(fresh, name) for name in same})


def _parts_of(state: Any) -> dict[str, Any]:
    try:
        return {name: place.part_of(state, name) for name in BlockState._fields}
    except place.LOST:
        raise ValueError(f"state is a {type(state).__name__}: {place.SAVED}") from None


def _check_files(files, expected, blocks):
    if files.shape != expected.shape:
        raise ValueError(
            f"state.files is {files.dtype}{list(files.shape)}, and the blocks are of "
            f"{len(expected)} files: pass the same files in the same order."
        )
    for part, saved, given in zip(blocks.parts, files, expected, strict=True):
        if (saved != given).any():
            raise ValueError(
                f"{part.name} has {given[0]} records, and had {saved[0]} or other bytes when the "
                "state was saved: restore the file, or pass no state."
            )


def resize(state: BlockState | PyTree, fresh: State, order: Ordering) -> BlockState:
    """The state for another number of workers: each record is still visited once per epoch.

    The W' new workers share the remaining blocks of the epoch. Observations of this epoch are
    dropped, so the next epoch repeats the same order, or draws a new one if it is a shuffle. From
    then on the order observes as before.

    Args:
      state: the state of all W workers, or what a checkpoint makes of it, saved when
        `window_ended`, with an order over all units (`global_order`, `global_reshuffling`).
      fresh: a first state of `order` for W' workers with M' = W M / W' units each.
      order: the order for W' workers, with windows of K' = W K / W' blocks.

    Returns:
      The state for W' workers, for `read_blocks(state=)`. With batches of W b / W' records, all
      workers together read as many as before.

    Raises:
      ValueError: for orders with fixed shards, numbers that do not divide each other, or a state
        inside a window.

    Examples:
      >>> import jax, numpy as np
      >>> from syncopate import ordering
      >>> blocks, key = ordering.blocks.split(np.arange(16), unit_size=2), jax.random.key(0)
      >>> def order_of(workers):
      ...     return ordering.global_reshuffling(8 // workers, units_per_step=4 // workers)
      >>> reads = ordering.blocks.read_blocks(blocks, order_of(2), key, workers=2, batch_size=4)
      >>> before = next(reads)[0].ravel().tolist()
      >>> fresh = ordering.init_workers(order_of(4), key, workers=4)
      >>> state = ordering.blocks.resize(reads.state(), fresh, order_of(4))
      >>> reads = ordering.blocks.read_blocks(
      ...     blocks, order_of(4), key, workers=4, batch_size=2, num_epochs=1, state=state
      ... )
      >>> after = [i for records, _ in reads for i in records.ravel().tolist()]
      >>> sorted(before + after) == list(range(16))
      True
    """
    base.check_order(order)
    if order.computed:
        return state  # it is of any number of workers
    parts = _parts_of(state)
    counts = place.counts_of(parts, ("batch", "summed", "window", "units"))
    if counts["batch"] or counts["summed"]:
        raise ValueError(
            f"the state is at batch {counts['batch']} of a window: continue until window_ended "
            "with the workers it has, and resize it there."
        )
    if not order.is_global or np.ndim(getattr(fresh, "current", 0)) != 2:
        raise ValueError(
            f"order is a {type(order).__name__} and fresh a {type(fresh).__name__}: pass an order "
            "over the units of all workers, as of global_order, and its first state of all."
        )
    visited = counts["units"] // len(fresh.current)
    resized, _ = resize_order(
        parts["order"], fresh, order, units_per_step=counts["window"], visited=visited
    )
    digest = place.digest_of(order, 1, counts["units"])
    return BlockState(**parts | {"order": resized, "sums": (), "digest": digest})
