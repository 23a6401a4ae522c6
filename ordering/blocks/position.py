"""The position of a run in its blocks, and its conversion for another number of workers."""

from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Int, PyTree

from ordering.base import Ordering, State
from ordering.blocks.units import Blocks
from ordering.data.place import Count, digest_of, part_of
from ordering.global_orders import GlobalShuffleState, GlobalState
from ordering.resizing import resize as resize_order
from syncopate import plans


class BlockState(NamedTuple):
    """A position in the blocks and the order's state there; see `BlockEpochs.state`."""

    order: State  # the states of all workers
    epoch: Count
    units: Count  # units of this epoch in the windows that all workers together have read
    loads: Count  # batches read since the run began
    batch: Count  # batches of the next window that were read
    summed: Count  # how many of these are in `sums`
    sums: PyTree  # sums of gradients for the window's blocks
    window: Count  # K
    batch_size: Count  # b
    seed: Count
    unit_size: Count  # S
    filter: Count  # digest of the records that `keep` keeps, 0 without it
    digest: Count  # of the order
    files: Int[ArrayLike, "F 3"]  # number of records and digest of each file


def check(saved: Any, fresh: BlockState, blocks: Blocks) -> dict[str, Any]:
    """The parts of a saved state; raises ValueError if it has other blocks or sizes."""
    try:
        parts = {name: part_of(saved, name) for name in BlockState._fields}
    except (KeyError, IndexError, AttributeError, TypeError):
        raise ValueError(
            f"state is a {type(saved).__name__}: pass what BlockEpochs.state gave."
        ) from None
    for name in BlockState._fields[1:]:
        if name != "sums":
            array, kind = plans.as_array(parts[name])
            fits = array.shape[1:] == (3,) if name == "files" else array.ndim == 0
            if not fits or array.dtype.kind not in "iu" or (array < 0).any():
                raise ValueError(f"state has {kind} as {name!r}: pass it as it was saved.")
            parts[name] = array
    _check_files(parts["files"], fresh.files, blocks)
    if parts["filter"] != fresh.filter:
        was, now = ("with a filter" if x else "without" for x in (parts["filter"], fresh.filter))
        now = "with another" if parts["filter"] and fresh.filter else now
        raise ValueError(
            f"the state was saved {was} keep= of split, and these blocks are {now}: pass the same "
            "keep."
        )
    names = {"unit_size": "records in a block", "seed": "the seed"}
    inside = parts["batch"] or parts["summed"]
    if inside:  # in the middle of a window
        names |= {"window": "blocks in a window", "batch_size": "records in a batch"}
    for name, what in names.items():
        if parts[name] != getattr(fresh, name):
            where = ", inside a window" if name in ("window", "batch_size") else ""
            raise ValueError(
                f"{what}: the state was saved with {parts[name]}{where}, now it is "
                f"{getattr(fresh, name)}. Pass the same number."
            )
    if not inside:
        parts["sums"] = fresh.sums  # zeros
    return parts


def _check_files(files, expected, blocks):
    if len(files) != len(expected):
        raise ValueError(
            f"the state was saved with {len(files)} files, now there are {len(expected)}: pass the "
            "same files in the same order."
        )
    for part, saved, given in zip(blocks.parts, files, expected, strict=True):
        if (saved != given).any():
            raise ValueError(
                f"{part.name} is not the file with which the state was saved: it has {given[0]} "
                f"records, and had {saved[0]}, or its bytes differ. Restore the file, or start "
                "again without a state."
            )


def resize(state: BlockState, fresh: State, order: Ordering) -> BlockState:
    """The state for another number of workers: each record is still visited once per epoch.

    The W' new workers share the remaining blocks of the epoch. Observations of this epoch are
    dropped, so the next epoch repeats the same order, or draws a new one if it is a shuffle. From
    then on the order observes as before.

    Args:
      state: the state of all W workers, saved when `window_ended`, with an order over all units
        (`global_order`, `global_reshuffling`).
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
    if not isinstance(state, BlockState):
        raise ValueError(f"state is a {type(state).__name__}: pass what BlockEpochs.state gave.")
    if isinstance(order, Ordering) and order.computed:
        return state  # it is of any number of workers
    orders = state.order
    if not isinstance(orders, GlobalState | GlobalShuffleState) or np.ndim(orders.current) != 2:
        raise ValueError(
            f"the state's order is a {type(orders).__name__}: pass the states of all workers, of "
            "an order over all units, such as global_order or global_reshuffling."
        )
    if type(fresh) is not type(orders) or np.ndim(fresh.current) != 2:
        raise ValueError(
            f"fresh is a {type(fresh).__name__} and the state's order a {type(orders).__name__}: "
            "pass a first state of the same order, of all new workers."
        )
    old, new = len(orders.current), len(fresh.current)
    window, units = int(state.window), int(state.units)
    if old * window % new or units % new:
        raise ValueError(
            f"fresh has {new} workers, which cannot share {old} windows of {window} blocks: "
            f"pass a number that divides {old * window}."
        )
    if state.batch or state.summed:
        raise ValueError(
            f"the state is at batch {state.batch} of a window: continue with {old} workers until "
            "window_ended, and resize the state there."
        )
    resized, _ = resize_order(orders, fresh, order, units_per_step=window, visited=units // new)
    digest = digest_of(order, int(state.unit_size), int(state.units))
    return state._replace(order=resized, sums=(), digest=digest)
