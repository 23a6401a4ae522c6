"""Where a run stands in its data, also for another number of workers."""

from typing import Any

import numpy as np

from ordering.base import Ordering, State
from ordering.blocks.split import Blocks
from ordering.global_order import DealtShuffleState, DealtState
from ordering.resize import resize as resize_order
from syncopate import plans

SIZES = {
    "unit_size": "records in a block",
    "window": "blocks in a window",
    "batch_size": "records in a batch",
    "seed": "the seed",
    "filter": "the digest of split's filter, 0 without keep=",
}
PLACE = ("epoch", "step", "files")


def fixed(blocks: Blocks, **sizes: int) -> dict[str, Any]:
    """What is the same in all positions of a run: its sizes and files."""
    sizes |= {"unit_size": blocks.unit_size, "filter": blocks.filter_digest}
    found: dict[str, Any] = {name: np.array(size, np.int64) for name, size in sizes.items()}
    return found | {"files": blocks.digests}


def checked(
    position: dict[str, Any], own: dict[str, Any], blocks: Blocks, steps: int, current: np.ndarray
) -> tuple[int, int]:
    """Its epoch and step; ValueError if it is not one of these blocks, sizes and orders."""
    check_form(position)
    found = {name: np.asarray(position[name]) for name in (*SIZES, *PLACE)}
    for name, what in SIZES.items():
        if found[name] != own[name]:
            raise ValueError(
                f"{what}: the position was saved with {found[name]}, now it is {own[name]}."
            )
    files, digests = found["files"], own["files"]
    if len(files) != len(digests):
        raise ValueError(
            f"the position was saved with {len(files)} files, now there are "
            f"{len(digests)}: pass the same files in the same sequence."
        )
    for part, saved, given in zip(blocks.parts, files, digests, strict=True):
        if (saved != given).any():
            raise ValueError(
                f"{part.name} is not the file with which the position was saved: it has {given[0]} "
                f"records, and had {saved[0]}, or its bytes differ. Restore the file, or begin "
                "anew without a position."
            )
    if not 0 <= found["step"] < steps or found["epoch"] < 0:
        raise ValueError(
            f"step {found['step']} of epoch {found['epoch']} is not one of an epoch of "
            f"{steps} steps: pass the position unchanged."
        )
    _check_orders(position["orders"], current)
    return int(found["epoch"]), int(found["step"])


def check_form(position: Any) -> None:
    """Raises ValueError unless it has the names and the kinds of values of a position."""
    if not isinstance(position, dict) or {*position} != {*SIZES, *PLACE, "orders"}:
        names = f" of {sorted(map(str, position))}" if isinstance(position, dict) else ""
        raise ValueError(
            f"position is a {type(position).__name__}{names}: pass what position() of read_blocks "
            "gave."
        )
    for name in (*SIZES, *PLACE):
        array, kind = plans.as_array(position[name])
        fits = array.shape[1:] == (3,) if name == "files" else array.ndim == 0
        if not fits or array.dtype.kind not in "iu":
            raise ValueError(f"position has {kind} as {name!r}: pass it as it was saved.")


def _check_orders(orders, current):
    """Raises ValueError unless the orders that are read, of this host, are among the saved ones."""
    if isinstance(orders, dict):
        raise ValueError(
            "the position's orders are a dict of a checkpoint: make them a state of the order, by "
            "flax.serialization.from_state_dict(state, orders)."
        )
    saved = getattr(orders, "current", None)
    if saved is None or not getattr(saved, "is_fully_addressable", True):
        return
    rows, known = (np.atleast_2d(np.asarray(x, np.int32)) for x in (current, saved))
    if not {row.tobytes() for row in rows} <= {row.tobytes() for row in known}:
        raise ValueError(
            f"live gives other orders, of shape {current.shape}, than the position holds, of shape "
            f"{saved.shape}: begin with position['orders'] as the state, or its rows of this "
            "host's workers; for another number of workers, resize the position first."
        )


def resize(
    position: dict[str, Any], fresh: State, order: Ordering, *, axis_name: str = "worker"
) -> dict[str, Any]:
    """The position for another number of workers: each record is still visited once per epoch.

    The blocks of each window of all W workers are shared by the W' new workers. What the order has
    observed of this epoch is dropped, so that the next epoch has the same order again, or a new one
    of a shuffle; from then on it observes as before.

    Args:
      position: of all W workers, saved where `window_ended`, with orders that deal blocks
        (`global_order`, `global_reshuffling`).
      fresh: a first state of `order` for W' workers with M' = W M / W' units each.
      order: the order for W' workers, with windows of K' = W K / W' blocks.
      axis_name: the workers' axis, by which `order` was made.

    Returns:
      The position for W' workers, for `read_blocks(window=K', batch_size=W b / W')`.

    Raises:
      ValueError: for orders with fixed shards, numbers that do not divide, or a position inside a
        window.

    Examples:
      >>> import jax, numpy as np
      >>> from syncopate import ordering
      >>> blocks = ordering.blocks.split(np.arange(16), unit_size=2)
      >>> def orders_of(workers):
      ...     order = ordering.global_reshuffling(8 // workers)
      ...     keys = jax.random.split(jax.random.key(0), workers)
      ...     return order, jax.vmap(order.init, (0, None), axis_name="worker")(keys, None)
      >>> (_, two), (order, four) = orders_of(2), orders_of(4)
      >>> reads = ordering.blocks.read_blocks(blocks, lambda: two, window=2, batch_size=4)
      >>> before = next(reads)[0].ravel().tolist()
      >>> position = ordering.blocks.resize(reads.position(), four, order)
      >>> state = position["orders"]
      >>> reads = ordering.blocks.read_blocks(
      ...     blocks, lambda: state, window=1, batch_size=2, num_epochs=1, position=position
      ... )
      >>> after = [i for records, _ in reads for i in records.ravel().tolist()]
      >>> sorted(before + after) == list(range(16))
      True
    """
    check_form(position)
    state = position["orders"]
    if not isinstance(state, DealtState | DealtShuffleState) or np.ndim(state.current) != 2:
        raise ValueError(
            f"the position's orders are a {type(state).__name__}: pass those of all workers, of an "
            "order that deals blocks, as global_order or global_reshuffling."
        )
    if type(fresh) is not type(state) or np.ndim(fresh.current) != 2:
        raise ValueError(
            f"fresh is a {type(fresh).__name__} and the position's orders are a "
            f"{type(state).__name__}: pass the first state of all new workers of the same order."
        )
    old, new = len(state.current), len(fresh.current)
    unit_size, window, batch_size, step = (
        int(position[name]) for name in ("unit_size", "window", "batch_size", "step")
    )
    if old * window % new or old * batch_size % new:
        raise ValueError(
            f"fresh has {new} workers, who cannot share the windows of {old}, of {window} blocks "
            f"and batches of {batch_size}: pass a number that divides {old * window} and "
            f"{old * batch_size}."
        )
    ended, rest = divmod(step, -(-window * unit_size // batch_size))
    if rest:
        raise ValueError(
            f"the position is that of step {step}, inside a window: go on with {old} workers until "
            "window_ended, and resize the position that is saved there."
        )
    after = old * window // new
    resized, _ = resize_order(
        state, fresh, order, units_per_step=window, visited=ended * after, axis_name=axis_name
    )
    return position | {
        "orders": resized,
        "window": np.array(after, np.int64),
        "batch_size": np.array(old * batch_size // new, np.int64),
    }
